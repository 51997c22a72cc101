"""A bucket of S3, or of any store that speaks its protocol, that many engines share."""

from .settings import S3Settings

__all__ = ["S3Settings"]
