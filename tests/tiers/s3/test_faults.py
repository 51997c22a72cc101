"""A store that misbehaves: each fault has its right outcome, harms its own key only, and passes."""

import calendar
import re
import time
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest
from botocore.exceptions import ClientError, CredentialRetrievalError

from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.testing import key_for
from kvcascade.testing.servers.http_faults import HttpFaults
from kvcascade.types import Outcome, OutcomeKind

KEYS = [key_for(number) for number in range(4)]


def kinds(outcomes: list[Outcome]) -> list[OutcomeKind]:
    return [outcome.kind for outcome in outcomes]


def cause(outcome: Outcome) -> TierError:
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.cause is not None
    return outcome.cause


def name_of(key: bytes) -> str:
    return key.hex()


@pytest.mark.parametrize(
    ("status", "code", "refused"),
    [
        (403, "AccessDenied", True),
        (403, "SignatureDoesNotMatch", True),
        (403, "InvalidAccessKeyId", True),
        (400, "ExpiredToken", False),
        (400, "InvalidRequest", True),
        (429, "TooManyRequests", False),
        (500, "InternalError", False),
        (503, "SlowDown", False),
        (503, "", False),
        (302, "", True),
    ],
)
@pytest.mark.parametrize("verb", ["exists", "read", "write", "delete"])
def test_what_is_neither_there_nor_missing_is_a_failure(
    faulty: Any, status: int, code: str, refused: bool, verb: str
) -> None:
    """LMCache/LMCache#4483, minio/minio#7935: 403 and 5xx were taken for "not there", failed uploads for done."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:2])
    faults.answer(status, code, within=name_of(KEYS[1]), times=8)
    expected = TierRefused if refused else TierUnavailable
    if verb == "exists":
        with pytest.raises(expected):
            tier.exists(KEYS[:2])
    else:
        call = {"read": shared.load, "write": shared.store, "delete": lambda one, keys: one.delete(keys)}
        outcomes = call[verb](tier, KEYS[:2])
        assert outcomes[0] == Outcome.OK
        assert type(cause(outcomes[1])) is expected
        assert (code or str(status)) in str(cause(outcomes[1])) or f"status {status}" in str(cause(outcomes[1]))
    faults.heal()
    if verb != "delete":
        assert tier.exists(KEYS[:2]) == [True, True]
        assert shared.load(tier, KEYS[:2]) == [Outcome.OK, Outcome.OK]


@pytest.mark.parametrize("status", [413, 507])
def test_a_store_without_room_refuses_that_key(faulty: Any, status: int) -> None:
    shared, faults = faulty
    tier = shared.engine()
    faults.answer(status, "EntityTooLarge", method="PUT", within=name_of(KEYS[1]))
    assert shared.store(tier, KEYS[:3]) == [Outcome.OK, Outcome.REFUSED, Outcome.OK]
    assert tier.exists(KEYS[:3]) == [True, False, True]


@pytest.mark.parametrize("after", [0, 100, 512, 5000, (64 << 10) + 511])
def test_a_body_that_is_cut_short_is_a_failure_of_that_key(faulty: Any, after: int) -> None:
    """LMCache/LMCache#3388: a partial load was taken for a full one. Nothing is removed: the store has it."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS)
    faults.cut(after, within=name_of(KEYS[1]))
    outcomes = shared.load(tier, KEYS)
    assert kinds(outcomes) == [OutcomeKind.OK, OutcomeKind.FAILED, OutcomeKind.OK, OutcomeKind.OK]
    assert "closed" in str(cause(outcomes[1]))
    assert shared.load(tier, KEYS) == [Outcome.OK] * 4


@pytest.mark.parametrize("verb", ["exists", "read", "write", "delete"])
def test_a_store_that_hangs_costs_the_deadline_and_no_more(faulty: Any, verb: str) -> None:
    """vllm-project/vllm#49829: every call ends, with a failure."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:2])
    tier._patience = 0.5
    faults.hang(within=name_of(KEYS[0]), times=8)
    if verb == "exists":
        with pytest.raises(TierUnavailable, match="within the deadline"):
            tier.exists(KEYS)
    else:
        call = {"read": shared.load, "write": shared.store, "delete": lambda one, keys: one.delete(keys)}
        outcomes = call[verb](tier, KEYS[:1])
        assert "within the deadline" in str(cause(outcomes[0]))
    faults.heal()
    tier._patience = 10.0
    assert tier.exists(KEYS) == [True, True, False, False]
    assert shared.load(tier, KEYS[:2]) == [Outcome.OK] * 2


@pytest.mark.parametrize("after", [0, 300, 5000])
def test_a_body_that_stops_in_the_middle_ends_at_the_deadline(faulty: Any, after: int) -> None:
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:1])
    tier._patience = 0.5
    faults.hang(after, method="GET", within=name_of(KEYS[0]))
    assert "within the deadline" in str(cause(shared.load(tier, KEYS[:1])[0]))
    tier._patience = 10.0
    assert shared.load(tier, KEYS[:1]) == [Outcome.OK]


@pytest.mark.parametrize("difference", [-4096, -1, 1, 4096])
def test_a_content_length_that_is_wrong_never_gives_wrong_bytes(faulty: Any, difference: int) -> None:
    """What is there stays there: nobody can tell that it is wrong."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:2])
    tier._patience = 1.0

    def lie(reply: Any) -> Any:
        return reply._replace(fields={**reply.fields, "Content-Length": str(len(reply.body) + difference)})

    faults.alter(lie, method="GET", within=name_of(KEYS[0]))
    outcomes = shared.load(tier, KEYS[:2])
    assert outcomes[0].kind in (OutcomeKind.FAILED, OutcomeKind.MISSING)
    assert outcomes[1] == Outcome.OK
    tier._patience = 10.0
    assert shared.load(tier, KEYS[:2]) == [Outcome.OK] * 2


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\n", b"\x15\x03\x01\0\x02\x02"]
)
def test_what_is_no_answer_is_a_failure(faulty: Any, sent: bytes) -> None:
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:1])
    faults.raw(sent, times=2)
    with pytest.raises(TierUnavailable):
        tier.exists(KEYS[:1])
    faults.heal()
    assert tier.exists(KEYS[:1]) == [True]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"+5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"1_0\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"f" * 40 + b"\r\nabcde\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 99999999999999999999\r\n\r\nx",
        b"HTTP/1.1 307 Moved\r\nLocation: http://[::1/x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:99999/x/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 403 No\r\nx-amz-bucket-region: e/v#il\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 403 No\r\nDate: Mon, 99 Foo 99999 99:99:99 GMT\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 403 No\r\nDate: Fri, 31 Dec 9999 23:59:59 GMT\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 400 No\r\nContent-Length: 43\r\n\r\n<?xml version='1.0' encoding='nonsense'?><a/>",
    ],
)
def test_an_answer_that_makes_no_sense_harms_nobody(faulty: Any, sent: bytes) -> None:
    """Each verb says so, a connection's place is given back, and the next request is served."""
    shared, faults = faulty
    tier = shared.engine(concurrency=1)
    shared.store(tier, KEYS[:1])
    for _ in range(3):
        faults.raw(sent, within=name_of(KEYS[0]), times=99)
        for call in (shared.load, shared.store, lambda one, keys: one.delete(keys)):
            (outcome,) = call(tier, KEYS[:1])
            assert outcome.kind in (OutcomeKind.FAILED, OutcomeKind.MISSING, OutcomeKind.OK)
        with suppress(TierError):
            tier.exists(KEYS[:1])
        faults.heal()
        faults.raw(sent, within="list-type", times=99)
        with pytest.raises(TierError):
            list(tier.entries())
        faults.heal()
        assert tier._bucket.under_way == 0
    tier._bucket._sdk.terms = tier._bucket._sdk.terms._replace(skew=0.0)
    assert shared.store(tier, KEYS[:1]) == [Outcome.OK]
    assert shared.load(tier, KEYS[:1]) == [Outcome.OK]


@pytest.mark.parametrize("field", ["LastModified", "Size"])
def test_a_list_with_nonsense_in_it_is_a_failure(faulty: Any, field: str) -> None:
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:1])

    def nonsense(reply: Any) -> Any:
        body = re.sub(rf"<{field}>[^<]*<".encode(), f"<{field}>soon<".encode(), reply.body)
        return reply._replace(body=body, fields={})

    faults.alter(nonsense, method="GET", within="list-type")
    with pytest.raises(TierUnavailable, match="can't be listed"):
        list(tier.entries())
    assert [entry.key for entry in tier.entries()] == KEYS[:1]


class Failing:
    """Credentials that can't be had for now, as whoever provides them says it."""

    def __init__(self, good: Any, error: Exception) -> None:
        self.good, self.error = good, error
        self.works = False

    def get_frozen_credentials(self) -> Any:
        if not self.works:
            raise self.error
        return self.good.get_frozen_credentials()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."),
        ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole"),
        CredentialRetrievalError(provider="custom-process", error_msg="it failed"),
        FileNotFoundError(2, "No such file", "/no/such/program"),
        KeyError("AccessKeyId"),
    ],
)
def test_credentials_that_can_not_be_had_now(faulty: Any, error: Exception) -> None:
    """Every call says so, keeps no place of a connection, and works again once they can."""
    shared, _ = faulty
    tier = shared.engine(concurrency=2)
    shared.store(tier, KEYS[:2])
    sdk = tier._bucket._sdk
    failing = Failing(sdk.terms.credentials, error)
    sdk.terms = sdk.terms._replace(credentials=failing)
    for _ in range(4):
        for call in (shared.load, shared.store, lambda one, keys: one.delete(keys)):
            for outcome in call(tier, KEYS):
                assert "no credentials now" in str(cause(outcome))
                assert isinstance(outcome.cause, TierUnavailable)
        with pytest.raises(TierUnavailable, match="no credentials now"):
            tier.exists(KEYS)
    assert tier._bucket.under_way == 0
    failing.works = True
    assert shared.load(tier, KEYS[:2]) == [Outcome.OK] * 2


def test_credentials_that_run_out_while_an_answer_is_corrected(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine(concurrency=2)
    sdk = tier._bucket._sdk
    failing = Failing(sdk.terms.credentials, RuntimeError("still expired"))
    failing.works = True
    sdk.terms = sdk.terms._replace(credentials=failing)

    def runs_out(reply: Any) -> Any:
        failing.works = False
        return reply._replace(status=403, fields={"Content-Length": "0"}, body=b"")

    for _ in range(3):
        failing.works = True
        faults.alter(runs_out, method="HEAD")
        with pytest.raises(TierUnavailable, match="no credentials now"):
            tier.exists(KEYS[:1])
    failing.works = True
    assert tier.exists(KEYS[:1]) == [False]


def test_a_head_without_an_end_is_a_failure(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    faults.raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, times=2)
    with pytest.raises(TierUnavailable, match="no end"):
        tier.exists(KEYS[:1])


def test_interim_answers_are_passed_over(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    faults.raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", method="HEAD")
    assert shared.store(tier, KEYS[:1]) == [Outcome.OK]


def test_a_body_in_chunks_is_understood(faulty: Any) -> None:
    """Proxies send bodies so whose length they do not know."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:2])
    raw: dict[str, bytes] = {}

    def keep(reply: Any) -> Any:
        raw["body"] = reply.body
        return reply

    faults.alter(keep, method="GET", within=name_of(KEYS[0]))
    shared.load(tier, KEYS[:1])
    body = raw["body"]
    pieces = [body[:5], body[5:600], body[600:]]
    sent = b"".join(b"%x;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"
    faults.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + sent, within=name_of(KEYS[0]))
    assert shared.load(tier, KEYS[:2]) == [Outcome.OK] * 2
    faults.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + sent[:900], within=name_of(KEYS[0]))
    assert kinds(shared.load(tier, KEYS[:2])) == [OutcomeKind.FAILED, OutcomeKind.OK]


def test_an_answer_before_the_body_was_sent_is_heard(faulty: Any) -> None:
    """A store that refuses early closes the connection in the middle of the upload."""
    shared, faults = faulty
    tier = shared.engine()
    faults.answer(403, "AccessDenied", method="PUT", within=name_of(KEYS[0]), early=True)
    (outcome,) = shared.store(tier, KEYS[:1], 8 << 20)
    assert outcome.kind is OutcomeKind.FAILED
    assert shared.store(tier, KEYS[:1], 8 << 20) == [Outcome.OK]


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_clock_that_is_wrong_is_corrected_once(faulty: Any, seconds: float) -> None:
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:1])
    now = formatdate(time.time() + seconds, usegmt=True)
    for method in ("HEAD", "GET"):  # the former has no body that says why
        faults.answer(403, "RequestTimeTooSkewed", method=method, Date=now)
    faults.forget()
    assert tier.exists(KEYS[:1]) == [True]
    assert shared.load(tier, KEYS[:1]) == [Outcome.OK]
    signed = [calendar.timegm(time.strptime(one.fields["x-amz-date"], "%Y%m%dT%H%M%SZ")) for one in faults.seen]
    ahead = [round((moment - time.time()) / 60) for moment in signed]
    there = round(seconds / 60)
    assert ahead == [0, 0, there, there, 0, 0]  # the real server is not an hour ahead, and says so


def test_a_redirect_to_another_region_is_followed(faulty: Any) -> None:
    """For good: the next request goes there at once."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:1])
    faults.answer(301, "PermanentRedirect", method="HEAD", x_amz_bucket_region="eu-central-1")
    faults.forget()
    assert tier.exists(KEYS[:1]) == [True]
    assert tier.exists(KEYS[:1]) == [True]
    scopes = [one.fields["authorization"].split("/")[2] for one in faults.seen]
    assert scopes == ["us-east-1", "eu-central-1", "eu-central-1"]


def test_a_wrong_region_that_only_the_body_names_is_corrected(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    faults.answer(400, "AuthorizationHeaderMalformed", method="PUT", Region="eu-central-1")
    faults.forget()
    assert shared.store(tier, KEYS[:1]) == [Outcome.OK]
    assert [one.fields["authorization"].split("/")[2] for one in faults.seen] == [
        "us-east-1",
        "us-east-1",
        "eu-central-1",
    ]


def test_a_temporary_redirect_is_followed_for_that_request(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    for method, wanted in (("PUT", shared.store), ("GET", shared.load)):
        name = f"/{shared.bucket}/{tier._era.path}{KEYS[0].hex()[:2]}/{KEYS[0].hex()}"
        faults.answer(307, "TemporaryRedirect", method=method, Location=shared.server.endpoint + name)
        faults.forget()
        assert wanted(tier, KEYS[:1]) == [Outcome.OK]
        assert [one.method for one in faults.seen if one.method == method] == [method]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_credentials_and_payloads_go_to_nobody_else(
    faulty: Any, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Whoever can answer for the store could have them sent to a host of his own."""
    shared, faults = faulty
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-session-token")
    tier = shared.engine()
    with HttpFaults(int(shared.server.endpoint.rpartition(":")[2])) as other:
        for verb in (shared.store, shared.load, lambda one, keys: one.delete(keys)):
            name = f"/{shared.bucket}/{tier._era.path}{KEYS[0].hex()[:2]}/{KEYS[0].hex()}"
            faults.answer(
                307, within=name_of(KEYS[0]), times=9, Location=f"{scheme}://localhost:{other.port}{name}"
            )
            (outcome,) = verb(tier, KEYS[:1])
            assert "elsewhere" in str(cause(outcome))
        assert other.accepted == 0


def test_redirects_in_a_circle_end(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    for turn in range(8):
        faults.answer(301, method="HEAD", x_amz_bucket_region=f"region-{turn}")
    with pytest.raises(TierRefused, match="elsewhere"):
        tier.exists(KEYS[:1])


def test_credentials_that_have_expired_are_asked_for_anew(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is asked once more: a file or a variable may hold new ones by now."""
    shared, faults = faulty
    tier = shared.engine()
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new-token")
    faults.answer(400, "ExpiredToken", method="HEAD")
    faults.answer(400, "ExpiredToken", method="GET")
    faults.forget()
    assert tier.exists(KEYS[:1]) == [False]
    assert [one.fields.get("x-amz-security-token") for one in faults.seen] == [None, None, "new-token"]


def test_a_payload_digest_is_sent_where_the_store_insists(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    message = "x-amz-content-sha256 must be a digest"
    faults.answer(400, "InvalidRequest", message, method="PUT")
    faults.forget()
    assert shared.store(tier, KEYS[:2]) == [Outcome.OK] * 2
    digests = [one.fields["x-amz-content-sha256"] for one in faults.seen if one.method == "PUT"]
    assert digests.count("UNSIGNED-PAYLOAD") <= 2
    faults.forget()
    assert shared.store(tier, KEYS[2:4]) == [Outcome.OK] * 2
    assert {len(one.fields["x-amz-content-sha256"]) for one in faults.seen if one.method == "PUT"} == {64}


def test_a_missing_bucket_is_no_miss(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    faults.answer(404, "NoSuchBucket", method="GET", within=name_of(KEYS[0]))
    outcomes = shared.load(tier, KEYS[:2])
    assert "no such bucket" in str(cause(outcomes[0]))
    assert outcomes[1] == Outcome.MISSING


def test_a_connection_that_was_closed_while_idle_is_no_failure(faulty: Any) -> None:
    """The store, or what stands before it, closes what is idle, now and then just as a request is sent."""
    shared, faults = faulty
    tier = shared.engine()
    shared.store(tier, KEYS[:1])
    for method in ("HEAD", "GET"):
        faults.raw(b"", method=method)
        assert tier.exists(KEYS[:1]) == [True]
        assert shared.load(tier, KEYS[:1]) == [Outcome.OK]


def test_slow_down_means_fewer_requests_at_a_time(faulty: Any) -> None:
    """minio/minio#21289: a store that says so is asked for less, and by and by for more again."""
    shared, faults = faulty
    tier = shared.engine(concurrency=8)
    pool = tier._bucket._client._pool
    shared.store(tier, KEYS)
    assert pool._most == 8
    faults.answer(503, "SlowDown", method="GET", times=2)
    outcomes = shared.load(tier, KEYS)
    assert kinds(outcomes).count(OutcomeKind.FAILED) == 2
    assert pool._most <= 3
    for _ in range(40):
        assert tier.exists(KEYS) == [True] * 4
    assert pool._most == 8
