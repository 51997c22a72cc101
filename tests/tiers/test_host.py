"""The host pool: exact slots, honest about memory, nothing left behind."""

import ctypes
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcascade.errors import ClosedError, ConfigError, ProtocolError
from kvcascade.testing import bytes_for, key_for
from kvcascade.tiers import host
from kvcascade.tiers.available import available_memory
from kvcascade.tiers.host import HostPool, HostSettings, slots_for

MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc are Linux's")


def resident() -> int:
    """Bytes of this process's shared memory that are present."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem"))


@pytest.mark.parametrize("slot_bytes", [1, 100, 4095, 4096, 4097, 65536])
def test_slots_are_exact_aligned_and_apart(slot_bytes: int) -> None:
    with HostPool(5, slot_bytes) as pool:
        for place in range(5):
            pool.slot(place)[:] = bytes_for(key_for(place), slot_bytes)
        for place in range(5):
            slot = pool.slot(place)
            address = ctypes.addressof(ctypes.c_char.from_buffer(slot))
            assert (slot.nbytes, slot.format, slot.readonly, slot.contiguous) == (slot_bytes, "B", False, True)
            assert address % 4096 == 0
            assert bytes(slot) == bytes_for(key_for(place), slot_bytes)


@pytest.mark.parametrize("place", [-1, 5, 1 << 40])
def test_a_slot_that_is_not_there_is_the_callers_mistake(place: int) -> None:
    with HostPool(5, 100) as pool, pytest.raises(ProtocolError):
        pool.slot(place)


def test_slots_are_zero_at_first() -> None:
    with HostPool(3, 5000) as pool:
        assert all(bytes(pool.slot(place)) == bytes(5000) for place in range(3))


@LINUX
def test_the_header_says_what_the_file_is() -> None:
    with HostPool(7, 5000) as pool:
        assert pool.fd is not None
        raw = os.pread(pool.fd, host._HEADER.size, 0)
        assert host._HEADER.unpack(raw) == (b"KVCSPOOL", 2, os.getpid(), 7, 5000, 8192, 0)
        assert os.fstat(pool.fd).st_size == pool.nbytes == 4096 + 7 * 8192


@LINUX
def test_another_process_sees_the_same_bytes_through_the_descriptor() -> None:
    with HostPool(2, 4096) as pool:
        assert pool.fd is not None
        with mmap.mmap(pool.fd, pool.nbytes) as other:
            pool.slot(1)[:] = bytes_for(key_for(1), 4096)
            assert other[8192:] == bytes_for(key_for(1), 4096)


# --- size


@pytest.mark.parametrize(
    ("capacity", "slot_bytes", "slots"),
    [
        (4096, 4096, 0),
        (8191, 4096, 0),
        (8192, 4096, 1),
        (8192, 1, 1),
        (MIB, 65536, 15),
        (MIB + 4096, 65536, 16),
        (MIB, 4097, 127),
        (0, 4096, 0),
    ],
)
def test_a_capacity_is_hard(capacity: int, slot_bytes: int, slots: int) -> None:
    assert slots_for(capacity, slot_bytes) == slots
    if slots:
        with HostPool(slots, slot_bytes) as pool:
            assert pool.nbytes <= capacity


@LINUX
@pytest.mark.parametrize("capacity", [4_299_161, 5 * MIB, 9 * MIB, 1_181_116_006])
def test_it_takes_what_was_configured_and_no_more(capacity: int) -> None:
    """LMCache/LMCache#1147, pytorch/pytorch#95823: a pool must not take up to twice its size."""
    before = resident()
    with HostPool(slots_for(capacity, 65536), 65536) as pool:
        taken = resident() - before
        assert taken == pool.nbytes
        assert capacity * 0.95 - 2 * MIB <= taken <= capacity * 1.05 + 2 * MIB
    assert resident() == before


@LINUX
def test_all_pages_are_there_also_where_the_kernel_can_not_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_POPULATE_WRITE", 9999)  # EINVAL, as on a kernel that does not know the advice
    before = resident()
    with HostPool(100, 65536) as pool:
        assert resident() - before == pool.nbytes


def test_progress_of_a_large_pool_is_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_LOG_ABOVE", MIB)
    monkeypatch.setattr(host, "_PIECE", MIB)
    with caplog.at_level(logging.INFO, "kvcascade"), HostPool(slots_for(20 * MIB, MIB), MIB):
        pass
    assert caplog.messages[0] == "taking 19 MiB of host memory"
    assert caplog.messages[-1] == "host memory: 100 % of 19 MiB"
    assert 9 <= len(caplog.messages) <= 12


# --- too large


@LINUX
def test_more_than_there_is_is_refused_before_anything_is_mapped() -> None:
    """vllm-project/vllm#46949, vllm-project/vllm#44888: a message with both numbers, not SIGBUS later."""
    available = available_memory()
    assert available is not None
    asked = available.bytes + (1 << 30)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError) as caught:
        HostPool(asked // MIB, MIB, key="tiers[0].capacity")
    assert str(caught.value).startswith("tiers[0].capacity: ")
    assert f"{4096 + asked // MIB * MIB} bytes) asked" in str(caught.value)
    assert "bytes) available: " in str(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


@pytest.mark.parametrize("slots", [1 << 30, 1 << 40])
def test_what_the_kernel_refuses_is_refused_too(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not say how much memory there is."""
    monkeypatch.setattr(host, "available_memory", lambda: None)
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.capacity: .* can't be mapped: "):
        HostPool(slots, 1 << 30)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (-1, 4096), (4, 0)])
def test_a_pool_of_nothing_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.capacity: holds not one chunk"):
        HostPool(slots, slot_bytes)


@LINUX
def test_an_interrupt_while_memory_is_taken_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    before = resident()
    monkeypatch.setattr(host, "_populator", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostPool(100, 65536)
    assert resident() == before


# --- the end


def test_closing_twice_is_closing_once() -> None:
    pool = HostPool(2, 4096)
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.slot(0)
    with pytest.raises(ClosedError):
        _ = pool.fd


@LINUX
def test_a_slot_that_is_still_held_stays_valid_and_frees_the_memory_at_last() -> None:
    """As where a thread still writes while others shut down: it must not write into memory that is not its own."""
    before = resident()
    pool = HostPool(64, 65536)
    held = pool.slot(3)
    pool.close()
    held[:] = bytes_for(key_for(3), 65536)
    assert bytes(held) == bytes_for(key_for(3), 65536)
    assert resident() > before
    del held
    assert resident() == before


@LINUX
def test_a_killed_process_leaves_no_shared_memory() -> None:
    """vllm-project/vllm#51579: crashes must not fill /dev/shm until nothing starts any more."""
    code = (
        "import time; from kvcascade.tiers.host import HostPool; pool = HostPool(64, 65536); "
        "print('there', flush=True); time.sleep(600)"
    )
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == b"there\n"
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert [file.name for file in Path("/dev/shm").iterdir() if "kvcascade" in file.name] == []


@LINUX
def test_a_small_dev_shm_does_not_bind_it() -> None:
    """A container's is 64 MiB; the pool is no file there."""
    with HostPool(64, 65536) as pool:
        assert pool.fd is not None
        assert str(Path(f"/proc/self/fd/{pool.fd}").readlink()) == "/memfd:kvcascade-host (deleted)"


# --- settings


def test_a_probe_says_what_is_needed_and_how_many_chunks_fit() -> None:
    probe = HostSettings.model_validate({"capacity": "16MiB"}).probe(65536)
    assert dict(probe.facts)["memory needed"] == "16 MiB"
    assert probe.problems == []
    assert probe.chunks == 255


@LINUX
def test_a_probe_says_what_will_not_work() -> None:
    probe = HostSettings.model_validate({"capacity": "1PiB"}).probe()
    assert len(probe.problems) == 1
    assert probe.problems[0].startswith(f"capacity: 1 PiB ({1 << 50} bytes) asked, ")
    assert probe.chunks is None
