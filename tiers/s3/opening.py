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
from .engines import Presence
from .epochs import Epoch, Epochs
from .failures import NoBucket
from .layout import Home
from .messages import parsed

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["Opened", "acting", "open_bucket", "too_new"]


@dataclass(slots=True)
class Opened:
    """All that a tier works on. It belongs to one process."""

    bucket: Bucket
    namespace: Namespace
    home: Home
    epochs: Epochs
    presence: Presence
    epoch: Epoch
    writes: bool

    @property
    def stamp(self) -> bytes:
        return self.namespace.stamp(self.epoch.mark)

    def arrive(self, end: float) -> None:
        """Says in the bucket that this engine is in its epoch.

        Raises:
            TierError: it can't be said.
        """
        if self.writes:
            self.epochs.note(self.epoch, end)
            self.presence.beat(self.stamp, end)


def open_bucket(settings: "S3Settings", context: OpenContext) -> Opened:
    """Enters the bucket, and says in it what the namespace is.

    Raises:
        ConfigError: it can never be opened like this.
        TierUnavailable: it can't be opened now.
    """
    end = time.monotonic() + settings.deadline
    bucket = Bucket(settings)
    try:
        with acting(bucket):
            return _opened(settings, context, bucket, end)
    except BaseException:
        bucket.close()
        raise


def _opened(settings: "S3Settings", context: OpenContext, bucket: Bucket, end: float) -> Opened:
    namespace, writes = context.namespace, settings.write != "off"
    home = Home.of(settings.prefix, namespace.digest.hex())
    epochs = Epochs(bucket, home, namespace)
    epoch = _enter(settings, bucket, epochs, context.epoch, end)
    _describe(bucket, home, namespace, writes, end)
    opened = Opened(bucket, namespace, home, epochs, Presence(bucket, home), epoch, writes)
    opened.arrive(end)
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


def _describe(bucket: Bucket, home: Home, namespace: Namespace, writes: bool, end: float) -> None:
    said = parsed(bucket.read(home.description, end))
    if said is not None and (problem := too_new(home, said)):
        raise ConfigError(problem)
    if writes:
        facts = {"format": FORMAT, "fields": dict(namespace.fields)}
        body = json.dumps(facts, indent=1, ensure_ascii=False).encode()
        if said is None:
            bucket.write(home.description, body, end)
        bucket.learn_from(home.description, body, end)


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
