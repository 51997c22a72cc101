"""Tiers around a tier: that wait, fail or are slow, as a test tells them to."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from kvcascade.errors import TierUnavailable
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Changes, Entry, Key, Outcome, Usage

__all__ = ["Call", "FaultTier", "GateTier", "LatencyTier", "TierWrapper"]

Answer = Callable[[], Any]


class TierWrapper(Tier):
    """Passes every call on to `inner`. A subclass overrides `around`, through which each call goes that may do I/O
    (all but `usage`, `touch` and `footprint`)."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Answer) -> Any:
        """Answers a call of `verb`; `call()` makes the real one. Runs on the caller's thread."""
        return call()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        answer: list[bool] = self.around("exists", keys, (), lambda: self.inner.exists(keys))
        return answer

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        answer: list[Outcome] = self.around(
            "write", keys, buffers, lambda: self.inner.write(keys, buffers, victims)
        )
        return answer

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        answer: list[Outcome] = self.around("read", keys, buffers, lambda: self.inner.read(keys, buffers))
        return answer

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        answer: list[Outcome] = self.around("delete", keys, (), lambda: self.inner.delete(keys))
        return answer

    def entries(self) -> Iterator[Entry]:
        answer: Iterator[Entry] = self.around("entries", (), (), self.inner.entries)
        return answer

    def maintain(self, budget: float) -> Changes:
        answer: Changes = self.around("maintain", (), (), lambda: self.inner.maintain(budget))
        return answer

    def move_to(self, epoch: str) -> None:
        self.around("move_to", (), (), lambda: self.inner.move_to(epoch))

    def close(self) -> None:
        self.around("close", (), (), self.inner.close)

    def usage(self) -> Usage:
        return self.inner.usage()

    def footprint(self, nbytes: int) -> int:
        return self.inner.footprint(nbytes)

    def touch(self, keys: Sequence[Key]) -> None:
        self.inner.touch(keys)

    def note_uses(self, uses: Mapping[Key, int]) -> None:
        self.inner.note_uses(uses)


class Call:
    """One call that reached a `GateTier`."""

    def __init__(self, verb: str, keys: Sequence[Key]) -> None:
        self.verb = verb
        self.keys = tuple(keys)
        self.answers: Sequence[Any] | None = None
        self._may_go = threading.Event()
        self._done = threading.Event()

    @property
    def held(self) -> bool:
        """Whether it still waits at the gate."""
        return not self._may_go.is_set()

    @property
    def done(self) -> bool:
        """Whether the caller has its answer, or is just about to get it."""
        return self._done.is_set()

    def release(self, answers: Sequence[Any] | None = None) -> None:
        """Lets it go on. With `answers` it gets these, one a key, and the tier behind never sees it."""
        self.answers = answers
        self._may_go.set()

    def wait_done(self, timeout: float = 30.0) -> None:
        """Waits for its end.

        Raises:
            TimeoutError: it has not ended in `timeout` seconds.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self} has not ended in {timeout} s")

    def __repr__(self) -> str:
        return f"{self.verb}({', '.join(key.hex()[:8] for key in self.keys)})"


class GateTier(TierWrapper):
    """Holds the calls of some verbs at a gate until the test releases them, and records all calls in the order in
    which they arrive.

        gate = GateTier(MemoryTier())
        ...                                     # a lane calls gate.write([a, b], ...) on its thread
        call = gate.wait_for("write")           # it has arrived, and is held
        call.release()                          # it goes on to the memory tier
    """

    def __init__(self, inner: Tier, hold: Collection[str] = ("exists", "read", "write", "delete")) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        """All calls that have arrived, first to last."""
        self._hold = frozenset(hold)
        self._changed = threading.Condition()
        self._opened = False

    @property
    def waiting(self) -> list[Call]:
        """The calls that are held now, first to last."""
        with self._changed:
            return [call for call in self.calls if call.held]

    def wait_for(self, verb: str, timeout: float = 30.0) -> Call:
        """The first call of `verb` that is held, as soon as there is one.

        Raises:
            TimeoutError: none came in `timeout` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._first_held(verb) is not None, timeout)
            call = self._first_held(verb)
            if call is None:
                raise TimeoutError(f"no {verb} is held after {timeout} s; calls so far: {self.calls}")
            return call

    def release(self) -> list[Call]:
        """Lets all go on that are held now, and holds the next ones. Returns those released."""
        released = self.waiting
        for call in released:
            call.release()
        return released

    def open(self) -> list[Call]:
        """Lets all go on that are held, and holds none from now on; so does `close`. Returns those released."""
        with self._changed:
            self._opened = True
        return self.release()

    def shut(self) -> None:
        """Holds calls again, after `open`."""
        with self._changed:
            self._opened = False

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Answer) -> Any:
        arrived = Call(verb, keys)
        if verb == "close":
            for held in self.open():
                held.wait_done()
        with self._changed:
            if self._opened or verb not in self._hold:
                arrived.release()
            self.calls.append(arrived)
            self._changed.notify_all()
        arrived._may_go.wait()
        try:
            return call() if arrived.answers is None else list(arrived.answers)
        finally:
            arrived._done.set()

    def _first_held(self, verb: str) -> Call | None:
        return next((call for call in self.calls if call.held and call.verb == verb), None)


class FaultTier(TierWrapper):
    """Fails now and then, by a seed: the same seed, verb, key and number of the try give the same fault, whatever
    the threads do.

    `rates` gives each kind of fault its share of the keys, between 0 and 1:

    - "failed": FAILED, and what the medium did is not known: a write may have been stored or not, a read has
      spoilt the buffer. `exists` and the verbs without keys (but `close`) raise `TierUnavailable` instead;
    - "missing": `read` and `exists` know nothing of a chunk that may be there;
    - "corrupt": `read` finds the chunk damaged, and removes it;
    - "refused": `write` does not take the chunk;
    - "raises": the whole call raises `RuntimeError`, as that of a tier with a bug.

    Wrong bytes are never answered with OK, since no tier may do that.
    """

    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "exists": ("failed", "missing", "raises"),
        "read": ("failed", "missing", "corrupt", "raises"),
        "write": ("failed", "refused", "raises"),
        "delete": ("failed", "raises"),
    }
    """The faults that each verb knows; the others know "failed" and "raises"."""

    def __init__(self, inner: Tier, seed: int, rates: Mapping[str, float]) -> None:
        super().__init__(inner)
        if unknown := set(rates) - {kind for kinds in self.KINDS.values() for kind in kinds}:
            raise ValueError(f"unknown kind of fault: {', '.join(sorted(unknown))}")
        self.active = True
        """Switches the faults of `rates` off and on."""
        self.down = False
        """While true, every call fails, as where the medium can't be reached."""
        self.injected: Counter[str] = Counter()
        """How many faults of each kind there were."""
        self._seed = seed
        self._rates = dict(rates)
        self._tries: Counter[tuple[str, Key]] = Counter()
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        faults = self._faults("exists", keys)
        if "failed" in faults:
            raise TierUnavailable("injected fault in exists")
        found = self.inner.exists(keys)
        return [there and fault is None for there, fault in zip(found, faults, strict=True)]

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        def spoilt(place: int, fault: str) -> Outcome:
            if fault == "refused":
                return Outcome.REFUSED
            if self._chance("stored", keys[place]) < 0.5:
                self.inner.write([keys[place]], [buffers[place]])
            return _failed("write")

        faults = self._faults("write", keys)
        if victims:
            self.inner.delete(victims)
        return self._batch(faults, keys, buffers, self.inner.write, spoilt)

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        def spoilt(place: int, fault: str) -> Outcome:
            if fault == "missing":
                return Outcome.MISSING
            buffers[place][:] = b"\xee" * len(buffers[place])
            if fault == "failed":
                return _failed("read")
            (removed,) = self.inner.delete([keys[place]])
            return Outcome.CORRUPT if removed.ok else removed

        return self._batch(self._faults("read", keys), keys, buffers, self.inner.read, spoilt)

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        faults = self._faults("delete", keys)
        return self._batch(
            faults, keys, [()] * len(keys), lambda some, _: self.inner.delete(some), lambda *_: _failed("delete")
        )

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Answer) -> Any:
        if verb != "close" and "failed" in self._faults(verb, [b""]):
            raise TierUnavailable(f"injected fault in {verb}")
        return call()

    def _batch(
        self,
        faults: Sequence[str | None],
        keys: Sequence[Key],
        buffers: Sequence[Any],
        call: Callable[[Sequence[Key], Sequence[Any]], list[Outcome]],
        spoilt: Callable[[int, str], Outcome],
    ) -> list[Outcome]:
        if not any(faults):
            return call(keys, buffers)
        whole = [place for place, fault in enumerate(faults) if fault is None]
        answers = iter(call([keys[place] for place in whole], [buffers[place] for place in whole]))
        return [next(answers) if fault is None else spoilt(place, fault) for place, fault in enumerate(faults)]

    def _faults(self, verb: str, keys: Sequence[Key]) -> list[str | None]:
        """What befalls each key.

        Raises:
            RuntimeError: it befalls the whole call.
        """
        faults = [self._fault(verb, key) for key in keys]
        with self._lock:
            self.injected.update(fault for fault in faults if fault)
        if "raises" in faults:
            raise RuntimeError(f"injected fault in {verb}")
        return faults

    def _fault(self, verb: str, key: Key) -> str | None:
        if self.down:
            return "failed"
        if not self.active:
            return None
        chance = self._chance(verb, key)
        for kind in self.KINDS.get(verb, ("failed", "raises")):
            chance -= self._rates.get(kind, 0.0)
            if chance < 0:
                return kind
        return None

    def _chance(self, verb: str, key: Key) -> float:
        with self._lock:
            self._tries[verb, key] += 1
            number = self._tries[verb, key]
        return random.Random(f"{self._seed} {verb} {key.hex()} {number}").random()


class LatencyTier(TierWrapper):
    """Takes its time: `seconds` of each verb before it begins, and what `bytes_per_second` makes of its buffers.

    `sleep` is called on the caller's thread with the seconds to wait; a test gives its own, and waits for nothing.
    """

    def __init__(
        self,
        inner: Tier,
        seconds: Mapping[str, float],
        bytes_per_second: float = float("inf"),
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds = dict(seconds)
        self._bytes_per_second = bytes_per_second
        self._sleep = sleep

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Answer) -> Any:
        size = sum(len(buffer) for buffer in buffers)
        delay = self._seconds.get(verb, 0.0) + size / self._bytes_per_second
        if delay:
            self._sleep(delay)
        return call()


def _failed(verb: str) -> Outcome:
    return Outcome.failed(TierUnavailable(f"injected fault in {verb}"))
