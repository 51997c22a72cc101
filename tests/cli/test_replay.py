import json

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from kvcascade.cli import main
from kvcascade.replay.content import Content

STACK = "version: 1\ntiers:\n- {type: host, capacity: 1MiB}\n- {type: memory, capacity: 8MiB}\n"
LIMIT = ("--limit", "60", "--chunk-bytes", "4KiB")


@pytest.fixture
def stack(tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return str(path)


@pytest.fixture(scope="module")
def fonts_loaded(tmp_path_factory):
    """matplotlib keeps the files of its fonts open, from its first drawing on."""
    figure = Figure()
    figure.suptitle("some")
    figure.savefig(tmp_path_factory.mktemp("plots") / "first.png")


def run(*arguments):
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_it_prints_a_table_for_a_person(stack):
    result = run("conversation", "--stack", stack, *LIMIT)
    assert result.exit_code == 0, result.output
    for shown in ("mooncake_conversation through host -> memory", "hit rate", "60 requests in", "0 wrong bytes"):
        assert shown in result.stdout
    assert result.stderr == ""


@pytest.mark.usefixtures("fonts_loaded")
def test_json_is_all_of_stdout_also_with_progress_and_plot(stack, tmp_path):
    picture = tmp_path / "some.svg"
    result = run("conversation", "--stack", stack, *LIMIT, "--json", "--progress", "--plot", picture)
    report = json.loads(result.stdout)
    assert (report["requests"], report["interrupted"], report["chunk_bytes"]) == (60, False, 4096)
    assert "60/60" in result.stderr
    assert str(picture) in result.stderr
    assert "<svg" in picture.read_text()


def test_the_what_if_reproduces_the_table_of_both_traces():
    result = run("--compare", "lru,optimal")
    for rate in ("0.0525", "0.2464", "0.1958", "0.3664", "0.1566", "0.3956", "0.6080", "0.6396"):
        assert rate in result.stdout


def test_the_what_if_simulates_a_stack_too(stack):
    result = run("conversation", "--compare", "lru", "--stack", stack, *LIMIT, "--json")
    (found,) = json.loads(result.stdout)
    played = json.loads(run("conversation", "--stack", stack, *LIMIT, "--json").stdout)
    assert [tier["chunks"] for tier in found["stack"]["tiers"]] == [255, 2048]
    assert found["stack"]["hit_rate"] == played["hit_rate"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which trace?"),
        (("conversation",), "which stack?"),
        (("conversatoin", "--stack", "{stack}"), "did you mean 'conversation'"),
        (("{stack}", "--stack", "{stack}"), "is not a request trace"),
        (("conversation", "--stack", "embeded"), "did you mean 'embedded'"),
        (("conversation", "--stack", "{stack}", "--chunk-bytes", "1GiB"), "1 GiB"),
        (("conversation", "--stack", "{stack}", "--chunk-bytes", "5GiX"), "GiX"),
        (("conversation", "--stack", "{stack}", "--concurrency", "0"), "concurrency"),
        (("conversation", "--stack", "{stack}", "--plot", "some.xyz"), r"a plot's name must end in"),
        (("--compare", "arcs"), "did you mean 'arc'"),
        (("--compare", "lur"), "did you mean 'lru'"),
        (("--compare", "lru", "--capacity", "many"), "Allowed: a share"),
    ],
)
def test_what_can_not_be_used_gets_a_message_and_exit_code_2(stack, arguments, said):
    result = run(*(each.format(stack=stack) for each in arguments))
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_broken_line_is_refused_before_anything_is_played_or_skipped_and_counted(stack, tmp_path):
    trace = tmp_path / "some.jsonl"
    line = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
    trace.write_text(line + "{}\n" + line)
    refused = run(trace, "--stack", stack)
    assert refused.exit_code == 2
    assert "some.jsonl, line 2: timestamp must be" in refused.stderr
    skipped = run(trace, "--stack", stack, "--skip-bad", "--json")
    report = json.loads(skipped.stdout)
    assert (report["requests"], report["skipped_lines"], report["loaded"]) == (2, 1, 2)


def test_a_wrong_byte_is_exit_code_1_with_details(stack, monkeypatch):
    right = Content.write

    def write(content, key, slot):
        right(content, key, slot)
        slot[17] ^= 1

    monkeypatch.setattr(Content, "write", write)
    result = run("conversation", "--stack", stack, *LIMIT)
    assert result.exit_code == 1
    assert "1 of 4,096 bytes are wrong, the first at offset 17" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("option", [["--plot", "x.png"], ["--gpu-chunks", "5"], ["--concurrency", "2"]])
def test_options_of_a_replay_are_refused_beside_compare(option):
    result = CliRunner().invoke(main, ["replay", "conversation", "--limit", "5", "--compare", "lru", *option])
    assert result.exit_code == 2
    assert f"{option[0]} goes with a replay" in result.stderr


def test_hash_ids_may_be_any_whole_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCASCADE_HOST", "1MiB")
    trace = tmp_path / "signed.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [-1, 2**70]}
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    result = CliRunner().invoke(main, ["replay", str(trace), "--stack", "host-only", "--chunk-bytes", "4KiB"])
    assert result.exit_code == 0, result.output
    assert "0 wrong bytes" in result.stdout
