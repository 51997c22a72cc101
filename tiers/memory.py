"""A tier in this process's memory: for tests, benchmarks and as the smallest complete example of a tier."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import xxhash
from pydantic import Field, field_validator, model_validator

from kvcascade.configs.registry import EVICTION, resolve
from kvcascade.configs.units import Size, format_size
from kvcascade.errors import ClosedError, ConfigError, TierUnavailable
from kvcascade.types import Buffer, Capabilities, Entry, Key, Outcome, Usage

from .base import OpenContext, Probe, Tier, TierSettings

__all__ = ["MemorySettings", "MemoryTier"]

_TICK = 1e-6


@dataclass(eq=False, slots=True)
class _Chunk:
    payload: bytes
    checksum: int
    written: float
    used: float
    uses: int = 1


class MemoryTier(Tier):
    """Chunks in a dict; private, and gone with the process. Bounded where a capacity is given.

    Notes:
        `_lock` covers the dict and the sums, never the copying of a payload: payloads are immutable, so a reader
        that holds one is not disturbed by its deletion.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capabilities = Capabilities(bounded=capacity is not None)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._chunks: dict[Key, _Chunk] = {}
        self._bytes = 0
        self._now = 0.0
        self._epoch = 0
        self._closed = False

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._chunks for key in keys]

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        with self._lock:
            self._check_open()
            epoch = self._epoch
            for victim in victims:
                self._drop(victim)
        return [self._put(key, bytes(buffer), epoch) for key, buffer in zip(keys, buffers, strict=True)]

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        with self._lock:
            self._check_open()
            found = [self._chunks.get(key) for key in keys]
        return [self._copy(*one) for one in zip(keys, found, buffers, strict=True)]

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        with self._lock:
            self._check_open()
            return [Outcome.OK if self._drop(key) else Outcome.MISSING for key in keys]

    def entries(self) -> Iterator[Entry]:
        with self._lock:
            self._check_open()
            chunks = list(self._chunks.items())
        return (Entry(key, len(chunk.payload), chunk.written, chunk.used, chunk.uses) for key, chunk in chunks)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._chunks), self._bytes, self._capacity)

    def touch(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in keys:
                if key in self._chunks:
                    self._chunks[key].used = self._tick()

    def note_uses(self, uses: Mapping[Key, int]) -> None:
        with self._lock:
            for key, count in uses.items():
                if key in self._chunks:
                    self._chunks[key].uses = count

    def move_to(self, epoch: str) -> None:
        with self._lock:
            self._check_open()
            self._epoch += 1
            self._chunks.clear()
            self._bytes = 0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._chunks.clear()
            self._bytes = 0

    def _put(self, key: Key, payload: bytes, epoch: int) -> Outcome:
        checksum = xxhash.xxh3_64_intdigest(payload)
        with self._lock:
            if self._closed or epoch != self._epoch:
                return Outcome.failed(TierUnavailable("the tier was closed or emptied during the write"))
            if key in self._chunks:
                return Outcome.OK
            if self._capacity is not None and self._bytes + len(payload) > self._capacity:
                return Outcome.REFUSED
            now = self._tick()
            self._chunks[key] = _Chunk(payload, checksum, now, now)
            self._bytes += len(payload)
        return Outcome.OK

    def _copy(self, key: Key, chunk: _Chunk | None, buffer: Buffer) -> Outcome:
        if chunk is None:
            return Outcome.MISSING
        if len(chunk.payload) != len(buffer) or xxhash.xxh3_64_intdigest(chunk.payload) != chunk.checksum:
            with self._lock:
                if self._chunks.get(key) is chunk:
                    self._drop(key)
            return Outcome.CORRUPT
        buffer[:] = chunk.payload
        return Outcome.OK

    def _drop(self, key: Key) -> bool:
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        self._bytes -= len(chunk.payload)
        return True

    def _tick(self) -> float:
        """The time, later at each call, so that the order of uses is kept."""
        self._now = max(time.time(), self._now + _TICK)
        return self._now

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the memory tier is closed")


class MemorySettings(TierSettings):
    """Chunks in this process's memory, gone with it: for tests and benchmarks."""

    type: Literal["memory"] = "memory"
    capacity: Annotated[Size, Field(gt=0)] | None = None
    """Bytes of chunks that it holds; none = no bound."""
    eviction: Annotated[str, Field(description="an eviction policy, by entry point")] = "lru"
    """Chooses what makes room; only with a capacity."""

    @field_validator("eviction")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        try:
            resolve(EVICTION, name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name

    @model_validator(mode="after")
    def _eviction_needs_capacity(self) -> Self:
        if self.capacity is None and "eviction" in self.model_fields_set:
            raise ValueError(
                f"eviction {self.eviction!r} has no effect without a capacity; give one, or remove it"
            )
        return self

    def open(self, context: OpenContext) -> MemoryTier:
        if problem := self._too_small(context.chunk_bytes):
            raise ConfigError(f"tier {self.name!r}: {problem}")
        return MemoryTier(self.capacity)

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        probe = Probe([("medium", "memory of the engine's process, empty at every start")])
        if self.capacity is not None and chunk_bytes:
            probe.chunks = self.capacity // chunk_bytes
            probe.problems += filter(None, [self._too_small(chunk_bytes)])
        return probe

    def _too_small(self, chunk_bytes: int) -> str:
        if self.capacity is None or self.capacity >= chunk_bytes:
            return ""
        return f"capacity {format_size(self.capacity)} is below one chunk of {format_size(chunk_bytes)}"
