"""How bytes move between a device and the slots of the host pool: one copier for each kind of device.

Neither torch nor numpy is imported before a copier is made.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ctypes import memmove
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvcascade.errors import ConfigError
from kvcascade.tiers.blocks import address
from kvcascade.types import Buffer

from .transfers import Direction

if TYPE_CHECKING:
    import torch

__all__ = ["Copier", "HostCopier", "Piece", "Slots", "Ticket", "copier_for", "rows"]

_log = logging.getLogger(__name__)

_LOAD = Direction.LOAD


class Slots(Protocol):
    """The memory of the host pool, as `kvcascade.tiers.host.HostPool` gives it: slots at equal distances."""

    @property
    def slots(self) -> int:
        """How many there are."""
        ...

    def slot(self, index: int) -> Buffer:
        """The bytes of one slot, writable, without a copy."""
        ...


class Piece(NamedTuple):
    """Consecutive blocks of one tensor, and the bytes of a slot that belong to them."""

    tensor: int
    block: int
    number: int
    slot: int
    start: int
    """First byte in the slot."""


class Ticket(Protocol):
    """One transfer that has been started."""

    def done(self) -> bool:
        """Whether it has ended. Does not wait."""
        ...

    def wait(self) -> None:
        """Returns when it has ended, well or not."""
        ...

    def failed(self) -> set[int]:
        """Once it has ended: the places of the chunks that were not copied."""
        ...


class Copier(Protocol):
    """Starts copies and says when they have ended. Copies of one direction run in the order of their start; used
    by one thread, the engine's."""

    def fence(self) -> Any:
        """All that the engine has given to the device up to now."""
        ...

    def start(self, chunks: Sequence[Sequence[Piece]], direction: Direction, after: Any) -> Ticket:
        """Starts copying these chunks, each given by its pieces, once what is before the fence `after` is done."""
        ...

    def close(self) -> None:
        """Waits for what was started and releases everything. A second call does nothing."""
        ...


def rows(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor as bytes: shape (blocks, bytes of a block), uint8, the same memory.

    Raises:
        ConfigError: the bytes of a block do not lie together.
    """
    import torch

    flat = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
    if flat.stride(1) != 1 or flat.data_ptr() != tensor.data_ptr():
        raise ConfigError(f"a KV tensor of shape {tuple(tensor.shape)}: the bytes of a block must lie together")
    return flat.view(torch.uint8)


def copier_for(tensors: Sequence["torch.Tensor"], pool: Slots) -> Copier:
    """The copier for the device that the tensors, as `rows` gives them, are on.

    Raises:
        ConfigError: tensors on several devices, or on one that is not served.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ConfigError(f"KV tensors on {sorted(map(str, devices)) or 'no device'}; all must be on one")
    kind = devices.pop().type
    if kind == "cpu":
        return HostCopier(tensors, pool)
    if kind == "cuda":
        from .cuda import CudaCopier

        return CudaCopier(tensors, pool)
    raise ConfigError(f"KV tensors on a {kind!r} device; 'cpu' and 'cuda' are served")


class HostCopier:
    """Copies within host memory, on a thread of its own, which lets go of the interpreter lock for each copy.

    What the engine has computed is in memory when it says so, so there is nothing to wait for.
    """

    def __init__(self, tensors: Sequence["torch.Tensor"], pool: Slots) -> None:
        self._held: Any = (tensors, pool.slot(0))
        """The memory stays as long as copies may run."""
        self._tensors = [(tensor.data_ptr(), *tensor.shape[1:], tensor.stride(0)) for tensor in tensors]
        self._slots = address(pool.slot(0))
        self._distance = address(pool.slot(1)) - self._slots if pool.slots > 1 else 0
        self._thread = ThreadPoolExecutor(1, "kvcascade-copy")

    def fence(self) -> None:
        return None

    def start(self, chunks: Sequence[Sequence[Piece]], direction: Direction, after: None) -> "_HostTicket":
        return _HostTicket(self._thread.submit(self._copy_all, chunks, direction), len(chunks))

    def close(self) -> None:
        self._thread.shutdown()
        self._held = None

    def copy(self, piece: Piece, direction: Direction) -> None:
        """Copies one piece. Called on the copying thread."""
        tensor, block, number, slot, start = piece
        device, nbytes, distance = self._tensors[tensor]
        host, device = self._slots + slot * self._distance + start, device + block * distance
        target, source = (device, host) if direction is _LOAD else (host, device)
        if distance == nbytes or number == 1:
            memmove(target, source, nbytes * number)
            return
        between = (distance, nbytes) if direction is _LOAD else (nbytes, distance)
        for place in range(number):
            memmove(target + place * between[0], source + place * between[1], nbytes)

    def _copy_all(self, chunks: Sequence[Sequence[Piece]], direction: Direction) -> set[int]:
        failed = set()
        for place, pieces in enumerate(chunks):
            try:
                for piece in pieces:
                    self.copy(piece, direction)
            except Exception as error:  # the thread's top: what goes wrong with a chunk is that chunk's failure
                _log.warning("%s of a chunk failed: %r", direction.value, error)
                failed.add(place)
        return failed


class _HostTicket:
    def __init__(self, future: "Future[set[int]]", chunks: int) -> None:
        self._future = future
        self._chunks = chunks

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        wait([self._future])

    def failed(self) -> set[int]:
        if self._future.cancelled() or self._future.exception() is not None:
            return set(range(self._chunks))
        return self._future.result()
