"""The guard sees I/O of the guarded thread, from wherever it is called, and only of that thread."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvcascade.testing import GuardTier, IOViolation, buffer, forbid_io, key_for
from kvcascade.tiers.memory import MemoryTier

HERE = Path(__file__)


def _read_open_file() -> None:
    os.read(0, 1)


def _send() -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.send(b"x")


IO: dict[str, Callable[[], object]] = {
    "open": lambda: HERE.open(),
    "os.open": lambda: os.open(HERE, os.O_RDONLY),
    "os.stat": HERE.stat,
    "os.listdir": lambda: list(HERE.parent.iterdir()),
    "os.remove": lambda: Path("/nowhere/x").unlink(),
    "os.rename": lambda: Path("/nowhere/x").rename("/nowhere/y"),
    "os.mkdir": lambda: Path("/nowhere/x").mkdir(),
    "os.read": _read_open_file,
    "os.pwrite": lambda: os.pwrite(-1, b"x", 0),
    "os.preadv": lambda: os.preadv(-1, [bytearray(1)], 0),
    "os.fsync": lambda: os.fsync(-1),
    "os.fdatasync": lambda: os.fdatasync(-1),
    "socket.": _send,
    "socket.getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
    "subprocess.Popen": lambda: subprocess.run([sys.executable, "-V"], check=True),
    "time.sleep": lambda: time.sleep(0),
}


@pytest.mark.parametrize("name", IO)
def test_io_raises_at_the_call_and_again_at_the_end(name: str) -> None:
    with pytest.raises(IOViolation, match=r"1 times I/O") as caught, forbid_io(), suppress(IOViolation):
        IO[name]()
    assert name in str(caught.value)
    assert HERE.name in str(caught.value), "it says where the call came from"


def test_what_does_no_io_is_let_be() -> None:
    with forbid_io():
        assert sorted({"b": 1, "a": 2}) == ["a", "b"]
        assert len(buffer(4096)) == 4096
        with threading.Lock():
            time.monotonic()


def test_a_message_that_never_waits_for_another_process_is_no_io() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        with forbid_io():
            one.send(b"x")
        with pytest.raises(IOViolation), forbid_io(), suppress(IOViolation):
            other.send(b"this one may wait")


def test_other_threads_may() -> None:
    read: list[int] = []
    with forbid_io():
        worker = threading.Thread(target=lambda: read.append(len(HERE.read_bytes())))
        worker.start()
        worker.join()
    assert read == [HERE.stat().st_size]


def test_another_thread_can_be_guarded() -> None:
    go, tried = threading.Event(), []

    def scheduler() -> None:
        go.wait(10)
        try:
            HERE.stat()
        except IOViolation:
            tried.append("raised")

    thread = threading.Thread(target=scheduler)
    thread.start()
    with pytest.raises(IOViolation), forbid_io(thread.ident):
        HERE.stat()
        go.set()
        thread.join()
    assert tried == ["raised"]


def test_afterwards_all_is_as_before() -> None:
    before = os.pread, socket.socket.send, time.sleep
    with pytest.raises(ZeroDivisionError), forbid_io():
        1 / 0  # noqa: B018
    assert (os.pread, socket.socket.send, time.sleep) == before
    assert HERE.read_bytes()


def test_two_threads_can_be_guarded_in_turn_or_at_once() -> None:
    before = os.pread
    one, two = forbid_io(), forbid_io(-1)
    with one:
        two.__enter__()
    assert HERE.stat()
    with pytest.raises(IOViolation), forbid_io(), forbid_io(), suppress(IOViolation):
        os.pread(-1, 1, 0)
    two.__exit__(None, None, None)
    assert os.pread is before


def test_a_tier_may_not_be_asked_by_a_guarded_thread() -> None:
    tier = GuardTier(MemoryTier())
    assert tier.exists([key_for(1)]) == [False]
    with forbid_io():
        tier.touch([key_for(1)])
        assert tier.usage().chunks == tier.footprint(0) == 0
    with pytest.raises(IOViolation, match=r"MemoryTier\.exists of 1 keys"), forbid_io():
        tier.exists([key_for(1)])
