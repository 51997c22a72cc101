"""What only the connector of our own gives: a load that fails on the worker is computed instead, and the engine
lives. And that both ways find each other's chunks."""

import pytest

from kvcascade.testing.vllm import (
    BLOCK,
    CONNECTOR,
    SPEC,
    full_blocks,
    host,
    make_model,
    on_disk,
    prompt,
    transfer_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPTS = [prompt(length, 200 + length) for length in (200, 700, 1500)]
LOADED = [full_blocks(len(one)) for one in PROMPTS]
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4 * BLOCK}


@pytest.fixture(scope="session")
def windowed(tmp_path_factory):
    """A model with two cache groups: of full attention, and of a sliding window."""
    return make_model(tmp_path_factory.mktemp("windowed"), seed=4, **WINDOWS)


def answers(engine, prompts=PROMPTS, tokens=40):
    found = engine.generate(prompts=prompts, tokens=tokens)
    return [answer["tokens"] for answer in found], [answer["cached"] for answer in found]


def by_source(engine):
    metrics = engine.metrics()
    return {source: metrics.get(f"prompt_tokens_cached_by_source.{source}", 0) for source in ("host", "disk")}


def at_rest(engine):
    assert engine.at_rest() == {"pinned": 0, "leaked": 0, "requests": 0, "copies": 0}


@pytest.mark.parametrize("every", [1, 7])
def test_what_can_not_be_loaded_is_computed(engine, plain, seen, every):
    """Every so manieth copy to the device fails: of the blocks that had been promised, vLLM computes the first bad
    one and all after it."""
    expected = [answer["tokens"] for answer in plain(prompts=PROMPTS, tokens=40)]
    first = engine(host(), CONNECTOR, fault={"kind": "loads", "every": every})
    assert answers(first)[0] == expected
    for _ in range(2):
        assert first.reset()
        assert answers(first)[0] == expected
    metrics = first.metrics()
    assert metrics["kvcascade_failed_load_chunks"] > 0
    assert "kvcascade_failed_store_chunks" not in metrics or not metrics["kvcascade_failed_store_chunks"]
    at_rest(first)
    seen.note(CONNECTOR, f"copies to the device fail, one in {every}", "-")


def test_failed_loads_of_several_cache_groups(engine, windowed, seen):
    """vLLM can't be told of blocks there, so the request is computed from its start."""
    settings = {"model": str(windowed)}
    expected, _ = answers(engine(None, enable_prefix_caching=False, **settings))
    sound = engine(host(), CONNECTOR, **settings)
    assert answers(sound)[0] == expected
    assert sound.reset()
    tokens, loaded = answers(sound)
    assert tokens == expected and loaded == LOADED
    at_rest(sound)
    seen.note(CONNECTOR, "two cache groups, one of them with a sliding window", loaded)
    sound.close()

    failing = engine(host(), CONNECTOR, fault={"kind": "loads", "every": 5}, **settings)
    for _ in range(3):
        assert answers(failing)[0] == expected
        assert failing.reset()
    assert failing.metrics()["kvcascade_failed_load_chunks"] > 0
    at_rest(failing)
    seen.note(CONNECTOR, "the same, with copies that fail", "-")


def test_a_request_that_is_aborted_while_its_load_fails(engine, plain):
    expected = [answer["tokens"] for answer in plain(prompts=PROMPTS, tokens=40)]
    first = engine(host(), CONNECTOR, fault={"kind": "loads", "every": 3})
    assert answers(first)[0] == expected
    for after in range(4):
        assert first.reset()
        first.generate(prompts=PROMPTS, tokens=40, after=after, abort=[0, 2])
        at_rest(first)
    assert first.reset()
    assert answers(first)[0] == expected


@pytest.mark.parametrize(("writer", "reader"), [(SPEC, CONNECTOR), (CONNECTOR, SPEC)])
def test_both_ways_find_each_others_chunks(engine, seen, tmp_path, writer, reader):
    first = engine(on_disk(tmp_path / "disk"), writer)
    expected, _ = answers(first)
    first.close()
    tokens, loaded = answers(engine(on_disk(tmp_path / "disk"), reader))
    assert tokens == expected and loaded == LOADED
    seen.note(reader, f"chunks stored by the other way ({writer})", loaded)


def test_the_module_path_instead_of_the_short_name_and_no_policy(engine, plain):
    """Where vLLM loads no plugins; a policy that fails requests is warned of, and does."""
    transfer = transfer_config(CONNECTOR, host())
    transfer["kv_connector_module_path"] = "kvcascade.connector.vllm.connector"
    del transfer["kv_load_failure_policy"]
    first = engine(env={"VLLM_PLUGINS": ""}, kv_transfer_config=transfer)
    expected = [answer["tokens"] for answer in plain(prompts=PROMPTS, tokens=40)]
    assert answers(first)[0] == expected
    assert first.reset()
    tokens, loaded = answers(first)
    assert tokens == expected and loaded == LOADED
    assert "kv_load_failure_policy is 'fail'" in first.log
    assert first.metrics()["kvcascade_hit_chunks.host"] == sum(LOADED) // BLOCK


def test_hits_are_told_by_where_they_come_from(engine, tmp_path):
    first = engine(on_disk(tmp_path / "disk"), CONNECTOR)
    answers(first)
    assert first.reset()
    answers(first)
    assert by_source(first) == {"host": sum(LOADED), "disk": 0}
    first.close()
    second = engine(on_disk(tmp_path / "disk"), CONNECTOR)
    answers(second)
    assert by_source(second) == {"host": 0, "disk": sum(LOADED)}
