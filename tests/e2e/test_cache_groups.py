"""A model with several KV cache groups: of full attention, and of a sliding window."""

import pytest

from kvcascade.testing.vllm import BLOCK, CONNECTOR, LOADED, PROMPTS, SPEC, TIER, host, make_model, on_disk

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ASKED = {"prompts": PROMPTS, "tokens": 40}
NOTHING = [0, 0, 0]
LEFT = {"pinned": 0, "leaked": 0, "requests": 0, "copies": 0}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4 * BLOCK}
    return {"model": str(make_model(tmp_path_factory.mktemp("windowed"), seed=4, **windows))}


def answers(engine):
    found = engine.generate(**ASKED)
    return [answer["tokens"] for answer in found], [answer["cached"] for answer in found]


@pytest.fixture(scope="module")
def expected(plain_engine, windowed):
    """What plain vLLM answers."""
    engine = plain_engine(**windowed)
    tokens, _ = answers(engine)
    engine.close()
    return tokens


def test_what_was_computed_is_loaded(engine, way, windowed, expected, seen, tmp_path):
    """Also after the GPU's cache is cleared, and after a restart."""
    stack = on_disk(tmp_path / "disk")
    for passes in ([NOTHING, LOADED], [LOADED]):
        both = engine(stack, way, **windowed)
        for loaded in passes:
            assert answers(both) == (expected, loaded)
            assert both.reset()
        assert both.at_rest() == LEFT
        both.close()
    seen.note(way, "two cache groups, one with a sliding window; restart", LOADED)


@pytest.mark.parametrize("way", [SPEC, TIER], scope="module")
def test_chunks_of_several_blocks_are_refused_at_start(engine, way, windowed):
    """Under vLLM's own scheduler, which would store them without the blocks that the window has passed."""
    with pytest.raises(RuntimeError) as error:
        engine(host(), way, {"blocks_per_chunk": 4}, **windowed)
    assert "blocks_per_chunk" in str(error.value) and "KVCascadeConnector" in str(error.value)


def test_failed_loads(engine, windowed, expected, seen):
    """vLLM can't be told of blocks here, so the request is computed from its start."""
    failing = engine(host(), CONNECTOR, fault={"kind": "loads", "every": 5}, **windowed)
    for _ in range(3):
        assert answers(failing)[0] == expected
        assert failing.reset()
    assert failing.metrics()["kvcascade_failed_load_chunks"] > 0
    assert failing.at_rest() == LEFT
    seen.note(CONNECTOR, "two cache groups, copies to the device fail", "-")
