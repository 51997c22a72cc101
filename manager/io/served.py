"""One tier in the I/O process."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import NamedTuple, TypeVar

from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.manager.jobs import Job
from kvcascade.manager.lane import ThreadLane
from kvcascade.manager.opening import open_now, open_tier
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Usage

from .wire import (
    Answer,
    CloseLane,
    CloseTier,
    Fault,
    Found,
    JobOrder,
    MoveTo,
    NoteUses,
    Opened,
    Refused,
    Reported,
    Run,
    TierStart,
    Told,
    Touch,
    Withdraw,
)

__all__ = ["Served"]

logger = logging.getLogger("kvcascade.io")

_T = TypeVar("_T")
_OPEN_AGAIN = 2.0
_BATCH = 4096


class Served:
    """Opens a tier, runs its lane and says what comes of it. Used by the main thread only; the tier is opened on a
    thread of its own, so that one that takes its time keeps no other one waiting."""

    def __init__(
        self,
        place: int,
        start: TierStart,
        again: bool,
        slot: Callable[[int], Buffer],
        post: Callable[[object], None],
        wake: Callable[[], None],
    ) -> None:
        """`again`: what keeps the tier from being opened may pass; `slot`: the bytes of a slot; `post`: sends a
        message, from any thread; `wake`: has `tell` called, from any thread."""
        self._place = place
        self._start = start
        self._again = again
        self._slot = slot
        self._post = post
        self._wake = wake
        self._lane: ThreadLane | None = None
        self._tier: Tier | None = None
        self._usage = Usage(0, 0, None)
        self._sizes = {start.context.chunk_bytes}
        self._footprints: dict[int, int] = {}
        self._answers: list[tuple[int, Future[None]]] = []
        self._said = False
        """That it has raised what it should not."""
        self._opened: _Opened | None = None
        """Until the main thread takes it."""
        Thread(target=self._open, name=f"kvcascade-open-{start.settings.name}", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a deadline may pass."""
        return self._lane is not None and self._lane.queued > 0

    def handle(self, message: object) -> None:
        lane, tier = self._lane, self._tier
        if lane is None or tier is None:
            self._put_off(message)
            return
        match message:
            case Run():
                for order in message.jobs:
                    lane.submit(_job(order))
            case Withdraw():
                lane.withdraw()
            case Touch():
                self._ask(lambda: tier.touch(message.keys), None)
            case NoteUses():
                self._ask(lambda: tier.note_uses(message.uses), None)
            case MoveTo():
                self._answers.append((message.number, lane.move_to(message.epoch)))
            case CloseLane():
                self._apart(message.number, lambda: _close(lane, message.timeout))
            case CloseTier():
                self._lane = None
                self._apart(message.number, tier.close)

    def tell(self) -> None:
        """Sends what is new."""
        if self._opened is not None:
            self._begin(self._opened)
        ended = [answer for answer in self._answers if answer[1].done()]  # what was found before comes before
        if self._lane is not None and self._tier is not None:
            self._tell_of(self._lane, self._tier)
        for answer in ended:
            self._answers.remove(answer)
            number, future = answer
            error = future.exception()
            self._post(Answer(number, Fault.of(error) if error else None))

    def _begin(self, opened: "_Opened") -> None:
        """All that it holds is told before anything is done to it: after the answer to a move to another epoch,
        chunks of the old one would be taken for chunks of the new."""
        self._opened = None
        self._tier, self._lane = opened.tier, opened.lane
        for message in opened.messages:
            self._post(message)

    def _tell_of(self, lane: ThreadLane, tier: Tier) -> None:
        reports = [Reported.of(report) for report in lane.poll(time.monotonic())]
        changes = lane.changes()
        self._sizes.update(entry.nbytes for change in changes for entry in change.appeared)
        usage = self._ask(tier.usage, self._usage)
        footprints: Mapping[int, int] = self._ask(lambda: self._new_footprints(tier), {})
        if reports or changes or footprints or usage != self._usage:
            self._usage = usage
            self._post(Told(self._place, usage, footprints, reports, changes))

    def _new_footprints(self, tier: Tier) -> Mapping[int, int]:
        """Those that have not been told."""
        now = {size: tier.footprint(size) for size in self._sizes}
        new = {size: footprint for size, footprint in now.items() if self._footprints.get(size) != footprint}
        self._footprints = now
        return new

    def _ask(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """What the tier answers here, on the thread that serves all tiers: what it raises must not end them.
        Whether it works its jobs tell."""
        try:
            return question()
        except Exception as error:  # a third party's tier may raise anything
            if not self._said:
                self._said = True
                logger.warning(
                    "tier %r raises %s: %s", self._start.settings.name, type(error).__name__, error, exc_info=True
                )
            return otherwise

    def _put_off(self, message: object) -> None:
        """The tier is not open: there is nothing to close, and nothing else can be done."""
        match message:
            case CloseLane() | CloseTier():
                self._post(Answer(message.number, None))
            case MoveTo():
                self._post(Answer(message.number, Fault.of(TierUnavailable("the tier is not open yet"))))

    def _apart(self, number: int, action: Callable[[], None]) -> None:
        """Does what takes its time on a thread of its own; the answer follows."""
        done: Future[None] = Future()
        self._answers.append((number, done))
        Thread(target=self._resolve, args=(action, done), daemon=True).start()

    def _resolve(self, action: Callable[[], None], done: "Future[None]") -> None:
        try:
            action()
        except Exception as error:  # handed to who asked
            done.set_exception(error)
        else:
            done.set_result(None)
        self._wake()

    # On the thread that opens it

    def _open(self) -> None:
        try:
            self._opened = self._open_again() if self._again else self._prepared(*open_tier(*self._start))
        except Exception as error:  # told to who builds the stack
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self._post(Refused(self._place, text))
        else:
            self._wake()

    def _open_again(self) -> "_Opened":
        """Tries until it works: another one was open, so what keeps this one from being opened passes."""
        said = False
        while True:
            try:
                return self._prepared(open_now(*self._start), False)
            except Exception as error:  # tried again
                if not said:
                    logger.warning("tier %r can't be opened again yet: %s", self._start.settings.name, error)
            said = True
            time.sleep(_OPEN_AGAIN)

    def _prepared(self, tier: Tier, late: bool) -> "_Opened":
        settings = self._start.settings
        try:
            messages = list(self._news(tier, late))
            lane = ThreadLane(
                settings.name, tier, self._slot, settings.concurrency, settings.retries, tell=self._wake
            )
        except BaseException:
            tier.close()
            raise
        return _Opened(tier, lane, messages)

    def _news(self, tier: Tier, late: bool) -> Iterator[object]:
        """What it is, and what a private one holds, the least recently used first."""
        size, self._usage = self._start.context.chunk_bytes, tier.usage()
        yield Opened(self._place, late, tier.capabilities, self._usage, {size: tier.footprint(size)})
        entries = [] if tier.capabilities.shared else sorted(tier.entries(), key=lambda entry: entry.used)
        for start in range(0, len(entries) + 1, _BATCH):
            some = entries[start : start + _BATCH]
            footprints = {size: tier.footprint(size) for size in {entry.nbytes for entry in some}}
            yield Found(self._place, some, footprints, last=start + _BATCH > len(entries))


class _Opened(NamedTuple):
    """A tier that is open, its lane, and what is to be told of it."""

    tier: Tier
    lane: ThreadLane
    messages: Sequence[object]


class _Nobody:
    """Is told nothing by a lane."""

    def ended(self, *arguments: object) -> None: ...


_NOBODY = _Nobody()


def _job(order: JobOrder) -> Job:
    return Job(
        order.kind, order.keys, order.slots, order.victims, order.owner, _NOBODY, order.deadline, id=order.id
    )


def _close(lane: ThreadLane, timeout: float) -> None:
    if not lane.close(timeout):
        raise TierUnavailable("a job has not ended")
