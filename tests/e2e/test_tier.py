"""A stack as one tier below vLLM's own host memory, on the real engine."""

from functools import partial

import pytest

from kvcascade.testing.vllm import BLOCK, full_blocks, host, make_model, on_disk, prompt, shared
from kvcascade.testing.vllm.tiering import tiering_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WAY = "tier"
LENGTHS = (200, 700, 1500)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
TOKENS = 40
LOADED = [full_blocks(length) for length in LENGTHS]
NOTHING = [0, 0, 0]
ROW = 32 << 10  # bytes of one chunk of the tiny model: one block


@pytest.fixture
def start(engine):
    def started(stack, rows=2048, extra=None, **settings):
        given = tiering_config(stack, cpu_bytes=rows * ROW, **(extra or {}))
        return engine(kv_transfer_config=given, **settings)

    return started


@pytest.fixture
def ask(plain):
    """Asks an engine, and compares its answers with plain vLLM's; returns how many tokens were cached."""

    def asked(engine, prompts=PROMPTS, tokens=TOKENS, **more):
        answers, expected = (ask(prompts=prompts, tokens=tokens, **more) for ask in (engine.generate, plain))
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
        return [answer["cached"] for answer in answers]

    return asked


def chain(tmp_path):
    """Disk, and a shared directory below it."""
    stack = on_disk(tmp_path / "disk")
    stack["tiers"] += shared(tmp_path / "shared")["tiers"][1:]
    return stack


def test_what_was_computed_is_loaded(start, ask, seen, tmp_path):
    """Also after the GPU's cache is cleared, and after a restart; but not after the connector's cache is."""
    first = start(chain(tmp_path))
    assert ask(first) == NOTHING
    assert first.reset()
    assert ask(first) == LOADED
    seen.note(WAY, "GPU cache cleared", LOADED)
    metrics = first.metrics()
    stored = sum(length // BLOCK for length in LENGTHS)
    assert metrics["kvcascade_chunks.disk"] == metrics["kvcascade_chunks.fs"] == stored
    assert metrics["kvcascade_written_bytes.disk"] == metrics["kvcascade_written_bytes.fs"] == stored * ROW
    first.close()

    second = start(chain(tmp_path))
    assert ask(second) == LOADED
    seen.note(WAY, "new process, same disk", LOADED)
    metrics = second.metrics()
    assert metrics["kvcascade_hit_chunks.disk"] == sum(LOADED) // BLOCK
    assert not metrics.get("kvcascade_written_bytes.disk")
    assert metrics["prompt_tokens_cached_by_source.disk"] == sum(LOADED)
    assert second.reset(connector=True)
    assert ask(second) == NOTHING
    seen.note(WAY, "connector's cache cleared", NOTHING)
    assert second.reset()
    assert ask(second) == LOADED
    assert "reset: cleared disk, fs" in second.log


def test_a_new_machine_finds_what_others_have_stored_and_keeps_it(start, ask, seen, tmp_path):
    """Promoted from the shared directory, it goes to the disk above it, too."""
    first = start(chain(tmp_path))
    assert ask(first) == NOTHING
    other = chain(tmp_path)
    other["tiers"][1]["path"] = str(tmp_path / "other-disk")
    second = start(other)
    assert ask(second) == LOADED
    seen.note(WAY, "second engine, same fs directory", LOADED)
    assert second.metrics()["kvcascade_hit_chunks.fs"] == sum(LOADED) // BLOCK
    assert second.metrics()["kvcascade_written_bytes.disk"] == sum(LOADED) // BLOCK * ROW
    second.close()
    del other["tiers"][2]
    assert ask(start(other)) == LOADED  # from its disk alone


def test_other_bytes_under_a_right_checksum_change_the_answers(start, plain, seen, tmp_path):
    """The proof that what is loaded is used: the same bytes, turned over where they are written."""
    stack = on_disk(tmp_path / "disk")
    writer = start(stack, fault={"tier": "disk", "kind": "poison"})
    writer.generate(prompts=PROMPTS, tokens=TOKENS)
    writer.close()
    answers = start(stack).generate(prompts=PROMPTS, tokens=TOKENS)
    assert [answer["cached"] for answer in answers] == LOADED
    expected = plain(prompts=PROMPTS, tokens=TOKENS)
    assert all(answer["tokens"] != right["tokens"] for answer, right in zip(answers, expected, strict=True))
    seen.note(WAY, "other bytes, right checksum", LOADED, "differ, as they must")


def test_bytes_under_a_wrong_checksum_are_computed_again(start, ask, seen, tmp_path):
    stack = on_disk(tmp_path / "disk")
    writer = start(stack)
    ask(writer)
    writer.close()
    for slab in (tmp_path / "disk").rglob("*.slab"):
        raw = bytearray(slab.read_bytes())
        for place in range(8192, len(raw), 4096):
            raw[place] ^= 0xFF
        slab.write_bytes(raw)
    reader = start(stack)
    assert ask(reader) == NOTHING
    seen.note(WAY, "damaged chunks on disk", NOTHING)
    assert reader.metrics()["kvcascade_corrupt_chunks.disk"] > 0
    assert reader.reset()
    assert ask(reader) == LOADED


def test_host_memory_too_small_for_the_load(start, ask, seen, tmp_path):
    small = start(on_disk(tmp_path / "disk"), rows=16)
    prompts = [prompt(length, 20 + length) for length in (1500, 400, 300, 1000, 200, 600)]
    assert ask(small, prompts) == [0] * len(prompts)
    assert small.reset()
    again = ask(small, prompts)
    assert all(part <= full_blocks(len(whole)) for part, whole in zip(again, prompts, strict=True))
    seen.note(WAY, "host memory of 16 chunks", again)


@pytest.mark.parametrize("blocks", [1, 4])
def test_generated_tokens_are_stored_where_it_is_asked_for(start, ask, plain, seen, tmp_path, blocks):
    begun = prompt(300, 9)
    stack = on_disk(tmp_path / "disk")
    extra = {"offload_prompt_only": False, "blocks_per_chunk": blocks}
    first = start(stack, extra=extra)
    assert ask(first, [begun], 200) == [0]
    first.close()
    answer = plain(prompts=[begun], tokens=200)[0]["tokens"][0]
    known = (300 + 200 - 1) // (blocks * BLOCK) * blocks * BLOCK
    assert ask(start(stack, extra=extra), [begun + answer + prompt(10, 10)], 20) == [known]
    seen.note(WAY, f"second turn after a restart, chunks of {blocks} blocks", [known])


def test_a_tier_that_fails_in_the_middle(start, ask, seen, tmp_path):
    rates = {"failed": 0.2, "missing": 0.1, "corrupt": 0.1, "refused": 0.1, "raises": 0.05}
    fault = {"tier": "disk", "kind": "faults", "settings": {"seed": 3, "rates": rates}}
    faulty = start(on_disk(tmp_path / "disk"), rows=20, fault=fault)
    counts = []
    for _ in range(3):
        counts.append(sum(ask(faulty)))
        assert faulty.reset()
    seen.note(WAY, "a disk that fails, lies and loses", counts)


def test_aborted_requests_leave_nothing_behind(start, ask, plain, seen, tmp_path):
    first = start(on_disk(tmp_path / "disk"), rows=64)
    expected = plain(prompts=PROMPTS, tokens=TOKENS)
    for after in (0, 1, 2, 5, 20):
        answers = first.generate(prompts=PROMPTS, tokens=TOKENS, after=after, abort=[1])
        assert answers[1] is None
        for place in (0, 2):
            assert answers[place]["tokens"] == expected[place]["tokens"]
        first.reset()
    assert ask(first)[0] == LOADED[0]
    seen.note(WAY, "aborts in every phase", "-")


def test_the_engine_core_in_a_process_of_its_own(start, ask, seen, tmp_path):
    several = partial(start, on_disk(tmp_path / "disk"), env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    first = several()
    assert ask(first) == NOTHING
    first.close()
    assert ask(several()) == LOADED
    seen.note(WAY, "engine core in its own process, restart", LOADED)


def test_another_model_finds_nothing(start, ask, tmp_path):
    stack = on_disk(tmp_path / "disk")
    (tmp_path / "model").mkdir()
    settings = {"model": str(make_model(tmp_path / "model", seed=0))}
    writer = start(stack, **settings)
    assert ask(writer) == NOTHING
    writer.close()
    make_model(tmp_path / "model", seed=1)
    reader = start(stack, **settings)
    assert [answer["cached"] for answer in reader.generate(prompts=PROMPTS, tokens=1)] == NOTHING


def test_a_stack_of_host_memory_alone_is_refused(start):
    with pytest.raises(RuntimeError, match="none below 'host'"):
        start(host())
