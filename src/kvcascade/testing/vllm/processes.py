"""Processes that are begun by a test, and that it wants to end."""

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["ONE_THREAD", "Group"]

_END = 60.0

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""For an engine with a tiny model: several threads, bound to cores, mostly wait for each other, the more so the
busier the machine is."""


class Group:
    """A process that leads a group of its own, and the processes that it has begun."""

    def __init__(self, pid: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
        """`process`: the same, where it is a child of ours."""
        self.pid = pid
        self._process = process
        self._ended = os.pidfd_open(pid)

    @classmethod
    def spawn(
        cls, command: Sequence[str], log: Path, env: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> "Group":
        """A command, with its output at the end of `log` and these variables besides our own."""
        with log.open("a") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                env=os.environ | env,
                start_new_session=True,
            )
        return cls(process.pid, process)

    def members(self) -> list[int]:
        """The ids of all its processes."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getpgid(int(folder.name)) == self.pid:
                    found.append(int(folder.name))
        return found

    def ends_within(self, seconds: float) -> bool:
        """Whether the leader has ended, waiting so long for it."""
        return self._ended < 0 or bool(select.select([self._ended], [], [], seconds)[0])

    def terminate(self) -> None:
        """SIGTERM to the leader."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """kill -9, all of them. A second call does nothing."""
        if self._ended < 0:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.ends_within(_END)
        if self._process:
            self._process.wait()
        os.close(self._ended)
        self._ended = -1
