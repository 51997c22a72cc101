"""The redis tier: chunks on servers that many engines share."""

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError, TierError, TierRefused, TierUnavailable
from kvcascade.tiers.base import OpenContext, Tier
from kvcascade.tiers.calls import Calls
from kvcascade.tiers.envelope import HEADER_BYTES
from kvcascade.types import MAX_KEY_BYTES, Buffer, Capabilities, Changes, Entry, Key, Namespace, Outcome, Usage

from .chunks import Era, Names, client_name, fetch, store, store_terms
from .engines import Presence, new_identity
from .epochs import Epoch, Epochs
from .exchange import LARGEST, Answer, Exchange, Request, plain
from .links import Links
from .listing import entries
from .replies import Refusal, Stored, error_of, is_too_large
from .settings import Location
from .uses import Uses

if TYPE_CHECKING:
    from .settings import RedisSettings

__all__ = ["RedisTier"]

log = logging.getLogger("kvcascade.tiers.redis")

WATCH_EVERY = 30.0
"""Seconds between two looks whether the epoch is over."""


class RedisTier(Tier):
    """Chunks on a Redis or Valkey server that other engines use as well, each chunk one value.

    A value is set in one step, if it is not there, and carries its envelope: so it is there with all of its bytes
    or not at all, and a reply that belongs to another key is seen. `usage` is rough: what this engine has put
    there and taken away.

    A fork of the process goes on with connections of its own.

    Notes:
        Each call works in the era that it finds when it begins. `_moving` covers moves to another epoch, with
        their I/O; `_counting` the sums.
    """

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, settings: "RedisSettings", namespace: Namespace) -> None:
        self._settings = settings
        self._namespace = namespace
        self._names = Names.of(settings.prefix, namespace)
        self._where = ", ".join(map(str, settings.locations))
        self._terms = store_terms(settings.ttl)
        self._largest = LARGEST
        self._epoch: Epoch | None = None
        self._era: Era | None = None
        self._chunks = self._bytes = 0
        self._uses = Uses()
        self._watched = time.monotonic()
        self._told: Epoch | None = None
        self._connect()
        _opened.add(self)

    def _connect(self) -> None:
        """Everything that belongs to one process."""
        self._calls = Calls(f"the redis tier at {self._where}")
        self._moving = threading.Lock()
        self._counting = threading.Lock()
        who = new_identity()
        self._links = Links(self._settings, client_name(self._namespace.digest.hex(), who))
        self._exchange = Exchange(self._links, self._settings.deadline)
        self._presence = Presence(self._names.engine(who), self._exchange)
        self._epochs = Epochs(self._namespace, self._names, self._exchange, self._settings.deadline)

    @classmethod
    def open(cls, settings: "RedisSettings", context: OpenContext) -> "RedisTier":
        """Enters the epoch of the engine's weights.

        Raises:
            ConfigError: it can never be opened like this.
            TierUnavailable: it can't be opened now.
        """
        tier = cls(settings, context.namespace)
        try:
            tier._begin(context)
        except TierRefused as error:
            tier.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            tier.close()
            raise
        return tier

    def _begin(self, context: OpenContext) -> None:
        self._enter(self._epochs.enter(context.epoch))
        self._beat()
        self._describe()
        self._largest = min(map(self._exchange.largest, self._links.route.primaries()))
        if context.chunk_bytes + HEADER_BYTES > self._largest:
            log.warning(
                "%s: chunks of %s are above the server's proto-max-bulk-len of %s, and will be refused",
                self._where,
                format_size(context.chunk_bytes),
                format_size(self._largest),
            )

    def _enter(self, epoch: Epoch) -> None:
        stamp = self._namespace.stamp(epoch.mark)
        self._epoch, self._era = epoch, Era.of(self._names, stamp)

    def _beat(self) -> None:
        """The engine is in another epoch; `maintain` says it again where it can't be said now."""
        if self._era is not None:
            with suppress(TierError):
                self._presence.beat(self._era.stamp)

    def _describe(self) -> None:
        """Writes down what the namespace stands for, for `ls`. A full server keeps nobody from starting."""
        name = self._names.description
        wanted = json.dumps(dict(self._namespace.fields)).encode()
        try:
            if self._exchange.command(name, "GET", name) != wanted:
                self._exchange.command(name, "SET", name, wanted)
        except TierError as error:
            log.debug("%s: the namespace is not described: %s", self._where, error)

    # Asking

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls:
            era = self._era
            if era is None:
                return [False] * len(keys)
            names = [era.name(key) for key in keys]
            answers = self._exchange.ask([plain(name, "EXISTS", name) for name in names])
            found = [self._exchange.checked(*pair) == 1 for pair in zip(names, answers, strict=True)]
            return found if era is self._era else [False] * len(keys)

    def entries(self) -> Iterator[Entry]:
        with self._calls:
            era = self._era
        return entries(self._exchange, self._calls, era) if era is not None else iter(())

    def usage(self) -> Usage:
        with self._calls, self._counting:
            return Usage(self._chunks, self._bytes, None)

    def footprint(self, nbytes: int) -> int:
        return nbytes + HEADER_BYTES

    # Reading

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.MISSING] * len(keys)
            requests = [
                fetch(era.name(key), buffer, era.stamp, key).request
                for key, buffer in zip(keys, buffers, strict=True)
            ]
            answers = self._fetch(requests)
            outcomes = [self._judge(*pair) for pair in zip(requests, answers, strict=True)]
            return outcomes if era is self._era else [Outcome.MISSING] * len(keys)

    def _fetch(self, requests: Sequence[Request]) -> list[Answer]:
        if not self._settings.read_replicas:
            return self._exchange.ask(requests)
        answers = self._exchange.ask(requests, replicas=True)
        left = [place for place, answer in enumerate(answers) if not isinstance(answer, Stored)]
        for place, answer in zip(left, self._exchange.ask([requests[place] for place in left]), strict=True):
            answers[place] = answer
        return answers

    def _judge(self, request: Request, answer: Answer) -> Outcome:
        if isinstance(answer, Stored) and answer.right:
            return Outcome.OK
        if answer is None:
            return Outcome.MISSING
        if isinstance(answer, TierError) or (isinstance(answer, Refusal) and answer.code != "WRONGTYPE"):
            return self._failed(request, answer)
        self._remove([request.name])
        return Outcome.CORRUPT

    # Removing

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.MISSING] * len(keys)
            return self._remove([era.name(key) for key in keys])

    def _remove(self, names: Sequence[bytes]) -> list[Outcome]:
        requests = [plain(name, "UNLINK", name) for name in names]
        return [
            self._removed(request, answer)
            for request, answer in zip(requests, self._exchange.ask(requests), strict=True)
        ]

    def _removed(self, request: Request, answer: Answer) -> Outcome:
        if isinstance(answer, Refusal | TierError):
            return self._failed(request, answer)
        if answer == 1:
            self._forget_one()
        return Outcome.OK if answer == 1 else Outcome.MISSING

    # Writing

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.REFUSED] * len(keys)
            if victims:
                self._remove([era.name(key) for key in victims])
            chunks: dict[Key, Buffer] = {}
            for key, buffer in zip(keys, buffers, strict=True):
                chunks.setdefault(key, buffer)
            outcomes = self._store(era, chunks)
            return [outcomes[key] for key in keys]

    def _store(self, era: Era, chunks: dict[Key, Buffer]) -> dict[Key, Outcome]:
        outcomes: dict[Key, Outcome] = {}
        while left := [key for key in chunks if key not in outcomes]:
            fit = [key for key in left if self._takes(key, chunks[key])]
            outcomes |= dict.fromkeys(left, Outcome.REFUSED)
            requests = [store(era, key, chunks[key], self._terms) for key in fit]
            answers = self._exchange.ask(requests)
            outcomes |= {
                key: self._stored(request, answer)
                for key, request, answer in zip(fit, requests, answers, strict=True)
            }
            for place, answer in enumerate(answers):
                if is_too_large(answer):  # the server hung up on those behind it
                    self._largest = min(self._largest, requests[place].weight + HEADER_BYTES - 1)
                    for key in fit[place + 1 :]:
                        del outcomes[key]
                    break
        return outcomes

    def _takes(self, key: Key, buffer: Buffer) -> bool:
        return 0 < len(key) <= MAX_KEY_BYTES and len(buffer) + HEADER_BYTES <= self._largest

    def _stored(self, request: Request, answer: Answer) -> Outcome:
        if isinstance(answer, Refusal | TierError):
            full = isinstance(answer, Refusal) and answer.code == "OOM"
            return Outcome.REFUSED if full or is_too_large(answer) else self._failed(request, answer)
        if answer is not None:
            with self._counting:
                self._chunks += 1
                self._bytes += self.footprint(request.weight)
        return Outcome.OK  # None: it was there already

    def _failed(self, request: Request, answer: Refusal | TierError) -> Outcome:
        if isinstance(answer, Refusal):
            answer = error_of(answer, self._place(request.name))
        return Outcome.failed(answer)

    def _place(self, name: bytes) -> Location:
        try:
            return self._links.route.primary(name)
        except TierError:
            return self._settings.locations[0]

    def _forget_one(self) -> None:
        """One chunk less; of the usual size, since it is not asked for."""
        with self._counting:
            if self._chunks:
                self._bytes -= self._bytes // self._chunks
                self._chunks -= 1

    # Moving to another epoch

    def move_to(self, epoch: str) -> None:
        with self._calls, self._moving:
            old = self._epoch
            self._era = None  # nothing is served until it is known that the old epoch is void
            if old is None:
                raise TierUnavailable("no epoch was entered yet")
            try:
                self._enter(self._epochs.move(old, epoch))
            except TierError as error:
                raise type(error)(f"the mark of the new epoch can't be written: {error}") from error
            with self._counting:
                self._chunks = self._bytes = 0
            self._uses.forget()
            self._beat()

    # Housekeeping

    def touch(self, keys: Sequence[Key]) -> None:
        self._uses.note(keys)

    def maintain(self, budget: float) -> Changes:
        with self._calls:
            era, epoch = self._era, self._epoch
            if era is not None and epoch is not None:
                self._presence.beat(era.stamp)
                self._uses.tell(era, self._exchange, budget)
                self._watch(epoch)
            return Changes()

    def _watch(self, epoch: Epoch) -> None:
        """Says once if engines that start from now on will not share with this one."""
        now = time.monotonic()
        if epoch.private or epoch is self._told or now < self._watched + WATCH_EVERY:
            return
        self._watched = now
        if self._epochs.is_over(epoch):
            self._told = epoch
            log.warning(
                "%s: this engine's epoch is over, because another one was reset or the server has lost keys: "
                "engines that start from now on do not share with it until it is reset or started again",
                self._where,
            )

    def close(self) -> None:
        _opened.discard(self)
        if self._calls.close():
            self._presence.leave()
            self._links.close()

    def _forked(self) -> None:
        """In a fork: the connections are the parent's, and so may be any lock."""
        self._connect()


_opened: "weakref.WeakSet[RedisTier]" = weakref.WeakSet()


def _after_fork() -> None:
    for tier in list(_opened):
        tier._forked()


os.register_at_fork(after_in_child=_after_fork)
