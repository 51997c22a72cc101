"""Entering a bucket."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING

from kvcascade.errors import ConfigError, TierError, TierUnavailable
from kvcascade.tiers.base import OpenContext
from kvcascade.tiers.envelope import FORMAT
from kvcascade.types import Namespace

from .bucket import Bucket
from .epochs import Epoch, Epochs
from .failures import NoBucket
from .layout import Home, epoch_description

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["Opened", "acting", "describe_epoch", "open_bucket", "parsed", "too_new"]


@dataclass(slots=True)
class Opened:
    """All that a tier works on. It belongs to one process."""

    bucket: Bucket
    namespace: Namespace
    home: Home
    epochs: Epochs
    epoch: Epoch
    writes: bool

    @property
    def stamp(self) -> bytes:
        return self.namespace.stamp(self.epoch.mark)


def open_bucket(settings: "S3Settings", context: OpenContext) -> Opened:
    """Enters the bucket, and says in it what the namespace is.

    Raises:
        ConfigError: it can never be opened like this.
        TierUnavailable: it can't be opened now.
    """
    end = time.monotonic() + settings.deadline
    bucket = Bucket(settings)
    home = Home.of(settings.prefix, context.namespace.digest.hex())
    epochs = Epochs(bucket, home)
    with acting(bucket):
        epoch = _enter(settings, bucket, epochs, context.epoch, end)
        opened = Opened(bucket, context.namespace, home, epochs, epoch, settings.write != "off")
        _describe(opened, end)
        describe_epoch(opened, end)
    return opened


def _enter(settings: "S3Settings", bucket: Bucket, epochs: Epochs, name: str, end: float) -> Epoch:
    try:
        return epochs.enter(name, end)
    except NoBucket as error:
        if not settings.create_bucket:
            raise ConfigError(
                f"{bucket.place}: there is no such bucket; make it, or let `create_bucket: true` do so"
            ) from error
    bucket.create(end)
    return epochs.enter(name, end)


def describe_epoch(opened: Opened, end: float) -> None:
    """Says in the bucket which epoch it is, for those who look into it."""
    epoch = opened.epoch
    facts = {"weights": epoch.name, "generation": epoch.generation, "private": bool(epoch.private)}
    _say(opened, epoch_description(opened.home.epoch(opened.stamp)), facts, end)


def _describe(opened: Opened, end: float) -> None:
    said = _say(opened, opened.home.description, {"format": FORMAT, "fields": dict(opened.namespace.fields)}, end)
    if problem := too_new(opened.home, said):
        raise ConfigError(problem)


def _say(opened: Opened, name: str, facts: dict[str, object], end: float) -> dict[str, object]:
    """Writes facts down, where that has not been done. Returns what is there."""
    said = parsed(opened.bucket.read(name, end))
    if said is None and opened.writes:
        opened.bucket.write(name, json.dumps(facts, indent=1, ensure_ascii=False).encode(), end)
    return said or facts


def parsed(body: bytes | None) -> dict[str, object] | None:
    """What an object says in JSON; None where it says nothing."""
    try:
        said = json.loads(body or b"")
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def too_new(home: Home, said: dict[str, object]) -> str:
    """What is wrong with a namespace that a newer version has written; "" where nothing is."""
    version = said.get("format")
    if not isinstance(version, int) or version <= FORMAT:
        return ""
    return (
        f"prefix: {home.path} was written in format {version}, by a newer version; this one knows {FORMAT}. It is "
        f"left untouched: use another `prefix`, or the newer version"
    )


@contextmanager
def acting(bucket: Bucket) -> Iterator[None]:
    """Tells what a person has to do something about from what may pass.

    Raises:
        ConfigError: for what the store refuses, and for a certificate that is not trusted.
    """
    try:
        yield
    except TierUnavailable as error:
        if isinstance(error.__cause__, SSLCertVerificationError):
            raise ConfigError(str(error)) from error
        raise
    except TierError as error:
        raise ConfigError(f"{bucket.place}: {error}") from error
