"""What `check`, `ls` and `clear` find on the servers."""

from kvcascade.tiers.base import Holding, Probe

from .settings import RedisSettings

__all__ = ["clear", "holdings", "probe"]


def probe(settings: RedisSettings, chunk_bytes: int | None) -> Probe:
    raise NotImplementedError


def holdings(settings: RedisSettings) -> list[Holding]:
    raise NotImplementedError


def clear(settings: RedisSettings, tenant: str | None) -> list[str]:
    raise NotImplementedError
