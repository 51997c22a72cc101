"""What is known of a shared tier: answers of existence probes, for a while."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcascade.types import Entry, Key, MissReason, Outcome, OutcomeKind

from .ghosts import Ghosts
from .residency import Admission

__all__ = ["ProbeTable"]

_VERDICTS = 1 << 17
_AFTER_FAILURE = 1.0


class ProbeTable:
    """Stands where a private tier has its `Residency`. Others write to a shared tier too, so what it holds is
    asked for, in batches, in the background, and believed for `ttl` seconds.

    A key is asked for once at a time, whoever wants to know; the answer is kept for who asks later. An answer that
    something newer has overtaken (a store of our own, a failed load, a reset) is ignored. Memory is bounded: the
    verdicts of two generations of 131,072 keys are kept. No I/O; used by the scheduler thread only.
    """

    capacity = None
    evictions = 0
    bytes = 0

    def __init__(self, ttl: float) -> None:
        self.now = 0.0
        """The time of the step, set by the level."""
        self.ghosts = Ghosts()
        self._ttl = ttl
        self._young: dict[Key, float] = {}
        """Key -> until when it is believed to be there (positive) or not to be there (negative)."""
        self._old: dict[Key, float] = {}
        self._asked: dict[Key, None] = {}
        self._probing: dict[Key, bool] = {}
        """Key -> whether the answer that is on its way has been overtaken."""
        self._writing: set[Key] = set()

    # What is known

    def __contains__(self, key: Key) -> bool:
        """Whether the key is known to be there."""
        return self._verdict(key) > self.now

    def knows(self, key: Key) -> bool:
        """Whether it is known if the key is there or not."""
        return abs(self._verdict(key)) > self.now or key in self._writing

    def ask(self, key: Key) -> None:
        """Somebody wants to know; `take_asked` brings it on its way."""
        if key not in self._probing:
            self._asked[key] = None

    def take_asked(self) -> list[Key]:
        """The keys to probe now. Each of them is to be `answered`."""
        asked = list(self._asked)
        self._asked.clear()
        self._probing.update(dict.fromkeys(asked, False))
        return asked

    def answered(self, key: Key, outcome: Outcome) -> None:
        """A probe has ended. Where it failed the key counts as not there, for a second."""
        overtaken = self._probing.pop(key, True)
        if overtaken:
            return
        if outcome.kind is OutcomeKind.FAILED:
            self._put(key, -(self.now + min(self._ttl, _AFTER_FAILURE)))
            self.ghosts.add(key, MissReason.TIER_DOWN)
        else:
            self._put(key, (self.now + self._ttl) * (1 if outcome.ok else -1))

    def why(self, key: Key) -> MissReason:
        """Why the key is not readable."""
        return self.ghosts.why(key)

    @property
    def chunks(self) -> int:
        """Keys known to be there; not all that are."""
        return sum(until > self.now for until in (*self._young.values(), *self._old.values()))

    def __iter__(self) -> Iterator[Key]:
        return (key for key in (*self._young, *self._old) if key in self)

    # What `Residency` is told too

    def load(self, entries: Iterable[Entry]) -> list[Key]:
        new = [entry.key for entry in entries if entry.key not in self]
        for key in new:
            self._learn(key, there=True)
        return new

    def touch(self, keys: Sequence[Key], request: int = 0) -> list[Key]:
        return [key for key in reversed(keys) if key in self]

    def absent(self, keys: Sequence[Key]) -> list[int]:
        return [place for place, key in enumerate(keys) if key not in self and key not in self._writing]

    def leaving(self, keys: Sequence[Key]) -> list[Key]:
        return []

    def admit(
        self, keys: Sequence[Key], nbytes: int, hold: Callable[[Sequence[Key]], bool] = lambda victims: False
    ) -> Admission:
        """All are welcome: a shared tier makes room by itself."""
        self._writing.update(keys)
        return Admission(len(keys), [])

    def written(self, key: Key) -> bool:
        if key not in self._writing:
            return False
        self._writing.remove(key)
        self._learn(key, there=True)
        return True

    def not_written(self, key: Key, reason: MissReason) -> None:
        self._writing.discard(key)
        self.ghosts.add(key, reason)

    def deleted(self, victims: Iterable[Key]) -> list[Key]:
        return []

    def spared(self, victims: Iterable[Key]) -> None:
        """There are none."""

    def begin_read(self, key: Key) -> None:
        """A shared tier's readers are its own business."""

    def end_read(self, key: Key) -> None:
        """As above."""

    def lost(self, key: Key, reason: MissReason) -> bool:
        known = key in self
        self._learn(key, there=False)
        self.ghosts.add(key, reason)
        return known

    def clear(self) -> list[Key]:
        there = list(self)
        self._young.clear()
        self._old.clear()
        self._asked.clear()
        self._writing.clear()
        self._probing = dict.fromkeys(self._probing, True)
        return there

    def _learn(self, key: Key, there: bool) -> None:
        """Something newer than any probe on its way."""
        if key in self._probing:
            self._probing[key] = True
        self._asked.pop(key, None)
        self._put(key, (self.now + self._ttl) * (1 if there else -1))

    def _verdict(self, key: Key) -> float:
        verdict = self._young.get(key)
        return self._old.get(key, 0.0) if verdict is None else verdict

    def _put(self, key: Key, verdict: float) -> None:
        if len(self._young) >= _VERDICTS:
            self._old, self._young = self._young, {}
        self._young[key] = verdict
