"""The copier for CUDA devices: what it does where the device says no, and, with a device, that it is right.

The first half runs everywhere: tensors are the host's, and a stand-in for `torch.cuda` does what the copier calls,
but for what a test lets fail. `pytest tests/connector -m cuda` runs the second half, which needs a device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvcascade.connector import ChunkCopy, ConnectorMetadata, Direction, GroupLayout, TransferWorker
from kvcascade.connector.copies import Piece, rows
from kvcascade.connector.cuda import CudaCopier
from kvcascade.tiers.host import HostPool

from .conftest import NEEDS_CUDA, random, raw, run, transfer

STORE, LOAD = Direction.STORE, Direction.LOAD


class Device:
    """A `torch.cuda` over the host's memory, where copies are made at once, and end when `ended` says so.

    Attributes:
        refuses: what fails, by name.
        calls: what was called, in order.
    """

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.calls: list[str] = []
        self.ended = True
        self.registered: set[int] = set()

    def does(self, what: str) -> None:
        self.calls.append(what)
        if what in self.refuses:
            raise RuntimeError(f"CUDA error: {what}")

    def Stream(self, device: Any) -> "Stream":
        return Stream(self, "copies")

    def current_stream(self, device: Any) -> "Stream":
        return Stream(self, "engine")

    def Event(self) -> "Event":
        return Event(self)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        yield

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def cudart(self) -> "Device":
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if "register" in self.refuses:
            return 712
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: "Event") -> None:
        assert event.stream == "engine", "copies wait for what the engine has queued"
        self.device.does("wait for event")

    def synchronize(self) -> None:
        self.device.does("synchronize stream")


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = ""

    def record(self, stream: Stream) -> None:
        self.device.does(f"record on {stream.name}")
        self.stream = stream.name

    def query(self) -> bool:
        assert self.stream, "an event that was never recorded looks as if it had ended"
        self.device.does("query")
        return self.device.ended

    def synchronize(self) -> None:
        assert self.stream, "an event that was never recorded is not waited for"
        self.device.does("synchronize event")
        self.device.ended = True


class Copier(CudaCopier):
    """Its device refuses copies of the blocks in `bad`."""

    bad: frozenset[int] = frozenset()

    def _copy(self, piece: Piece, direction: Direction) -> None:
        if piece.block in self.bad:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super()._copy(piece, direction)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def layer() -> torch.Tensor:
    return random(16, 8)


@pytest.fixture
def copier(pool: HostPool, layer: torch.Tensor, device: Device) -> Copier:
    return Copier([rows(layer)], pool, cuda=device)


@pytest.fixture
def failing(pool: HostPool, layer: torch.Tensor, copier: Copier, device: Device) -> Iterator[TransferWorker]:
    made = TransferWorker([layer], [GroupLayout(1, (0,))], pool, copier=copier)
    yield made
    device.refuses.clear()
    made.shutdown()


def chunks(*blocks: int) -> list[ChunkCopy]:
    return [ChunkCopy(0, slot, 0, (block,)) for slot, block in enumerate(blocks)]


def served(worker: TransferWorker, pool: HostPool, layer: torch.Tensor) -> bool:
    """Whether a store and a load go well."""
    ok = run(worker, transfer(90, STORE, ChunkCopy(0, 7, 0, (2,)))) == {}
    ok &= run(worker, transfer(91, LOAD, ChunkCopy(0, 7, 0, (9,)))) == {}
    return ok and raw(layer[9]) == raw(layer[2]) == bytes(pool.slot(7))[:8]


def test_what_the_device_takes_is_copied(failing: TransferWorker, pool: HostPool, layer: torch.Tensor) -> None:
    assert served(failing, pool, layer)


def test_a_chunk_that_the_device_does_not_take_fails_alone(
    failing: TransferWorker, pool: HostPool, layer: torch.Tensor, copier: Copier
) -> None:
    """vllm-project/vllm#39732: the others of its job are copied, and the process lives."""
    copier.bad = frozenset({3})
    assert run(failing, transfer(1, STORE, *chunks(1, 3, 5))) == {1: {1}}
    assert bytes(pool.slot(2))[:8] == raw(layer[5]) and set(bytes(pool.slot(1))) == {0xAA}
    assert served(failing, pool, layer)


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_copies_that_turn_out_to_have_failed_when_asked_fail_as_a_whole(
    failing: TransferWorker, pool: HostPool, layer: torch.Tensor, device: Device, direction: Direction
) -> None:
    """An error of the device comes up in whatever is called next: here the question whether the copies have
    ended. It is asked once, and the job reported once."""
    device.ended = False
    one = transfer(1, direction, *chunks(1, 3))
    failing.start_load_kv(ConnectorMetadata(loads=[one]))
    assert not failing.get_finished()
    device.refuses.add("query")
    report = failing.get_finished()
    assert (report.ended, report.failed) == ({1: 1}, {1: {0, 1}}) and not failing.get_finished()
    device.refuses.clear()
    device.ended = True
    assert served(failing, pool, layer)


def test_copies_that_turn_out_to_have_failed_while_they_are_waited_for_fail_as_a_whole(
    failing: TransferWorker, pool: HostPool, layer: torch.Tensor, device: Device
) -> None:
    device.ended = False
    failing.wait_for_save(ConnectorMetadata(stores=[transfer(1, STORE, *chunks(1, 3))]))
    device.refuses.add("synchronize event")
    failing.handle_preemptions(ConnectorMetadata(flush={1}))
    assert device.calls.count("synchronize event") == 1
    failing.handle_preemptions(ConnectorMetadata(flush={1}))
    assert device.calls.count("synchronize event") == 1, "what has ended is not waited for again"
    assert failing.get_finished().failed == {1: {0, 1}} and not failing.get_finished()
    device.refuses.clear()
    device.ended = True
    assert served(failing, pool, layer)


@pytest.mark.parametrize("what", ["record on engine", "wait for event", "record on copies"])
def test_a_transfer_that_cannot_be_ordered_fails_as_a_whole(
    failing: TransferWorker, pool: HostPool, layer: torch.Tensor, device: Device, what: str
) -> None:
    """Without its fence a copy might read what has not been written (vllm-project/vllm#45704), and without an
    event at its end nobody would know when it is over: it is failed at once, and what has begun is waited for."""
    device.refuses.add(what)
    load, store = transfer(1, LOAD, *chunks(1, 3)), transfer(2, STORE, *chunks(5, 7))
    before = raw(layer)
    failing.start_load_kv(ConnectorMetadata(loads=[load]))
    failing.wait_for_save(ConnectorMetadata(stores=[store]))
    failing.handle_preemptions(ConnectorMetadata(flush={2}))
    report = failing.get_finished()
    assert (report.ended, report.failed) == ({1: 1, 2: 1}, {1: {0, 1}, 2: {0, 1}})
    assert device.calls.count("synchronize stream") == 2
    if what != "record on copies":
        assert raw(layer) == before and set(bytes(pool.slot(0))) == {0xAA}, "copied without a fence"
    device.refuses.clear()
    assert served(failing, pool, layer)


def test_memory_that_the_driver_does_not_pin_is_copied_all_the_same(
    pool: HostPool, layer: torch.Tensor, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.refuses.add("register")
    worker = TransferWorker([layer], [GroupLayout(1, (0,))], pool, copier=Copier([rows(layer)], pool, cuda=device))
    assert "does not pin the host pool's" in caplog.text
    assert served(worker, pool, layer)
    worker.shutdown()


def test_a_device_that_is_lost_is_left_in_peace(failing: TransferWorker, device: Device) -> None:
    """Shutdown frees what is ours, whatever the device says."""
    failing.start_load_kv(ConnectorMetadata(loads=[transfer(1, LOAD, *chunks(1))]))
    assert device.registered
    device.refuses |= {"query", "synchronize event", "synchronize stream"}
    failing.shutdown()
    failing.shutdown()
    assert not device.registered


def test_blocks_with_gaps_between_them_take_no_memory_of_the_device(
    pool: HostPool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch copies between host and device through a buffer on the device where one side is not contiguous."""
    packed = random(8, 20)
    copier = CudaCopier([rows(packed[:, 4:12])], pool, cuda=device)
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append((self, other))
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    copier.start([[Piece(0, 2, 3, 0, 0)]], STORE, copier.fence())
    assert len(copied) == 3 and all(side.is_contiguous() for pair in copied for side in pair)
    assert bytes(pool.slot(0))[:24] == raw(packed[2:5, 4:12])
    copier.close()


# With a device


Make = Callable[..., TransferWorker]


def on_device(*shape: int) -> torch.Tensor:
    return random(*shape).to("cuda")


def flush(worker: TransferWorker, *jobs: int) -> None:
    worker.handle_preemptions(ConnectorMetadata(flush=set(jobs)))


class TestOnADevice:
    pytestmark = NEEDS_CUDA

    def test_a_store_waits_for_the_kernels_that_write_its_blocks(self, worker: Make, pool: HostPool) -> None:
        """vllm-project/vllm#45704: the host runs ahead of the device."""
        layer = torch.zeros(8, 1024, dtype=torch.uint8, device="cuda")
        w = worker([layer], [GroupLayout(1, (0,))])
        for number in range(1, 20):
            torch.cuda._sleep(50_000_000)
            layer[3] = number
            w.wait_for_save(ConnectorMetadata(stores=[transfer(number, STORE, ChunkCopy(0, 0, 0, (3,)))]))
            flush(w, number)
            assert set(bytes(pool.slot(0))[:1024]) == {number}

    def test_a_store_is_done_before_its_blocks_are_written_again(self, worker: Make, pool: HostPool) -> None:
        """vllm-project/vllm#29870: the flush list is waited for before the next kernels are launched."""
        layer = torch.zeros(8, 1 << 10, dtype=torch.uint8, device="cuda")
        w = worker([layer], [GroupLayout(1, (0,))])
        for number in range(1, 20):
            layer[3] = number
            torch.cuda._sleep(50_000_000)
            w.wait_for_save(ConnectorMetadata(stores=[transfer(number, STORE, ChunkCopy(0, 0, 0, (3,)))]))
            flush(w, number)
            layer[3] = 99
            assert set(bytes(pool.slot(0))[:1024]) == {number}

    def test_a_load_waits_for_what_still_writes_its_blocks(self, worker: Make, pool: HostPool) -> None:
        layer = torch.zeros(8, 1024, dtype=torch.uint8, device="cuda")
        w = worker([layer], [GroupLayout(1, (0,))])
        pool.slot(0)[:1024] = b"\x07" * 1024
        torch.cuda._sleep(100_000_000)
        layer[3] = 1
        w.start_load_kv(ConnectorMetadata(loads=[transfer(1, LOAD, ChunkCopy(0, 0, 0, (3,)))]))
        flush(w, 1)
        assert set(layer[3].tolist()) == {7}

    def test_the_stream_that_is_current_for_the_engine_is_waited_for(self, worker: Make, pool: HostPool) -> None:
        """Engines compute on streams of their own."""
        layer = torch.zeros(8, 1024, dtype=torch.uint8, device="cuda")
        w = worker([layer], [GroupLayout(1, (0,))])
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)
            layer[3] = 5
            w.wait_for_save(ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))]))
        flush(w, 1)
        assert set(bytes(pool.slot(0))[:1024]) == {5}

    def test_nothing_waits_but_for_the_flush_list(self, worker: Make, pool: HostPool) -> None:
        layer = torch.zeros(8, 1024, dtype=torch.uint8, device="cuda")
        w = worker([layer], [GroupLayout(1, (0,))])
        torch.cuda._sleep(2_000_000_000)
        w.wait_for_save(ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))]))
        w.handle_preemptions(ConnectorMetadata())
        assert not w.get_finished(), "the device was waited for"
        flush(w, 1)
        assert w.get_finished().ended == {1: 1}

    def test_blocks_may_be_views_into_a_wider_tensor(self, worker: Make, pool: HostPool) -> None:
        packed = on_device(8, 20)
        w = worker([packed[:, 4:12]], [GroupLayout(2, (0,))])
        run(w, transfer(1, STORE, ChunkCopy(0, 0, 0, (3, 4))))
        assert bytes(pool.slot(0))[:16] == raw(packed[3:5, 4:12])
        old = packed.clone()
        held = torch.cuda.memory_allocated()
        run(w, transfer(2, LOAD, ChunkCopy(0, 0, 0, (6, 7))))
        assert torch.cuda.memory_allocated() == held
        assert raw(packed[6:8, 4:12]) == raw(old[3:5, 4:12])
        assert raw(packed[6:8, :4]) == raw(old[6:8, :4]) and raw(packed[6:8, 12:]) == raw(old[6:8, 12:])

    def test_many_blocks_of_many_layers_come_back(self, worker: Make, pool: HostPool) -> None:
        layers = [on_device(64, 64) for _ in range(8)]
        w = worker(layers, [GroupLayout(4, tuple(range(8)))])
        tables = [(1, 2, 3, 4), (9, 7, 5, 60), (20, 21, 40, 41), (33, 32, 31, 30)]
        run(w, transfer(1, STORE, *(ChunkCopy(0, slot, 0, table) for slot, table in enumerate(tables))))
        old = [layer.clone() for layer in layers]
        for layer in layers:
            layer.zero_()
        run(w, transfer(2, LOAD, *(ChunkCopy(0, slot, 0, table) for slot, table in enumerate(tables))))
        for layer, before in zip(layers, old, strict=True):
            for table in tables:
                assert raw(layer[list(table)]) == raw(before[list(table)])

    def test_the_pool_is_pinned_and_let_go(self, pool: HostPool) -> None:
        layer = torch.zeros(8, 64, dtype=torch.uint8, device="cuda")
        for _ in range(2):  # a second registration succeeds only if the first was released
            copier = CudaCopier([rows(layer)], pool)
            assert copier._pinned is not None
            copier.close()

    def test_a_refusal_to_pin_harms_nothing_that_comes_after(self, worker: Make, pool: HostPool) -> None:
        """The driver does not register memory twice. Its error is not left for the next kernel to find."""
        layer = on_device(8, 64)
        first = worker([layer], [GroupLayout(1, (0,))])
        second = worker([layer], [GroupLayout(1, (0,))], offset=64)
        assert int(torch.ones(4, device="cuda").sum()) == 4
        for w in (first, second):
            assert run(w, transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))) == {}
        assert bytes(pool.slot(0))[:128] == raw(layer[3]) * 2

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
    def test_the_device_of_the_tensors_is_used_whichever_is_current(self, worker: Make, pool: HostPool) -> None:
        layer = random(8, 64).to("cuda:1")
        w = worker([layer], [GroupLayout(1, (0,))])
        with torch.cuda.device(0):
            run(w, transfer(1, STORE, ChunkCopy(0, 0, 0, (3,))))
            run(w, transfer(2, LOAD, ChunkCopy(0, 0, 0, (5,))))
        assert raw(layer[5]) == raw(layer[3]) == bytes(pool.slot(0))[:64]


def test_the_stand_in_has_what_the_copier_calls(copier: Copier) -> None:
    """Each name is one of the real `torch.cuda`."""
    for name in ("Stream", "Event", "current_stream", "stream", "device", "cudart"):
        assert callable(getattr(torch.cuda, name)) and callable(getattr(Device, name))
    for ours, theirs in ((Stream, torch.cuda.Stream), (Event, torch.cuda.Event)):
        names: Sequence[str] = [name for name in vars(ours) if not name.startswith("_")]
        assert names and all(callable(getattr(theirs, name)) for name in names)
    copier.close()
