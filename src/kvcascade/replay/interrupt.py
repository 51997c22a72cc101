"""Ctrl-C as a question that the replay asks between two actions, so that nothing is left half done."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

__all__ = ["stop_on_interrupt"]


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C makes the yielded function true; the second raises `KeyboardInterrupt` as usual.
    For the main thread only."""
    asked = Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
