"""Copies between a CUDA device and the slots of the host pool. torch is imported when a copier is made."""

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcascade.types import Buffer

from .copies import Piece, Slots
from .transfers import Direction

if TYPE_CHECKING:
    import torch

__all__ = ["CudaCopier"]

_log = logging.getLogger(__name__)


class CudaCopier:
    """Copies between a CUDA device and pinned host memory, on a stream for each direction.

    Stores wait on the device for the fence, an event of the engine's current stream: the kernels that write the
    blocks run first. So do loads: what was still to write their blocks has written. The pool's memory is
    registered with the driver; where it refuses, copies are right and slower, and a line in the log says so. No
    memory of the device is taken.

    What the device says no to is a failed copy, and never raised: at the submission of a chunk it is that chunk's
    failure, at anything that orders or ends a transfer the whole transfer's.
    """

    def __init__(self, tensors: "Sequence[torch.Tensor]", pool: Slots, cuda: Any = None) -> None:
        """Args:
        tensors: the KV memory, as `rows` gives it, on one device.
        cuda: what is called of `torch.cuda`; another one in tests.
        """
        import torch

        self._cuda = cuda or torch.cuda
        self._rows = tensors
        self._whole = [tensor.view(-1) if tensor.is_contiguous() else None for tensor in tensors]
        self._device = tensors[0].device
        self._pool = pool
        self._slots: dict[int, torch.Tensor] = {}
        self._streams = {direction: self._cuda.Stream(self._device) for direction in Direction}
        self._pinned = self._pin()

    def fence(self) -> Any:
        """None where the device says no: what would come after it fails."""
        try:
            event = self._cuda.Event()
            event.record(self._cuda.current_stream(self._device))
        except RuntimeError as error:
            _log.warning("the device can't be waited for: %s", error)
            return None
        return event

    def start(self, chunks: Sequence[Sequence[Piece]], direction: Direction, after: Any) -> "_CudaTicket":
        stream = self._streams[direction]
        failed: set[int] = set()
        try:
            if after is None:
                raise RuntimeError("there is no fence to come after")
            with self._cuda.stream(stream):
                stream.wait_event(after)
                failed = {place for place, pieces in enumerate(chunks) if not self._submit(pieces, direction)}
                end = self._cuda.Event()
                end.record(stream)
        except RuntimeError as error:
            _log.warning("%s of %d chunks failed: %s", direction.value, len(chunks), error)
            with suppress(RuntimeError):
                stream.synchronize()  # some may have begun: nobody may use their blocks and slots before they end
            return _CudaTicket(None, len(chunks), set(range(len(chunks))))
        return _CudaTicket(end, len(chunks), failed)

    def close(self) -> None:
        for stream in self._streams.values():
            with suppress(RuntimeError):
                stream.synchronize()
        self._streams.clear()
        if self._pinned is not None:
            with self._cuda.device(self._device), suppress(RuntimeError):
                self._cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        self._slots.clear()

    def _submit(self, pieces: Sequence[Piece], direction: Direction) -> bool:
        """Gives the copies of one chunk to the current stream. False where the device does not take them."""
        try:
            for piece in pieces:
                self._copy(piece, direction)
        except RuntimeError as error:
            _log.warning("%s of a chunk failed: %s", direction.value, error)
            return False
        return True

    def _copy(self, piece: Piece, direction: Direction) -> None:
        for host, device in self._pairs(piece):
            source, target = (device, host) if direction is Direction.STORE else (host, device)
            target.copy_(source, non_blocking=True)

    def _pairs(self, piece: Piece) -> "Iterable[tuple[torch.Tensor, torch.Tensor]]":
        """What is copied at once. Blocks with gaps between them are copied one by one: else torch takes memory of
        the device for them."""
        tensor, block, number, slot, start = piece
        rows, whole = self._rows[tensor], self._whole[tensor]
        nbytes = rows.shape[1]
        host = self._slot(slot).narrow(0, start, number * nbytes)
        if whole is not None:
            return [(host, whole.narrow(0, block * nbytes, number * nbytes))]
        return zip(host.view(number, nbytes), rows.narrow(0, block, number), strict=True)

    def _slot(self, index: int) -> "torch.Tensor":
        import torch

        if index not in self._slots:
            self._slots[index] = torch.frombuffer(self._pool.slot(index), dtype=torch.uint8)
        return self._slots[index]

    def _pin(self) -> int | None:
        """Registers the pool's memory; returns its address, None where the driver does not want to."""
        import torch

        first, last = self._pool.slot(0), self._pool.slot(self._pool.slots - 1)
        address = _address(first)
        nbytes = _address(last) + len(last) - address
        with self._cuda.device(self._device):
            with suppress(RuntimeError):
                if int(self._cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
                    return address
            with suppress(RuntimeError):
                # CUDA keeps its last error, and the next kernel that is launched is blamed for it: this one is.
                torch.ones(1, device=self._device)
        _log.warning("the driver does not pin the host pool's %d bytes: copies will be slower", nbytes)
        return None


class _CudaTicket:
    """One transfer.

    Args:
        end: the event behind its last copy; None where it has ended.
    """

    def __init__(self, end: Any, chunks: int, failed: set[int]) -> None:
        self._end = end
        self._chunks = chunks
        self._failed = failed

    def done(self) -> bool:
        return self._end is None or self._ended(self._end.query)

    def wait(self) -> None:
        if self._end is not None:
            self._ended(self._end.synchronize)

    def failed(self) -> set[int]:
        return self._failed

    def _ended(self, ask: Callable[[], bool | None]) -> bool:
        try:
            if ask() is False:
                return False
        except RuntimeError as error:
            _log.warning("copies with the device failed: %s", error)
            self._failed = set(range(self._chunks))
        self._end = None
        return True


def _address(view: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
