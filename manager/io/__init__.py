"""The I/O process: the lanes of a stack in a child of the engine's process, over the same host pool.

An engine computes in Python without pause, and each system call of a thread beside it waits until the interpreter
lock comes back. In a process of its own I/O waits for nobody. `IoProcess` starts the child, and starts it again;
`ProcessLane` and `RemoteTier` stand for a tier on the engine's side, `wire` is what passes, and `child` is
the other side, where each tier has the `ThreadLane` that it would have in the engine.
"""

from .lane import ProcessLane
from .process import IoProcess
from .remote import RemoteTier

__all__ = ["IoProcess", "ProcessLane", "RemoteTier"]
