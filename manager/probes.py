"""What is known of a shared tier: answers of existence probes, for a while."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcascade.types import Entry, Key, MissReason, Outcome, OutcomeKind

from .ghosts import Ghosts
from .keymap import KeyMap
from .residency import Admission, Touched

__all__ = ["ProbeTable"]

_VERDICTS = 1 << 18
_AFTER_FAILURE = 1.0


class ProbeTable:
    """Stands where a private tier has its `Residency`. Others write to a shared tier too, so what it holds is
    asked for, in batches, in the background, and believed for `ttl` seconds.

    A key is asked for once at a time, whoever wants to know; the answer is kept for who asks later. An answer that
    something newer has overtaken (a store of our own, a failed load, a reset) is ignored. Memory is bounded: the
    verdicts on the last 262,144 keys are kept. No I/O; used by the scheduler thread only.
    """

    capacity = None
    evictions = 0
    bytes = 0

    def __init__(self, ttl: float) -> None:
        self.now = 0.0
        """The time of the step, set by the level."""
        self.chunks = 0
        """Keys that were there when that was last found out; not all that are."""
        self.ghosts = Ghosts()
        self._ttl = ttl
        self._verdicts: KeyMap[float] = KeyMap()
        """Key -> until when it is believed to be there (positive) or not to be there (negative)."""
        self._ring: list[Key | None] = [None] * _VERDICTS
        self._at = 0
        self._asked: dict[Key, None] = {}
        self._probing: dict[Key, bool] = {}
        """Key -> whether the answer that is on its way has been overtaken."""
        self._writing: set[Key] = set()

    # What is known

    def __contains__(self, key: Key) -> bool:
        """Whether the key is known to be there."""
        return (self._verdicts.get(key) or 0.0) > self.now

    def knows(self, key: Key) -> bool:
        """Whether it is known if the key is there or not."""
        return abs(self._verdicts.get(key) or 0.0) > self.now or key in self._writing

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

    def answered(self, key: Key, outcome: Outcome) -> bool:
        """A probe has ended. Where it failed the key counts as not there, for a second. Returns whether the key
        has come or gone, by what is known."""
        if self._probing.pop(key, True):
            return False
        if outcome.kind is not OutcomeKind.FAILED:
            return self._put(key, outcome.ok, self._ttl)
        self.ghosts.add(key, MissReason.TIER_DOWN)
        return self._put(key, False, min(self._ttl, _AFTER_FAILURE))

    def why(self, key: Key) -> MissReason:
        """Why the key is not readable."""
        return self.ghosts.why(key)

    def __iter__(self) -> Iterator[Key]:
        return (key for key in self._verdicts if key in self)

    # What `Residency` is told too

    def load(self, entries: Iterable[Entry]) -> list[Key]:
        return [entry.key for entry in entries if self._learn(entry.key, there=True)]

    def touch(self, keys: Sequence[Key], request: int = 0) -> Touched:
        """Those that were there when that was last found out, however long ago: a use that nobody asks for may be
        the only one for hours."""
        return Touched([key for key in reversed(keys) if (self._verdicts.get(key) or 0.0) > 0], {})

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
        return self._learn(key, there=True)

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
        self.ghosts.add(key, reason)
        return self._learn(key, there=False)

    def clear(self) -> list[Key]:
        there = [key for key in self._verdicts if (self._verdicts.get(key) or 0.0) > 0]
        self._verdicts.clear()
        self._ring = [None] * _VERDICTS
        self.chunks = 0
        self._asked.clear()
        self._writing.clear()
        self._probing = dict.fromkeys(self._probing, True)
        return there

    def _learn(self, key: Key, there: bool) -> bool:
        """Something newer than any probe on its way. Returns whether it is news."""
        if key in self._probing:
            self._probing[key] = True
        self._asked.pop(key, None)
        return self._put(key, there, self._ttl)

    def _put(self, key: Key, there: bool, ttl: float) -> bool:
        """Believed for `ttl` seconds from now on. Returns whether the last verdict on the key said otherwise; that
        it was not there, where there is none."""
        last = self._verdicts.get(key)
        if last is None:
            self._remember(key)
        self._verdicts[key] = (self.now + ttl) * (1 if there else -1)
        news = there != (last is not None and last > 0)
        if news:
            self.chunks += 1 if there else -1
        return news

    def _remember(self, key: Key) -> None:
        """The verdict on the oldest key makes room for one on this."""
        oldest = self._ring[self._at]
        if oldest is not None:
            self.chunks -= (self._verdicts.pop(oldest) or 0.0) > 0
        self._ring[self._at] = key
        self._at = (self._at + 1) % _VERDICTS
