"""A tier of the I/O process, as the engine's side knows it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcascade.configs.schema import SecondarySettings
from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.tiers import OpenContext
from kvcascade.types import Capabilities, Entry, Key, Usage

from .lane import ProcessLane
from .wire import CloseTier, Found, NoteUses, Opened, Refused, TierStart, Told, Touch

if TYPE_CHECKING:
    from .process import IoProcess

__all__ = ["RemoteTier"]

_CLOSE_WAIT = 10.0


class RemoteTier:
    """Answers what the manager asks of a tier from what the child has said of it; a `TierControl`. Used by the
    scheduler thread only, but for `start`.

    Attributes:
        lane: of its jobs.
        capabilities: known once it is open.
        closed: whether it was closed.
    """

    def __init__(
        self,
        process: "IoProcess",
        place: int,
        settings: SecondarySettings,
        context: OpenContext,
        clock: Callable[[], float],
    ) -> None:
        self.lane = ProcessLane(process, place, settings, clock)
        self.capabilities = Capabilities()
        self.closed = False
        self._process = process
        self._place = place
        self._settings = settings
        self._context = context
        self._usage = Usage(0, 0, None)
        self._footprints: dict[int, int] = {}
        self._entries: list[Entry] = []
        """What the first child has found, until that is taken."""
        self._late = False
        self._known = False
        """Whether it has been open, and has told what it holds."""
        self._refusal = ""

    def wait_until_open(self) -> bool:
        """Waits until the first child has opened it and told what it holds. Returns whether it could not be opened
        yet.

        Raises:
            ConfigError: it can't be opened as it is described.
        """
        self._process.wait_for(lambda: self._known or bool(self._refusal), None)
        if self._refusal:
            raise ConfigError(self._refusal)
        return self._late

    def start(self) -> TierStart:
        """How the next child opens it: in the epoch that the engine is in by then."""
        epoch = self.lane.epoch
        context = self._context if epoch is None else replace(self._context, epoch=epoch)
        return TierStart(self._settings, context, apart=epoch == "")

    # What the manager asks

    def entries(self) -> Iterator[Entry]:
        """What it held when the first child opened it; once."""
        entries, self._entries = self._entries, []
        return iter(entries)

    def usage(self) -> Usage:
        """As of the last that was heard."""
        return self._usage

    def footprint(self, nbytes: int) -> int:
        """Known for the engine's chunks, and of all sizes that the tier has told of."""
        return self._footprints.get(nbytes, nbytes)

    def touch(self, keys: Sequence[Key]) -> None:
        self._process.send(Touch(self._place, keys))

    def note_uses(self, uses: Mapping[Key, int]) -> None:
        self._process.send(NoteUses(self._place, uses))

    def close(self) -> None:
        """Closes it in the child; without one, also where it dies meanwhile, nothing is open. Waits for that as
        long as it takes, up to a limit.

        Raises:
            TierError: it could not be closed.
            TimeoutError: the child does not answer.
        """
        pid = self._process.pid
        if pid is not None and not self.closed:
            try:
                self._process.call(lambda number: CloseTier(self._place, number)).result(_CLOSE_WAIT)
            except TierUnavailable:
                if self._process.pid == pid:
                    raise
        self.closed = True

    # What the child says

    def hear(self, message: object) -> None:
        match message:
            case Opened():
                self._has_opened(message)
            case Refused():
                self._refusal = message.text
            case Found():
                self._footprints.update(message.footprints)
                self._has_found(message)
            case Told():
                self._usage = message.usage
                self._footprints.update(message.footprints)
                self.lane.told(message.reports, message.changes)

    def ended(self, why: str) -> None:
        """The child is dead and reaped: nothing of it uses the pool any more."""
        if not self._known:
            self._refusal = f"{why} before the tier was open; what it has written to stderr may say why"
        self.lane.ended(why)

    def _has_opened(self, opened: Opened) -> None:
        if not self._known:
            self.capabilities, self._late = opened.capabilities, opened.late
        self.lane.private = not self.capabilities.shared
        self._usage = opened.usage
        self._footprints.update(opened.footprints)

    def _has_found(self, found: Found) -> None:
        if self._known and not self.capabilities.shared:
            self.lane.found(found.entries, found.last)
            return
        self._entries += found.entries
        if found.last:
            self._known = True
            self.lane.opened()
