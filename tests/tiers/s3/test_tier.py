"""What the s3 tier does beyond what every tier must."""

import os
import signal
import threading
from typing import Any

import pytest

from kvcascade.testing import bytes_for, key_for
from kvcascade.testing.servers.http_faults import HttpFaults
from kvcascade.tiers.envelope import Envelope, pack
from kvcascade.tiers.s3.layout import ENVELOPE
from kvcascade.types import Namespace, Outcome, OutcomeKind, Usage

KEY = key_for(1)


def name_in(shared: Any, key: bytes) -> str:
    (name,) = (name for name in shared.names() if name.endswith("/" + key.hex()))
    return name


# What lies in the bucket


def test_a_bucket_is_understood_with_ordinary_tools(shared: Any) -> None:
    tier = shared.engine()
    shared.store(tier, [KEY])
    name = name_in(shared, KEY)
    prefix, namespace, stamp, fan, chunk = name.split("/")
    assert (prefix, fan, chunk) == (shared.prefix, KEY.hex()[:2], KEY.hex())
    assert (len(namespace), len(stamp)) == (32, 32)
    head = shared.client().head_object(Bucket=shared.bucket, Key=name)
    facts = {name.lower(): value for name, value in head["Metadata"].items()}
    assert facts["kv-key"] == KEY.hex()
    assert facts["kv-format"] == "1"
    assert {"kv-written", "kv-sequence", "kv-xxh3"} <= set(facts)
    assert head["ContentLength"] == ENVELOPE + shared.chunk
    body = shared.client().get_object(Bucket=shared.bucket, Key=name)["Body"].read()
    assert body[ENVELOPE:] == bytes_for(KEY, shared.chunk)


def test_foreign_objects_are_left_alone(one_shared: Any) -> None:
    tier = one_shared.engine()
    one_shared.store(tier, [KEY])
    path = tier._era.path
    foreign = [f"{path}ab/note.txt", f"{path}ab/ABCD", f"{path}readme", f"{one_shared.prefix}/mine/x"]
    for name in foreign:
        one_shared.client().put_object(Bucket=one_shared.bucket, Key=name, Body=b"x" * 1000)
    assert [entry.key for entry in tier.entries()] == [KEY]
    (kept,) = one_shared.settings().stored()
    assert [chunk.entry.key for chunk in kept.chunks()] == [KEY]
    tier.close()
    (line,) = one_shared.settings().clear(None)
    assert line.startswith(f"removed s3://{one_shared.bucket}/{one_shared.prefix}/")
    assert line.endswith("foreign objects in it are left")
    assert sorted(one_shared.names()) == sorted(foreign)


def test_what_is_in_the_place_of_a_chunk_is_checked(one_shared: Any) -> None:
    """Copied from another chunk, from another namespace, or no chunk at all: never served, and removed."""
    tier, other = one_shared.engine(), one_shared.engine(namespace=Namespace.of(model="other"))
    keys = one_shared.keys(1, 2)
    client, where = one_shared.client(), {"Bucket": one_shared.bucket}
    for copied in ("another key", "another namespace", "nothing of ours"):
        one_shared.store(tier, keys)
        one_shared.store(other, keys[:1])
        names = {key: f"{tier._era.path}{key.hex()[:2]}/{key.hex()}" for key in keys}
        source = {
            "another key": names[keys[1]],
            "another namespace": names[keys[0]].replace(tier._era.path, other._era.path),
        }.get(copied)
        body = (
            client.get_object(Key=source, **where)["Body"].read()
            if source
            else b"\0" * (ENVELOPE + one_shared.chunk)
        )
        client.put_object(Key=names[keys[0]], Body=body, **where)
        outcomes = one_shared.load(tier, keys)
        assert [outcome.kind for outcome in outcomes] == [OutcomeKind.CORRUPT, OutcomeKind.OK]
        assert tier.exists(keys) == [False, True]


@pytest.mark.parametrize("written", ["yesterday", "", "1e400x", "nan", "\u00b2"])
@pytest.mark.parametrize("ttl", [None, "1h"])
def test_odd_metadata_harms_nobody(faulty: Any, written: str, ttl: str | None) -> None:
    """Whoever copies an object can write what he likes beside it; the envelope says what counts."""
    shared, faults = faulty
    tier = shared.engine(ttl=ttl)
    keys = shared.keys(1, 2)
    shared.store(tier, keys)

    def odd(reply: Any) -> Any:
        fields = {name: value for name, value in reply.fields.items() if "kv-written" not in name.lower()}
        return reply._replace(fields={**fields, "x-amz-meta-kv-written": written})

    faults.alter(odd, within=KEY.hex(), times=99)
    assert tier.exists(keys) == [True, True]
    assert shared.store(tier, keys) == [Outcome.OK] * 2
    assert shared.load(tier, keys) == [Outcome.OK] * 2
    assert tier.delete(keys) == [Outcome.OK] * 2


def test_what_has_taken_the_place_of_something_damaged_stays(faulty: Any) -> None:
    """Of the same size, written between the read and the look at what is there now."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, [KEY])

    def damaged(reply: Any) -> Any:
        body = bytearray(reply.body)
        body[-1] ^= 1
        fields = {name: value for name, value in reply.fields.items() if name.lower() != "etag"}
        return reply._replace(body=bytes(body), fields={**fields, "ETag": '"of what was there before"'})

    faults.alter(damaged, method="GET", within=KEY.hex())
    assert shared.load(tier, [KEY]) == [Outcome.MISSING]
    assert shared.load(tier, [KEY]) == [Outcome.OK]


def test_a_chunk_of_a_newer_version_is_left_alone(one_shared: Any) -> None:
    tier = one_shared.engine()
    one_shared.store(tier, [KEY])
    name = name_in(one_shared, KEY)
    header = bytearray(pack(Envelope(tier._era.stamp, KEY, one_shared.chunk, 0.0, 0, 0), ENVELOPE))
    header[8] = 99
    one_shared.client().put_object(
        Bucket=one_shared.bucket, Key=name, Body=bytes(header) + bytes(one_shared.chunk)
    )
    assert one_shared.load(tier, [KEY]) == [Outcome.MISSING]
    assert name in one_shared.names()


def test_what_is_removed_by_a_rule_is_a_miss_once_and_heals(shared: Any) -> None:
    """LMCache/LMCache#4745: a chunk that a lifecycle rule had removed stayed a hit that could not be loaded."""
    tier = shared.engine()
    shared.store(tier, [KEY])
    shared.client().delete_object(Bucket=shared.bucket, Key=name_in(shared, KEY))
    assert shared.load(tier, [KEY]) == [Outcome.MISSING]
    assert tier.exists([KEY]) == [False]
    assert shared.store(tier, [KEY]) == [Outcome.OK]
    assert shared.load(tier, [KEY]) == [Outcome.OK]


# Policies


def test_a_ttl_is_checked_on_read(shared: Any) -> None:
    """By the time in the envelope; a rule of the bucket may clean up much later."""
    tier = shared.engine(ttl="1h")
    keys = shared.keys(1, 2)
    tier._now = lambda: 1_000_000.0
    assert shared.store(tier, keys[:1]) == [Outcome.OK]
    tier._now = lambda: 1_003_599.0
    assert tier.exists(keys[:1]) == [True]
    assert shared.load(tier, keys[:1]) == [Outcome.OK]
    assert shared.store(tier, keys[1:]) == [Outcome.OK]
    tier._now = lambda: 1_003_601.0
    assert tier.exists(keys) == [False, True]
    assert shared.load(tier, keys) == [Outcome.MISSING, Outcome.OK]
    assert shared.store(tier, keys[:1]) == [Outcome.OK]
    assert shared.load(tier, keys) == [Outcome.OK, Outcome.OK]


@pytest.mark.parametrize("removed", [True, False])
def test_what_has_expired_is_written_anew(one_shared: Any, removed: bool) -> None:
    tier = one_shared.engine(ttl="1h")
    tier._now = lambda: 1_000_000.0
    one_shared.store(tier, [KEY])
    tier._now = lambda: 1_100_000.0
    if removed:
        assert one_shared.load(tier, [KEY]) == [Outcome.MISSING]
    assert one_shared.store(tier, [KEY]) == [Outcome.OK]
    assert one_shared.load(tier, [KEY]) == [Outcome.OK]


def test_a_warm_tier_tells_what_is_there(shared: Any) -> None:
    """In parts, by housekeeping: the manager takes them for known."""
    keys = shared.keys(*range(20))
    shared.store(shared.engine(), keys, 512)
    assert shared.engine().maintain(60.0).appeared == ()
    tier = shared.engine(warm=True)
    assert {entry.key for entry in tier.maintain(60.0).appeared} == set(keys)
    assert tier.maintain(60.0).appeared == ()


def test_a_warm_tier_lists_a_part_at_a_time(one_shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = one_shared.keys(*range(20))
    one_shared.store(one_shared.engine(), keys, 512)
    tier = one_shared.engine(warm=True)
    page = tier._bucket.page
    monkeypatch.setattr(tier._bucket, "page", lambda *args, **named: page(*args, **{**named, "most": 7}))
    parts = []
    while part := tier.maintain(0.0).appeared:
        parts.append(part)
    assert [len(part) for part in parts] == [7, 7, 6]
    assert {entry.key for part in parts for entry in part} == set(keys)


def test_a_warm_tier_that_is_reset_tells_nothing_of_before(one_shared: Any) -> None:
    one_shared.store(one_shared.engine(), one_shared.keys(1, 2))
    tier = one_shared.engine(warm=True)
    tier.move_to("v2")
    assert tier.maintain(60.0).appeared == ()


# What is sent


def sent(faults: Any, method: str) -> dict[str, str]:
    return dict(next(one.fields for one in faults.seen if one.method == method and KEY.hex() in one.target))


def test_no_integrity_headers_are_sent_to_other_stores(faulty: Any) -> None:
    """boto/s3transfer#327, aws/aws-cli#9214: uploads were refused after an upgrade of the SDK. Here such a store
    is served by default."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, [KEY])
    fields = sent(faults, "PUT")
    assert [name for name in fields if "checksum" in name or name in ("content-encoding", "x-amz-trailer")] == []
    assert fields["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert int(fields["content-length"]) == ENVELOPE + shared.chunk


def test_integrity_headers_are_sent_where_they_are_wanted(shared: Any) -> None:
    tier = shared.engine(checksum=True)
    assert shared.store(tier, [KEY]) == [Outcome.OK]
    assert shared.load(tier, [KEY]) == [Outcome.OK]


def test_a_store_checks_the_integrity_header(faulty: Any) -> None:
    shared, faults = faulty
    shared.store(shared.engine(checksum=True), [KEY])
    fields = sent(faults, "PUT")
    assert fields["x-amz-sdk-checksum-algorithm"] == "CRC32"
    assert len(fields["x-amz-checksum-crc32"]) == 8


def test_storage_class_and_encryption_are_asked_for(faulty: Any) -> None:
    shared, faults = faulty
    shared.store(shared.engine(storage_class="STANDARD_IA", sse="AES256"), [KEY])
    fields = sent(faults, "PUT")
    assert fields["x-amz-storage-class"] == "STANDARD_IA"
    assert fields["x-amz-server-side-encryption"] == "AES256"


def test_chunks_that_are_there_are_not_sent_again(faulty: Any) -> None:
    """kvcache-ai/Mooncake#2827: a batch of eight of which three are present is stored, and five are written."""
    shared, faults = faulty
    tier = shared.engine()
    keys = shared.keys(*range(8))
    shared.store(tier, keys[:3])
    faults.forget()
    assert shared.store(tier, keys) == [Outcome.OK] * 8
    assert len([one for one in faults.seen if one.method == "PUT"]) == 5


# Connections


def test_many_threads_need_no_more_connections_than_allowed(faulty: Any) -> None:
    """boto/botocore#619: a pool of ten in silence, whatever the threads."""
    shared, faults = faulty
    tier = shared.engine(concurrency=6)
    keys = shared.keys(*range(16))
    shared.store(tier, keys, 4096)
    wrong: list[Outcome] = []

    def reader() -> None:
        for _ in range(10):
            wrong.extend(outcome for outcome in shared.load(tier, keys, 4096) if not outcome.ok)

    threads = [threading.Thread(target=reader) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert faults.accepted <= 6


def test_one_call_uses_the_connections_that_are_free(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine(concurrency=4)
    shared.store(tier, shared.keys(*range(8)))
    assert faults.accepted == 4
    shared.load(tier, shared.keys(*range(8)))
    tier.exists(shared.keys(*range(64)))
    assert faults.accepted == 4


def test_threads_begin_at_once_on_a_fresh_tier(one_shared: Any) -> None:
    """boto/boto3#1592: clients that were made in several threads met a KeyError now and then."""
    tier = one_shared.engine(concurrency=16)
    start = threading.Barrier(32)
    wrong: list[Outcome] = []

    def work(who: int) -> None:
        start.wait(60)
        keys = one_shared.keys(who, 100 + who)
        wrong.extend(one for one in one_shared.store(tier, keys, 4096) if not one.ok)
        wrong.extend(one for one in one_shared.load(tier, keys, 4096) if not one.ok)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_two_threads_that_wait_for_each_others_connections_both_end(faulty: Any) -> None:
    """With fewer connections than threads, and answers that make every request be sent twice."""
    shared, faults = faulty
    tier = shared.engine(concurrency=2)
    keys = shared.keys(*range(8))
    shared.store(tier, keys, 4096)
    for turn in range(16):
        faults.answer(301, method="GET", within=keys[turn % 8].hex(), x_amz_bucket_region=f"r{turn}")
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda: outcomes.extend(shared.load(tier, keys, 4096))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.OK] * 48


def test_usage_is_what_this_engine_has_put_there(shared: Any) -> None:
    tier = shared.engine()
    shared.store(tier, shared.keys(1, 2, 3))
    shared.store(tier, shared.keys(1))
    assert tier.usage() == Usage(3, 3 * tier.footprint(shared.chunk), None)
    tier.delete(shared.keys(1, 9))
    assert tier.usage() == Usage(2, 2 * tier.footprint(shared.chunk), None)
    tier.delete(shared.keys(2, 3))
    assert tier.usage() == Usage(0, 0, None)


def test_forks_go_on_with_connections_of_their_own(one_shared: Any) -> None:
    """kserve/kserve#5393, boto/botocore#1246: children that went on with their parent's connections mixed up
    answers."""
    tier = one_shared.engine()
    one_shared.store(tier, one_shared.keys(0), 4096)
    children = []
    for child in range(1, 4):
        pid = os.fork()
        if pid == 0:
            os._exit(_in_child(one_shared, tier, child))
        children.append(pid)
    try:
        for number in range(30):
            keys = one_shared.keys(5000 + number)
            assert one_shared.store(tier, keys, 4096) == [Outcome.OK]
            assert one_shared.load(tier, keys, 4096) == [Outcome.OK]
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 3
    assert one_shared.load(tier, one_shared.keys(0), 4096) == [Outcome.OK]


def _in_child(shared: Any, tier: Any, who: int) -> int:
    if shared.load(tier, shared.keys(0), 4096) != [Outcome.OK]:
        return 1
    for number in range(20):
        keys = shared.keys(1000 * who + number)
        if shared.store(tier, keys, 4096) != [Outcome.OK] or shared.load(tier, keys, 4096) != [Outcome.OK]:
            return 2
    tier.maintain(1.0)
    signs = [name for name in shared.names() if f"~{os.getpid()}~" in name]
    tier.close()
    gone = not any(f"~{os.getpid()}~" in name for name in shared.names())
    return 0 if len(signs) == 1 and gone else 3


def test_a_fork_in_the_middle_of_calls_is_not_held_up(one_shared: Any) -> None:
    """Locks and places of connections that other threads hold at that moment are the parent's."""
    tier = one_shared.engine(concurrency=1)
    one_shared.store(tier, [KEY])
    sdk, pool = tier._bucket._sdk, tier._bucket._client._pool
    with sdk._lock, tier._moving, tier._counting, tier._tending, pool._changed:
        pool._under_way += 1
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # ends it, should it hang
            right = one_shared.load(tier, [KEY]) == [Outcome.OK]
            tier.maintain(1.0)
            tier.move_to("v2")
            os._exit(0 if right and tier.exists([KEY]) == [False] else 1)
        pool._under_way -= 1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert one_shared.load(tier, [KEY]) == [Outcome.OK]


# Stores that keep what they have, where they are asked to


@pytest.mark.parametrize("status", [409, 412])
def test_what_the_store_has_kept_is_looked_at(one_shared: Any, stores: Any, status: int) -> None:
    """A chunk that came in between is one that is there; where it is none, it is written after all."""
    with HttpFaults(port_of(stores["moto"])) as faults:
        one_shared.endpoint = faults.endpoint
        tier = one_shared.engine()
        assert tier._bucket.keeps
        faults.answer(status, "ConditionalRequestConflict", method="PUT", within=KEY.hex())
        assert one_shared.store(tier, [KEY, key_for(2)]) == [Outcome.OK] * 2
        assert [one.method for one in faults.seen if KEY.hex() in one.target] == ["PUT", "HEAD", "PUT"]
        assert one_shared.load(tier, [KEY, key_for(2)]) == [Outcome.OK] * 2
        faults.forget()
        assert one_shared.store(tier, [KEY]) == [Outcome.OK]
        assert [one.method for one in faults.seen if KEY.hex() in one.target] == ["PUT", "HEAD"]
        one_shared.close()


def test_a_store_that_knows_no_conditions_is_asked_before(one_shared: Any, stores: Any) -> None:
    with HttpFaults(port_of(stores["moto"])) as faults:
        one_shared.endpoint = faults.endpoint
        one_shared.engine().close()
        faults.answer(501, "NotImplemented", "A header you provided", method="PUT", within="namespace.json")
        tier = one_shared.engine()
        assert not tier._bucket.keeps
        faults.forget()
        assert one_shared.store(tier, [KEY]) == [Outcome.OK]
        assert [one.method for one in faults.seen if KEY.hex() in one.target] == ["HEAD", "PUT"]
        one_shared.close()


def port_of(store: Any) -> int:
    return int(store.endpoint.rpartition(":")[2])
