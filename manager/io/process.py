"""The I/O process as the engine's process sees it."""

import logging
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Thread

from kvcascade.configs.schema import SecondarySettings
from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.tiers import OpenContext
from kvcascade.tiers.host import HostPool

from .remote import RemoteTier
from .running import Running
from .wire import Answer, Log, Start, Stop

__all__ = ["IoProcess"]

logger = logging.getLogger("kvcascade.io")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_STOP_WAIT = 5.0
_KILL_WAIT = 2.0
_LOOK = 0.05


class IoProcess:
    """One child that runs the lanes of a stack, and is started again whenever it dies.

    The child is started with `subprocess` (an engine runs its core in a daemonic process, with threads and CUDA
    that survive no fork), in a session of its own, and gets pool and socket as file descriptors. It ends when this
    process does, however that ends. The `tiers` are told what it says, and of its end, by whoever calls `pump` or
    waits.

    Notes:
        All methods are called by the scheduler thread. A thread of its own waits for the child's end and starts
        the next one: after 0.1 s, and twice as long each time up to 30 s while none of them lives that long.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[SecondarySettings],
        context: OpenContext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: stays open until this is closed; `clock`: the one that jobs' deadlines are in.

        Raises:
            ConfigError: the pool can't be handed over, or no process can be started.
        """
        if pool.fd is None:
            raise ConfigError("io: 'process' needs host memory that can be handed over, and this system has none")
        self._pool_fd = pool.fd
        self._pid = os.getpid()
        self.tiers = [RemoteTier(self, place, tier, context, clock) for place, tier in enumerate(tiers)]
        self._calls: dict[int, Future[None]] = {}
        self._numbers = count(1)
        self._closing = Event()
        self._started: SimpleQueue[Running] = SimpleQueue()
        try:
            self._running: Running | None = self._start(again=False)
        except OSError as error:
            raise ConfigError(f"io: no process can be started: {error}; 'thread' does without") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"io: settings can't be handed to a process: {error}; allowed: thread") from error
        self._latest = self._running
        self._watch = Thread(target=self._keep_running, name="kvcascade-io", daemon=True)
        self._watch.start()

    @property
    def pid(self) -> int | None:
        """Of the child that is in use; None while there is none, and in a fork."""
        return self._running.pid if self._running and self._ours else None

    def send(self, message: object) -> None:
        """Tells the child; without one, nothing happens."""
        if self._running and self._ours:
            self._running.channel.send(message)

    def call(self, message: Callable[[int], object]) -> "Future[None]":
        """Tells the child `message(number)`, and gives what it answers: a failure is a `TierError`."""
        number, answer = next(self._numbers), _Pumped(self)
        if self._running and self._ours:
            self._calls[number] = answer
            self.send(message(number))
        else:
            answer.set_exception(TierUnavailable("the I/O process is not there"))
        return answer

    def pump(self) -> None:
        """Takes in all that the child has said, and that it has died. Does not wait."""
        if not self._ours:
            return
        if self._running is None:
            self._take_next()
        running = self._running
        if running is None:
            return
        dead = running.ended.is_set()  # before the last look at what it has said
        for message in running.channel.receive():
            self._dispatch(message)
        if dead:
            self._bury(running)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Takes in what the child says until the condition holds; False where that takes longer than `timeout`."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            self.pump()
            if condition():
                return True
            left = end - time.monotonic()
            if left <= 0 or not self._ours:
                return False
            if self._running and not self._running.channel.over:
                self._running.channel.wait(min(left, _LOOK))
            else:
                (self._running.ended if self._running else self._closing).wait(min(left, _LOOK))

    def close(self) -> bool:
        """Ends the child; by force where a tier of it could not be closed. False where even that does not help, so
        that it may still use the pool. In a fork nothing happens."""
        if not self._ours:
            return True
        self._closing.set()
        if self._running and all(tier.closed for tier in self.tiers):
            self.send(Stop())
            self.wait_for(lambda: not self._watch.is_alive(), _STOP_WAIT)
        if self._watch.is_alive():
            self._latest.kill()
            self._watch.join(_KILL_WAIT)
        self.pump()
        while self._running is not None and not self._watch.is_alive():
            self._bury(self._running)
            self._take_next()
        return not self._watch.is_alive()

    @property
    def _ours(self) -> bool:
        """False in a fork of the process that started the child."""
        return os.getpid() == self._pid

    def _dispatch(self, message: object) -> None:
        match message:
            case Answer(number, fault):
                answer = self._calls.pop(number)
                if fault:
                    answer.set_exception(fault.error())
                else:
                    answer.set_result(None)
            case Log(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case _:
                self.tiers[message.place].hear(message)  # type: ignore[attr-defined]

    def _bury(self, running: Running) -> None:
        why = f"the I/O process {running.pid} {running.end}"
        self._running = None
        running.channel.close()
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            answer.set_exception(TierUnavailable(why))
        for tier in self.tiers:
            tier.ended(why)

    def _take_next(self) -> None:
        try:
            self._running = self._started.get_nowait()
        except Empty:
            self._running = None

    # On the thread that watches

    def _keep_running(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            lived = self._latest.wait()
            if self._closing.is_set():
                return
            logger.warning("the I/O process %d %s; it is started again", self._latest.pid, self._latest.end)
            pause = _FIRST_PAUSE if lived > _LONGEST_PAUSE else pause
            while not self._closing.wait(pause) and not self._start_next():
                pause = min(_LONGEST_PAUSE, 2 * pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _start_next(self) -> bool:
        """Whether the next child could be started."""
        try:
            self._latest = self._start(again=True)
        except OSError as error:
            logger.warning("the I/O process can't be started: %s", error)
            return False
        self._started.put(self._latest)
        if self._closing.is_set():  # who closes may have killed the one before
            self._latest.kill()
        return True

    def _start(self, again: bool) -> Running:
        tiers = [tier.start() for tier in self.tiers]
        level = logging.getLogger("kvcascade").getEffectiveLevel()
        return Running.start(self._pool_fd, Start(tiers, again, level))


class _Pumped(Future[None]):
    """Whose result comes only where somebody takes in what the child says: who waits for it does."""

    def __init__(self, process: IoProcess) -> None:
        super().__init__()
        self._process = process

    def result(self, timeout: float | None = None) -> None:
        self._process.wait_for(self.done, timeout)
        super().result(0)
