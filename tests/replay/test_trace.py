import gzip
import json

import pytest

from kvcascade.errors import ConfigError
from kvcascade.replay.trace import BUNDLED, Trace


def line(**changes):
    record = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps({**record, **changes}).encode() + b"\n"


def trace_of(tmp_path, *lines, skip_bad=False):
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"".join(lines))
    return Trace(path, skip_bad)


def test_plain_and_gzip_files_read_alike(tmp_path):
    content = line() + line(timestamp=7.5, hash_ids=[1, 3])
    plain, packed = tmp_path / "plain", tmp_path / "packed.jsonl"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    assert list(Trace(plain)) == list(Trace(packed))
    assert [request.hash_ids for request in Trace(plain)] == [(1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("name", "requests", "chunks"), [("conversation", 12031, 288500), ("mooncake_synthetic", 3993, 121877)]
)
def test_bundled_traces_are_found_by_name(name, requests, chunks):
    found = list(Trace(name))
    assert (len(found), sum(len(request.hash_ids) for request in found)) == (requests, chunks)


def test_a_bundled_trace_has_one_name_however_it_was_asked_for():
    assert Trace("conversation").name == Trace(BUNDLED["conversation"]).name == "mooncake_conversation"


def test_the_partial_last_chunk_counts_with_its_real_tokens(tmp_path):
    (request,) = trace_of(tmp_path, line(input_length=1000))
    assert [request.tokens(chunks) for chunks in (0, 1, 2)] == [0, 512, 1000]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{'a': 1}\n", "is not JSON"),
        (b"\xff\xfe\n", "is not text"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b"[1]\n", "is not a JSON object"),
        (line(timestamp=None), "timestamp must be .* not missing"),
        (line(timestamp=-1), "timestamp must be"),
        (line(timestamp=float("nan")), "timestamp must be"),
        (line(input_length=0), "input_length must be a whole number of tokens, 1 or more, not 0"),
        (line(input_length=True), "input_length must be"),
        (line(output_length="5"), 'output_length must be .* not "5"'),
        (line(hash_ids="12"), "hash_ids must be a list"),
        (line(hash_ids=[1, 2.5]), "hash_ids must be a list"),
        (line(hash_ids=[1]), "hash_ids has 1 entries, but input_length 1000 makes 2"),
        (line(hash_ids=[1, 1]), "holds an id twice"),
        (line()[:30] + b"\n", "is not JSON"),
    ],
)
def test_a_broken_line_is_named_and_refused_or_skipped_and_counted(tmp_path, bad, said):
    with pytest.raises(ConfigError, match=rf"some\.jsonl, line 3: .*{said}"):
        list(trace_of(tmp_path, line(), b"\n", bad, line()))
    lenient = trace_of(tmp_path, line(), b"\n", bad, line(), skip_bad=True)
    for _ in range(2):
        assert len(list(lenient)) == 2
        assert lenient.skipped == 1


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"#!/bin/sh\n", b"\x00\x01\x02" * 99, b"version: 1\ntiers: []\n"]
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_that_is_no_trace_is_refused_with_the_format(tmp_path, content, skip_bad):
    with pytest.raises(ConfigError, match=r"some\.jsonl is not a request trace.*one JSON object a line"):
        list(trace_of(tmp_path, content, skip_bad=skip_bad))


def test_a_file_without_line_ends_is_refused_in_bounded_memory(tmp_path):
    with pytest.raises(ConfigError, match="a line is longer than 16 MiB"):
        list(trace_of(tmp_path, b" " * (17 << 20), skip_bad=True))


@pytest.mark.parametrize("cut", [1, 15, 40])
def test_a_damaged_gzip_file_is_refused(tmp_path, cut):
    with pytest.raises(ConfigError, match="is a damaged gzip file"):
        list(trace_of(tmp_path, gzip.compress(line() * 9)[:-cut]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("conversatoin", r"did you mean 'conversation'.*bundled traces: conversation, synthetic"),
        ("/nowhere/some.jsonl", "can't read the trace /nowhere/some.jsonl: No such file"),
        ("/", "Is a directory"),
    ],
)
def test_a_file_that_can_not_be_read_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        list(Trace(name))


def test_it_reads_as_it_is_asked(tmp_path):
    requests = iter(trace_of(tmp_path, line(), b"broken\n"))
    assert next(requests).hash_ids == (1, 2)
    with pytest.raises(ConfigError, match="line 2"):
        next(requests)
