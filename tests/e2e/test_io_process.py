"""A real engine whose stack does its I/O in a process of its own."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from kvcascade.testing.vllm import CONNECTOR, LOADED, SPEC, on_disk

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NOTHING = [0, 0, 0]


@pytest.fixture(scope="module", params=[SPEC, CONNECTOR])
def way(request):
    return request.param


def io_processes(folder):
    """Those that have files of this folder open."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            files = [str(fd.readlink()) for fd in (command.parent / "fd").iterdir()]
            if b"kvcascade.manager.io.child" in command.read_bytes() and str(folder) in " ".join(files):
                found.append(int(command.parent.name))
    return found


def test_answers_stay_and_what_was_computed_is_loaded(engine, way, ask, tmp_path):
    """Also after a restart, and when the I/O process is killed."""
    stack = {**on_disk(tmp_path / "disk"), "io": "process"}
    first = engine(stack, way)
    assert ask(first) == NOTHING
    assert ask(first) == LOADED
    assert len(io_processes(tmp_path)) == 1
    assert first.finish(folder=str(tmp_path / "disk")) == {"threads": [], "maps": [], "files": []}
    first.close()
    assert not io_processes(tmp_path)

    second = engine(stack, way)
    assert ask(second) == LOADED
    (child,) = io_processes(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert second.reset()
    assert ask(second) == LOADED
    assert second.finish(folder=str(tmp_path / "disk")) == {"threads": [], "maps": [], "files": []}
    second.close()
    assert not io_processes(tmp_path)
