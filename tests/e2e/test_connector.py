"""What only the connector of our own gives: a load that fails on the worker is computed instead, and the engine
lives. And that the ways which share their chunks find each other's."""

import pytest

from kvcascade.testing.vllm import BLOCK, CONNECTOR, LOADED, PROMPTS, SPEC, host, on_disk, transfer_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ASKED = {"prompts": PROMPTS, "tokens": 40}
LEFT = {"pinned": 0, "leaked": 0, "requests": 0, "copies": 0}


@pytest.mark.parametrize("every", [1, 7])
def test_what_can_not_be_loaded_is_computed(engine, ask, plain, seen, every):
    """Every so manieth copy to the device fails: of the blocks that had been promised, vLLM computes the first bad
    one and all after it. Also where the request is aborted meanwhile."""
    first = engine(host(), CONNECTOR, fault={"kind": "loads", "every": every})
    ask(first)
    for _ in range(2):
        assert first.reset()
        ask(first)
    metrics = first.metrics()
    assert metrics["kvcascade_failed_load_chunks"] > 0
    assert not metrics.get("kvcascade_failed_store_chunks")
    assert first.at_rest() == LEFT
    seen.note(CONNECTOR, f"copies to the device fail, one in {every}", "-")
    for after in range(4):
        assert first.reset()
        first.generate(**ASKED, after=after, abort=[0, 2])
        assert first.at_rest() == LEFT
    assert first.reset()
    ask(first)
    seen.note(CONNECTOR, "aborts while loads fail, then answers", "-")


def test_what_a_reset_finds_in_flight_is_computed(engine, ask, same, seen):
    """The bytes that are being loaded are exchanged, as if the weights had changed since: none of them is used."""
    first = engine(host(), CONNECTOR, fault={"kind": "slow loads", "seconds": 0.05})
    ask(first)
    assert first.reset()
    first.poison()
    answers, resets = first.reset_in_flight(**ASKED, loads=True)
    same(answers, **ASKED)
    assert resets == 1
    assert first.at_rest() == LEFT
    seen.note(CONNECTOR, "reset while prompts are loaded", "-")
    assert first.reset()
    ask(first)


@pytest.mark.parametrize("way", [SPEC, CONNECTOR], scope="module")
def test_a_slot_that_is_being_read_is_given_to_nobody(engine, way, ask, same, seen, tmp_path):
    """A reset finds loads under way; then all slots that are free are filled, by what is stored and promoted."""
    first = engine(on_disk(tmp_path / "disk", "544KiB"), way, fault={"kind": "slow loads", "seconds": 0.02})
    for _ in range(2):
        ask(first)
        assert first.reset()
        answers, resets = first.reset_in_flight(**ASKED, loads=True)
        same(answers, **ASKED)
        assert resets == 1
        assert first.at_rest() == LEFT
        assert first.reset()
    assert sum(ask(first)) > 0
    seen.note(way, "reset while prompts are loaded, host memory of 16 chunks", "some")


@pytest.mark.parametrize(("writer", "reader"), [(SPEC, CONNECTOR), (CONNECTOR, SPEC)])
def test_both_ways_find_each_others_chunks(engine, ask, seen, tmp_path, writer, reader):
    first = engine(on_disk(tmp_path / "disk"), writer)
    ask(first)
    first.close()
    assert ask(engine(on_disk(tmp_path / "disk"), reader)) == LOADED
    seen.note(reader, "chunks stored by the other of the first two ways", LOADED)


def test_the_module_path_instead_of_the_short_name_and_no_policy(engine, ask):
    """Where vLLM loads no plugins; a policy that fails requests is warned of."""
    transfer = transfer_config(CONNECTOR, host())
    transfer["kv_connector_module_path"] = "kvcascade.connector.vllm.connector"
    del transfer["kv_load_failure_policy"]
    first = engine(env={"VLLM_PLUGINS": ""}, kv_transfer_config=transfer)
    ask(first)
    assert first.reset()
    assert ask(first) == LOADED
    assert "kv_load_failure_policy is 'fail'" in first.log
    assert first.metrics()["kvcascade_hit_chunks.host"] == sum(LOADED) // BLOCK
