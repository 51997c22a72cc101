"""Stacks with an I/O process, also for an engine in a process of its own: run as a script, it stores four chunks,
says the ids of its I/O process and of a fork of its own (0 for none), and waits to be killed. With the option
"early" it is killed as soon as it has started the I/O process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcascade.configs import parse_stack
from kvcascade.configs.schema import StackSettings
from kvcascade.manager.io import running
from kvcascade.stack import build
from kvcascade.testing import Driver, key_for
from kvcascade.types import Namespace

CHUNK = 4096
NAMESPACE = Namespace.of(model="test")


def stack_of(tiers: Sequence[dict[str, Any]], slots: int, **options: Any) -> StackSettings:
    host = {"type": "host", "capacity": (slots + 1) * 4096, "eviction": "lru", "staging": 5 * 4096}
    return parse_stack({"version": 1, "log_every": "0s", "io": "process", "tiers": [host, *tiers], **options})


def io_children() -> list[int]:
    """The I/O processes of this process that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = stat.with_name("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z" and b"kvcascade.manager.io.child" in command:
            found.append(int(stat.parent.name))
    return found


def start(path: str) -> Driver:
    disk = {"type": "disk", "path": f"{path}/disk", "capacity": "4MiB", "queue": 1.0}
    driver = Driver(build(stack_of([disk], 16), NAMESPACE, CHUNK))
    driver.serve("store", [key_for(number) for number in range(4)])
    return driver


def serve(path: str) -> None:
    start(path).manager.shutdown()


def daemon(path: str) -> None:
    """Serves in a daemonic process that was spawned; exits as it did."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(path,), daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)


def die_early() -> None:
    """From here on: once the I/O process is started, a fork lives on in place of this process."""
    start_child = running._popen

    def popen(socket_fd: int, pool_fd: int, parent: int) -> "subprocess.Popen[bytes]":
        child = start_child(socket_fd, pool_fd, parent)
        forked = os.fork()
        if forked:
            print(child.pid, forked, flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return child

    running._popen = popen


def main(path: str, *options: str) -> None:
    if "early" in options:
        die_early()
    start(path)
    forked = os.fork() if "fork" in options else 0
    if forked or "fork" not in options:
        print(io_children()[0], forked, flush=True)  # noqa: T201
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
