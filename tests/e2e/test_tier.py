"""What is different where the stack is one tier below vLLM's own host memory."""

import pytest

from kvcascade.testing.vllm import BLOCK, LOADED, TIER, host, on_disk, shared

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NOTHING = [0, 0, 0]
ROW = 32 << 10  # bytes of one chunk of the tiny model: one block


def chain(tmp_path, disk="disk"):
    """Disk, and a shared directory below it."""
    stack = on_disk(tmp_path / disk)
    stack["tiers"] += shared(tmp_path / "shared")["tiers"][1:]
    return stack


def test_a_new_machine_finds_what_others_have_stored_and_keeps_it(engine, ask, seen, tmp_path):
    """What is stored goes to both tiers; promoted from the shared directory, it goes to the disk above it."""
    first = engine(chain(tmp_path), TIER)
    assert ask(first) == NOTHING
    assert first.reset()
    assert ask(first) == LOADED
    metrics = first.metrics()
    stored = metrics["kvcascade_chunks.disk"]
    assert metrics["kvcascade_chunks.fs"] == stored
    assert metrics["kvcascade_written_bytes.disk"] == metrics["kvcascade_written_bytes.fs"] == stored * ROW

    other = chain(tmp_path, "other-disk")
    second = engine(other, TIER)
    assert ask(second) == LOADED
    assert second.metrics()["kvcascade_hit_chunks.fs"] == sum(LOADED) // BLOCK
    assert second.metrics()["kvcascade_written_bytes.disk"] == sum(LOADED) // BLOCK * ROW
    second.close()
    del other["tiers"][2]
    third = engine(other, TIER)  # its disk alone
    assert ask(third) == LOADED
    seen.note(TIER, "another machine: the same `fs` directory; then its own disk alone", LOADED)


def test_a_stack_of_host_memory_alone_is_refused(engine):
    with pytest.raises(RuntimeError, match="none below 'host'"):
        engine(host(), TIER)
