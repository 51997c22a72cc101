"""The redis tier: chunks on a Redis or Valkey server, which engines share."""

from .settings import RedisSettings

__all__ = ["RedisSettings"]
