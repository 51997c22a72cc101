"""vLLM answers the same with a stack as without one, and loads what it has computed before."""

import json
from functools import partial

import pytest

from kvcascade.testing.vllm import (
    BLOCK,
    WAYS,
    full_blocks,
    host,
    make_model,
    on_disk,
    prompt,
    shared,
    transfer_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LENGTHS = (200, 700, 1500)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
TOKENS = 40
LOADED = [full_blocks(length) for length in LENGTHS]
NOTHING = [0, 0, 0]


def cached(answers):
    return [answer["cached"] for answer in answers]


def texts(answers):
    return [answer["tokens"] for answer in answers]


def close(answers, expected):
    """Log-probabilities agree as far as they do between two plain runs that batch differently."""
    for answer, other in zip(answers, expected, strict=True):
        for ours, theirs in zip(answer["logprobs"], other["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def ask(plain):
    """Asks an engine, and compares its answers with plain vLLM's; returns how many tokens were cached."""

    def asked(engine, prompts=PROMPTS, tokens=TOKENS, **more):
        answers, expected = (ask(prompts=prompts, tokens=tokens, **more) for ask in (engine.generate, plain))
        assert texts(answers) == texts(expected)
        close(answers, expected)
        return cached(answers)

    return asked


def at_rest(engine):
    assert engine.at_rest() == {"pinned": 0, "leaked": 0, "requests": 0, "copies": 0}


def test_what_was_computed_is_loaded(engine, way, ask, seen, tmp_path):
    """Also after the GPU's cache is cleared, and after a restart; but not after the connector's cache is."""
    stack = on_disk(tmp_path / "disk")
    first = engine(stack, way)
    assert ask(first) == NOTHING
    assert ask(first) == LOADED
    assert first.reset()
    assert ask(first) == LOADED
    seen.note(way, "GPU cache cleared", LOADED)
    metrics = first.metrics()
    stored = sum(length // BLOCK for length in LENGTHS)  # prompts only, and none of them twice
    assert metrics["kvcascade_chunks.disk"] == metrics["kvcascade_chunks.host"] == stored
    assert metrics["kvcascade_written_bytes.disk"] == metrics["kvcascade_bytes.host"]
    at_rest(first)
    first.close()

    second = engine(stack, way)
    assert ask(second) == LOADED
    seen.note(way, "new process, same disk", LOADED)
    metrics = second.metrics()
    assert metrics["kvcascade_hit_chunks.disk"] == sum(LOADED) // BLOCK
    assert "kvcascade_written_bytes.disk" not in metrics or not metrics["kvcascade_written_bytes.disk"]
    assert second.reset(connector=True)
    assert ask(second) == NOTHING
    assert ask(second) == LOADED
    seen.note(way, "connector's cache cleared", NOTHING)
    at_rest(second)


def test_two_engines_share_a_directory(engine, way, ask, seen, tmp_path):
    one, other = (engine(shared(tmp_path / "shared"), way, wait=False) for _ in range(2))
    one.wait_ready(), other.wait_ready()
    assert ask(one) == NOTHING
    assert ask(other) == LOADED
    seen.note(way, "second engine, same fs directory", LOADED)
    later = [prompt(900, 50)]
    assert ask(other, later) == [0]
    assert ask(one, later) == [full_blocks(900)]
    at_rest(one), at_rest(other)


def test_other_bytes_under_a_right_checksum_change_the_answers(engine, way, plain, seen, tmp_path):
    """The proof that what is loaded is used."""
    stack = on_disk(tmp_path / "disk")
    writer = engine(stack, way, fault={"tier": "disk", "kind": "poison"})
    writer.generate(prompts=PROMPTS, tokens=TOKENS)
    writer.close()
    answers = engine(stack, way).generate(prompts=PROMPTS, tokens=TOKENS)
    assert cached(answers) == LOADED
    expected = plain(prompts=PROMPTS, tokens=TOKENS)
    assert all(answer["tokens"] != right["tokens"] for answer, right in zip(answers, expected, strict=True))
    seen.note(way, "other bytes, right checksum", LOADED, "differ, as they must")


def test_bytes_under_a_wrong_checksum_are_computed_again(engine, way, ask, seen, tmp_path):
    stack = on_disk(tmp_path / "disk")
    writer = engine(stack, way)
    ask(writer)
    writer.close()
    slabs = list((tmp_path / "disk").rglob("*.slab"))
    assert slabs
    for slab in slabs:
        raw = bytearray(slab.read_bytes())
        for place in range(8192, len(raw), 4096):
            raw[place] ^= 0xFF
        slab.write_bytes(raw)
    reader = engine(stack, way)
    assert ask(reader) == NOTHING
    seen.note(way, "damaged chunks on disk", NOTHING)
    assert reader.metrics()["kvcascade_corrupt_chunks.disk"] > 0
    assert ask(reader) == LOADED
    at_rest(reader)


@pytest.mark.parametrize("blocks", [1, 4])
def test_generated_tokens_are_stored_where_it_is_asked_for(engine, way, ask, plain, seen, blocks):
    chunk = blocks * BLOCK
    begun = prompt(300, 9)
    first = engine(host(), way, {"offload_prompt_only": False, "blocks_per_chunk": blocks})
    assert ask(first, [begun], 200) == [0]
    answer = plain(prompts=[begun], tokens=200)[0]["tokens"][0]
    longer = begun + answer + prompt(10, 10)
    assert first.reset()
    known = (300 + 200 - 1) // chunk * chunk  # the last token that was sampled has no KV
    assert ask(first, [longer], 20) == [known]
    seen.note(way, f"second turn of a conversation, chunks of {blocks} blocks", [known])
    at_rest(first)


def test_only_prompts_are_stored_otherwise(engine, way, ask, plain, seen):
    begun = prompt(300, 9)
    first = engine(host(), way, {"blocks_per_chunk": 4})
    ask(first, [begun], 200)
    answer = plain(prompts=[begun], tokens=200)[0]["tokens"][0]
    assert first.reset()
    assert ask(first, [begun + answer + prompt(10, 10)], 20) == [300 // 128 * 128]
    seen.note(way, "second turn, prompts only, chunks of 4 blocks", [300 // 128 * 128])


def test_a_pool_too_small_for_the_load(engine, way, ask, seen, tmp_path):
    """Sixteen chunks in host memory, prompts of up to forty-six."""
    small = engine(on_disk(tmp_path / "disk", "544KiB"), way)
    prompts = [prompt(length, 20 + length) for length in (1500, 400, 300, 1000, 200, 600)]
    assert ask(small, prompts) == [0] * len(prompts)
    assert small.reset()
    again = ask(small, prompts)
    assert all(part <= full_blocks(len(whole)) for part, whole in zip(again, prompts, strict=True))
    seen.note(way, "host memory of 16 chunks", again)
    at_rest(small)


def test_few_blocks_on_the_device(engine, way, ask, seen):
    """Requests are preempted, and come back."""
    few = engine(host(), way, {"offload_prompt_only": False}, num_gpu_blocks_override=70)
    prompts = [prompt(500, 30 + number) for number in range(6)]
    ask(few, prompts, 120)
    assert few.metrics()["num_preemptions"] > 0
    again = ask(few, prompts, 120)
    assert sum(again) >= sum(full_blocks(500) for _ in prompts) // 2
    seen.note(way, "70 blocks on the device, preemption", again)
    at_rest(few)


def test_aborted_requests_leave_nothing_behind(engine, way, plain, seen):
    first = engine(host(), way)
    expected = plain(prompts=PROMPTS, tokens=TOKENS)
    for after in (0, 1, 2, 5, 20):
        answers = first.generate(prompts=PROMPTS, tokens=TOKENS, after=after, abort=[1])
        assert answers[1] is None
        assert [answers[place]["tokens"] for place in (0, 2)] == [expected[place]["tokens"] for place in (0, 2)]
        at_rest(first)
        first.reset()
    for after in range(4):  # while they are looked up and loaded
        assert first.generate(prompts=PROMPTS, tokens=TOKENS, after=after, abort=[0, 1, 2]) == [None] * 3
        at_rest(first)
        first.reset()
    seen.note(way, "aborts in every phase", "-")


def test_a_salt_keeps_prompts_apart(engine, way, ask, seen):
    first = engine(host(), way)
    assert ask(first, salt="a") == NOTHING
    assert ask(first, salt="b") == NOTHING
    assert ask(first, salt="a") == LOADED
    assert ask(first) == NOTHING
    seen.note(way, "cache salts", NOTHING)


def test_requests_with_one_prefix_at_once(engine, way, ask, plain, seen):
    common = prompt(640, 40)
    prompts = [common + prompt(50, 41 + number) for number in range(8)]
    first = engine(host(), way)
    ask(first, prompts)
    assert first.reset()
    again = ask(first, prompts)
    assert all(tokens >= 640 for tokens in again)
    seen.note(way, "8 requests with one prefix at once", again)
    several = partial(dict, prompts=PROMPTS[:1], tokens=TOKENS, n=4, temperature=0.8, seed=5)
    assert texts(first.generate(**several())) == texts(plain(**several()))
    at_rest(first)


def test_a_tier_that_fails_in_the_middle(engine, way, ask, seen, tmp_path):
    rates = {"failed": 0.2, "missing": 0.1, "corrupt": 0.1, "refused": 0.1, "raises": 0.05}
    fault = {"tier": "disk", "kind": "faults", "settings": {"seed": 3, "rates": rates}}
    faulty = engine(on_disk(tmp_path / "disk", "544KiB"), way, fault=fault)
    counts = []
    for _ in range(3):
        counts.append(sum(ask(faulty)))
        assert faulty.reset()
    seen.note(way, "a disk that fails, lies and loses", counts)
    at_rest(faulty)


def test_the_engine_core_in_a_process_of_its_own(engine, way, ask, seen, tmp_path):
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    first = engine(on_disk(tmp_path / "disk"), way, env=several)
    assert ask(first) == NOTHING
    assert first.reset()
    assert ask(first) == LOADED
    first.close()
    assert ask(engine(on_disk(tmp_path / "disk"), way, env=several)) == LOADED
    seen.note(way, "engine core in its own process, restart", LOADED)


def test_another_model_finds_nothing(engine, way, ask, tmp_path):
    """The chunks of a model never serve another one, though tokens and paths are the same (as in
    vllm-project/vllm#49261)."""
    stack = on_disk(tmp_path / "disk")
    (tmp_path / "model").mkdir()
    settings = {"model": str(make_model(tmp_path / "model", seed=0))}
    writer = engine(stack, way, **settings)
    assert ask(writer) == NOTHING  # by the same weights as the model that it is compared with
    writer.close()
    make_model(tmp_path / "model", seed=1)
    reader = engine(stack, way, **settings)
    assert cached(reader.generate(prompts=PROMPTS, tokens=1)) == NOTHING
    assert cached(reader.generate(prompts=PROMPTS, tokens=1)) == LOADED
    reader.close()
    make_model(tmp_path / "model", seed=0)
    assert ask(engine(stack, way, **settings)) == LOADED


def test_a_reset_with_copies_in_flight(engine, way, ask, plain, seen, tmp_path):
    first = engine(on_disk(tmp_path / "disk", "544KiB"), way, {"offload_prompt_only": False})
    answers = first.reset_in_flight(prompts=PROMPTS, tokens=TOKENS)
    assert texts(answers) == texts(plain(prompts=PROMPTS, tokens=TOKENS))
    at_rest(first)
    assert first.reset()
    ask(first)
    assert first.reset()
    again = ask(first)
    assert sum(again) > 0
    seen.note(way, "reset while chunks are copied", again)
    at_rest(first)


def test_conversations_of_many_users_at_once(engine, way, ask, plain, seen, tmp_path):
    """Four turns of eight users, each turn with all before it; few blocks on the device, little host memory."""
    chat = engine(
        on_disk(tmp_path / "disk", "4MiB"),
        way,
        {"offload_prompt_only": False},
        num_gpu_blocks_override=160,
        async_scheduling=True,
    )
    said = [prompt(200 + 30 * user, 100 + user) for user in range(8)]
    counts = []
    for turn in range(4):
        counts.append(sum(ask(chat, said, 40)))
        answers = plain(prompts=said, tokens=40)
        said = [
            told + answer["tokens"][0] + prompt(60, 1000 * turn + user)
            for user, (told, answer) in enumerate(zip(said, answers, strict=True))
        ]
    assert counts[0] == 0 and counts[3] > counts[1] > 0
    seen.note(way, "four turns of eight users, asynchronous scheduling", counts)
    at_rest(chat)


def test_beside_another_connector(engine, way, ask, seen, tmp_path):
    """In vLLM's MultiConnector, beside one that stores and loads the same prompts on its own."""
    ours = transfer_config(way, on_disk(tmp_path / "disk"))
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }
    first = engine(way=way, kv_transfer_config=several, num_gpu_blocks_override=120)
    assert ask(first) == NOTHING
    assert first.reset()
    assert ask(first) == LOADED
    seen.note(way, "in a MultiConnector, beside another connector", LOADED)
    at_rest(first)


def test_two_engines_with_one_stack_file(engine, way, ask, seen, tmp_path):
    """On one host, at the same time: each has a folder of its own, and finds it again."""
    stack = tmp_path / "stack.yaml"
    stack.write_text(json.dumps(on_disk(tmp_path / "disk")))
    one, other = (engine(str(stack), way, wait=False) for _ in range(2))
    one.wait_ready(), other.wait_ready()
    assert ask(one) == NOTHING and ask(other) == NOTHING
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["engine-0", "engine-1"]
    one.close(), other.close()
    assert ask(engine(str(stack), way)) == LOADED
    seen.note(way, "two engines with one stack file, then one again", LOADED)
