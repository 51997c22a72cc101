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
    weights: str
    """Those that the engine has named at start."""
    writes: bool
    epoch: Epoch | None = None
    """None where the engine only reads, and nobody who writes has begun its epoch yet."""

    @property
    def stamp(self) -> bytes | None:
        return None if self.epoch is None else self.namespace.stamp(self.epoch.mark)

    def enter(self, end: float) -> None:
        """Enters the epoch of its weights, and says so in the bucket.

        Raises:
            TierError: it can't be said.
        """
        enter = self.epochs.enter if self.writes else self.epochs.current
        self.epoch = enter(self.weights, end)
        self.arrive(end)

    def arrive(self, end: float) -> None:
        """Says in the bucket that this engine is in its epoch.

        Raises:
            TierError: it can't be said.
        """
        if self.writes and self.epoch is not None and self.stamp is not None:
            self.epochs.note(self.epoch, end)
            self.presence.beat(self.stamp, end)

    def forked(self) -> None:
        """In a fork, which is an engine of its own."""
        self.bucket.forked()
        self.presence = Presence(self.bucket, self.home)


def open_bucket(settings: "S3Settings", context: OpenContext) -> Opened:
    """Enters the bucket, and says in it what the namespace is.

    Raises:
        ConfigError: it can never be opened like this.
        TierUnavailable: it can't be opened now.
    """
    bucket = Bucket(settings)
    end = time.monotonic() + settings.deadline
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
    _reach(settings, bucket, home, end)
    _describe(bucket, home, namespace, writes, end)
    opened = Opened(bucket, namespace, home, epochs, Presence(bucket, home), context.epoch, writes)
    opened.enter(end)
    return opened


def _reach(settings: "S3Settings", bucket: Bucket, home: Home, end: float) -> None:
    """Makes sure that the bucket is there."""
    try:
        bucket.page(home.epochs, end, most=1)
    except NoBucket as error:
        if not settings.create_bucket:
            raise ConfigError(
                f"{bucket.place}: there is no such bucket; make it, or let `create_bucket: true` do so"
            ) from error
        bucket.create(end)


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
