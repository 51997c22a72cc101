"""vLLM answers the same with a stack as without one, and loads what it has computed before, in each way in."""

import json
from importlib.util import find_spec

import pytest

from kvcascade.testing.vllm import (
    BLOCK,
    CONNECTOR,
    LOADED,
    PROMPTS,
    SPEC,
    TIER,
    beside_unreliable,
    full_blocks,
    make_model,
    on_disk,
    prompt,
    shared,
    transfer_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ASKED = {"prompts": PROMPTS, "tokens": 40}
NOTHING = [0, 0, 0]
BLOCK_BYTES = 32 << 10  # of the tiny model
LEFT = {"pinned": 0, "leaked": 0, "requests": 0, "copies": 0}
TOLD_BY_SOURCE = find_spec("vllm.v1.metrics.cache_hit_source")
"""Whether this vLLM has cache-hit sources: 0.31 has not."""
ONE_IDENTITY = pytest.mark.parametrize("way", [SPEC, TIER], scope="module")
"""The first two ways share what decides this."""


def cached(answers):
    return [answer["cached"] for answer in answers]


def texts(answers):
    return [answer["tokens"] for answer in answers]


def at_rest(engine):
    assert engine.at_rest() == LEFT


def damage(folder):
    """Other bytes in all chunks, but not in their headers."""
    slabs = list(folder.rglob("*.slab"))
    assert slabs
    for slab in slabs:
        raw = bytearray(slab.read_bytes())
        for place in range(8192, len(raw), 4096):
            raw[place] ^= 0xFF
        slab.write_bytes(raw)


@pytest.fixture(scope="module")
def usual(lasting, way, tmp_path_factory):
    return lasting(on_disk(tmp_path_factory.mktemp("usual") / "disk"), way)


@pytest.fixture(scope="module")
def crowded(lasting, way, tmp_path_factory):
    """Few blocks on the device; what is generated is stored, too."""
    stack = on_disk(tmp_path_factory.mktemp("crowded") / "disk")
    return lasting(stack, way, {"offload_prompt_only": False}, num_gpu_blocks_override=70)


@pytest.fixture(scope="module")
def small(lasting, way, tmp_path_factory):
    """Host memory of sixteen chunks, above a disk that has all."""
    stack = on_disk(tmp_path_factory.mktemp("small") / "disk", "544KiB")
    return lasting(stack, way, {"offload_prompt_only": False})


@pytest.fixture
def cleared():
    """Of an engine that other tests have used, all caches are cleared; and it is at rest at the end."""
    used = []

    def clear(engine):
        assert engine.reset(connector=True)
        used.append(engine)
        return engine

    yield clear
    for engine in used:
        at_rest(engine)


def test_plain_runs_agree(plain, engine, same, seen):
    """What two plain runs do not agree on can't be asked of ours: whole prompts at once and one by one, the second
    time with vLLM's own prefix cache."""
    other = engine()
    for _ in range(2):
        answers = [other.generate(prompts=[one], tokens=40)[0] for one in PROMPTS]
        same(answers, **ASKED)


def test_what_was_computed_is_loaded(engine, way, ask, seen, tmp_path):
    """Also after the GPU's cache is cleared, and after a restart; but not after the connector's cache is, and not
    what is damaged."""
    stack = on_disk(tmp_path / "disk")
    first = engine(stack, way)
    assert ask(first) == NOTHING
    seen.note(way, "first pass", NOTHING)
    assert ask(first) == LOADED
    assert first.reset()
    assert ask(first) == LOADED
    seen.note(way, "GPU cache cleared", LOADED)
    metrics = first.metrics()
    stored = sum(len(one) // BLOCK for one in PROMPTS)  # prompts only, and none of them twice
    assert metrics["kvcascade_chunks.disk"] == stored
    assert metrics["kvcascade_written_bytes.disk"] == stored * BLOCK_BYTES
    assert metrics.get("kvcascade_chunks.host", stored) == stored
    if TOLD_BY_SOURCE:
        assert metrics["prompt_tokens_cached_by_source.host"] == sum(LOADED)
    at_rest(first)
    assert first.finish(folder=str(tmp_path / "disk")) == {"threads": [], "maps": [], "files": []}
    first.close()

    second = engine(stack, way)
    assert ask(second) == LOADED
    seen.note(way, "new process, same disk", LOADED)
    metrics = second.metrics()
    assert metrics["kvcascade_hit_chunks.disk"] == sum(LOADED) // BLOCK
    if TOLD_BY_SOURCE:
        assert metrics["prompt_tokens_cached_by_source.disk"] == sum(LOADED)
    assert not metrics.get("kvcascade_written_bytes.disk")
    at_rest(second)
    second.close()

    damage(tmp_path / "disk")
    third = engine(stack, way)
    assert ask(third) == NOTHING
    seen.note(way, "damaged chunks on disk", NOTHING)
    assert third.metrics()["kvcascade_corrupt_chunks.disk"] > 0
    assert third.reset()
    assert ask(third) == LOADED
    assert third.reset(connector=True)
    assert "reset: cleared" in third.log
    assert ask(third) == NOTHING
    seen.note(way, "connector's cache cleared", NOTHING)
    at_rest(third)


def test_two_engines_share_a_directory(engine, way, ask, seen, tmp_path):
    one, other = (engine(shared(tmp_path / "shared"), way, wait=False) for _ in range(2))
    one.wait_ready(), other.wait_ready()
    assert ask(one) == NOTHING
    assert ask(other) == LOADED
    seen.note(way, "second engine at the same time, same `fs` directory", LOADED)
    later = [prompt(900, 50)]
    assert ask(other, later) == [0]
    assert ask(one, later) == [full_blocks(900)]
    at_rest(one), at_rest(other)


def test_other_bytes_under_a_right_checksum_change_the_answers(engine, way, plain, seen, tmp_path):
    """The proof that what is loaded is used: the same bytes, turned over where they are written."""
    stack = on_disk(tmp_path / "disk")
    writer = engine(stack, way, fault={"tier": "disk", "kind": "poison"})
    writer.generate(**ASKED)
    writer.close()
    answers = engine(stack, way).generate(**ASKED)
    assert cached(answers) == LOADED
    assert all(ours["tokens"] != right["tokens"] for ours, right in zip(answers, plain(**ASKED), strict=True))
    seen.note(way, "other bytes under a right checksum", LOADED, "differ, as they must")


def second_turn(plain):
    """A prompt and its answer, and what comes after them; and how many of the tokens have KV by then: the last one
    that was sampled has none."""
    begun = prompt(300, 9)
    answer = plain(prompts=[begun], tokens=200)[0]["tokens"][0]
    return begun, begun + answer + prompt(10, 10), 300 + 200 - 1


def test_generated_tokens_are_stored_where_it_is_asked_for(crowded, cleared, way, ask, plain, seen):
    begun, longer, known = second_turn(plain)
    chat = cleared(crowded)
    assert ask(chat, [begun], 200) == [0]
    assert chat.reset()
    assert ask(chat, [longer], 20) == [known // BLOCK * BLOCK]
    seen.note(way, "second turn of a conversation", [known // BLOCK * BLOCK])


def test_chunks_of_four_blocks(engine, way, ask, plain, seen, tmp_path):
    begun, longer, known = second_turn(plain)
    chunk = 4 * BLOCK
    chat = engine(on_disk(tmp_path / "disk"), way, {"offload_prompt_only": False, "blocks_per_chunk": 4})
    assert ask(chat) == NOTHING
    assert ask(chat, [begun], 200) == [0]
    assert chat.reset()
    assert ask(chat) == [(len(one) - 1) // chunk * chunk for one in PROMPTS]
    assert ask(chat, [longer], 20) == [known // chunk * chunk]
    seen.note(way, "second turn of a conversation, chunks of 4 blocks", [known // chunk * chunk])
    at_rest(chat)


def test_only_prompts_are_stored_otherwise(usual, cleared, way, ask, plain, seen):
    begun, longer, _ = second_turn(plain)
    chat = cleared(usual)
    ask(chat, [begun], 200)
    assert chat.reset()
    assert ask(chat, [longer], 20) == [300 // BLOCK * BLOCK]
    seen.note(way, "second turn, prompts only", [300 // BLOCK * BLOCK])


def test_host_memory_too_small_for_the_load(small, cleared, way, ask, seen):
    """Sixteen chunks in host memory, prompts of up to forty-six."""
    prompts = [prompt(length, 20 + length) for length in (1500, 400, 300, 1000, 200, 600)]
    few = cleared(small)
    assert ask(few, prompts) == [0] * len(prompts)
    assert few.reset()
    again = ask(few, prompts)
    assert all(part <= full_blocks(len(whole)) for part, whole in zip(again, prompts, strict=True))
    assert sum(again) > 0
    seen.note(way, "host memory of 16 chunks, six prompts", "some")


def test_few_blocks_on_the_device(crowded, cleared, way, ask, seen):
    """Requests are preempted, and come back."""
    prompts = [prompt(500, 30 + number) for number in range(6)]
    few = cleared(crowded)
    before = few.metrics().get("num_preemptions", 0)
    ask(few, prompts, 120)
    assert few.metrics()["num_preemptions"] > before
    again = ask(few, prompts, 120)
    assert sum(again) >= sum(full_blocks(500) for _ in prompts) // 2
    seen.note(way, "70 blocks on the device, preemption", "at least half")


def test_aborted_requests_leave_nothing_behind(usual, cleared, way, plain, seen):
    first = cleared(usual)
    expected = texts(plain(**ASKED))
    for after in (0, 1, 2, 5, 20):
        answers = first.generate(**ASKED, after=after, abort=[1])
        assert answers[1] is None
        assert [answers[place]["tokens"] for place in (0, 2)] == [expected[place] for place in (0, 2)]
        at_rest(first)
        first.reset()
    for after in range(4):  # while they are looked up and loaded
        assert first.generate(**ASKED, after=after, abort=[0, 1, 2]) == [None] * 3
        at_rest(first)
        first.reset()
    seen.note(way, "aborts in every phase", "-")


def test_a_salt_keeps_prompts_apart(usual, cleared, way, ask, seen):
    first = cleared(usual)
    assert ask(first, salt="a") == NOTHING
    assert ask(first, salt="b") == NOTHING
    assert first.reset()
    assert ask(first, salt="a") == LOADED
    assert ask(first) == NOTHING
    seen.note(way, "other cache salts", NOTHING)


def test_requests_with_one_prefix_at_once(usual, cleared, way, ask, plain, seen):
    common = prompt(640, 40)
    prompts = [common + prompt(50, 41 + number) for number in range(8)]
    first = cleared(usual)
    ask(first, prompts)
    assert first.reset()
    again = ask(first, prompts)
    assert all(tokens >= 640 for tokens in again)
    seen.note(way, "8 requests with one prefix at once", "at least 640 each")
    several = {"prompts": PROMPTS[:1], "tokens": 40, "n": 4, "temperature": 0.8, "seed": 5}
    assert texts(first.generate(**several)) == texts(plain(**several))


def test_a_tier_that_fails_in_the_middle(engine, way, ask, seen, tmp_path):
    rates = {"failed": 0.2, "missing": 0.1, "corrupt": 0.1, "refused": 0.1, "raises": 0.05}
    fault = {"tier": "disk", "kind": "faults", "settings": {"seed": 3, "rates": rates}}
    faulty = engine(on_disk(tmp_path / "disk", "544KiB"), way, fault=fault)
    for _ in range(3):
        ask(faulty)
        assert faulty.reset()
    seen.note(way, "a disk that fails, lies and loses", "some")
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


@ONE_IDENTITY
def test_another_model_finds_nothing(engine, way, ask, seen, tmp_path):
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
    seen.note(way, "another model in the same folder", NOTHING, "-")


@pytest.mark.parametrize("way", [SPEC, CONNECTOR], scope="module")
def test_a_reset_while_chunks_are_copied(small, cleared, way, same, ask, seen):
    """Whenever copies are under way the connector's cache is cleared; all slots of the pool are in use soon."""
    first = cleared(small)
    answers, resets = first.reset_in_flight(**ASKED)
    same(answers, **ASKED)
    assert resets > 0
    at_rest(first)
    assert first.reset()
    ask(first)
    assert first.reset()
    assert sum(ask(first)) > 0
    seen.note(way, "reset while chunks are copied", "some")


def chat_config(way, folder, beside):
    ours = transfer_config(way, on_disk(folder / "disk", "4MiB"), offload_prompt_only=False)
    return beside_unreliable(ours, every=3, asynchronous=True) if beside else ours


@pytest.mark.parametrize("beside", ["", ", beside one that clears blocks"], ids=["alone", "beside"])
def test_conversations_of_many_users_at_once(engine, way, ask, plain, seen, beside, tmp_path):
    """Four turns of eight users, each turn with all before it; few blocks on the device, little host memory."""
    chat = engine(
        way=way,
        kv_transfer_config=chat_config(way, tmp_path, beside),
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
    assert counts[3] > counts[1] > 0
    assert beside or counts[0] == 0
    seen.note(way, f"four turns of eight users, asynchronous scheduling{beside}", "more with each turn")
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


@pytest.mark.parametrize("way", [CONNECTOR], scope="module")
def test_beside_a_connector_that_tells_too_late_of_what_it_did_not_load(engine, way, ask, seen, tmp_path):
    """What vLLM computes with cleared blocks, before it hears of that, is not stored. Its own scheduler, under the
    other ways, stores that."""
    ours = transfer_config(way, on_disk(tmp_path / "disk"))
    first = engine(way=way, kv_transfer_config=beside_unreliable(ours, requests=len(PROMPTS)))
    ask(first)
    assert first.reset()
    ask(first)
    assert first.reset()
    assert ask(first) == LOADED
    seen.note(way, "beside one that clears blocks and tells too late, third pass", LOADED)
    at_rest(first)


@ONE_IDENTITY
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
