"""Opening a bucket, and what `kvcascade check` says of it: in words that a person can act on."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ConfigError, KVCascadeError, TierUnavailable
from kvcascade.testing import key_for
from kvcascade.testing.conformance import NAMESPACE
from kvcascade.testing.servers import free_port
from kvcascade.testing.servers.s3 import rclone
from kvcascade.testing.servers.tls import Certificates, make_certificates
from kvcascade.tiers import OpenContext
from kvcascade.tiers.s3 import upkeep
from kvcascade.types import Outcome

KEY = key_for(1)
CONTEXT = OpenContext(NAMESPACE, 64 << 10)


def refused(settings: Any, kind: type[KVCascadeError], said: str) -> None:
    """Both `open` and `check` say so."""
    with pytest.raises(kind, match=said):
        settings.open(CONTEXT)
    (problem,) = settings.probe().problems
    assert said in problem


def test_a_store_that_is_not_there(one_shared: Any) -> None:
    """The tier is down, and is tried again."""
    refused(
        one_shared.settings(endpoint_url=f"http://127.0.0.1:{free_port()}"), TierUnavailable, "refuses connections"
    )


def test_a_host_that_is_not_known(one_shared: Any) -> None:
    refused(one_shared.settings(endpoint_url="http://no-such-host.invalid"), TierUnavailable, "is not known")


def test_a_store_that_says_nothing(one_shared: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        refused(
            one_shared.settings(endpoint_url=endpoint, deadline="300ms"), TierUnavailable, "within the deadline"
        )


def test_a_wrong_secret(one_shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused(one_shared.settings(), ConfigError, "the secret key is wrong")


def test_an_unknown_key(one_shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    refused(one_shared.settings(), ConfigError, "the access key is not known")


def test_no_such_bucket(shared: Any) -> None:
    refused(shared.settings(bucket="no-such-bucket", create_bucket=False), ConfigError, "there is no such bucket")


def test_a_server_that_is_no_store(faulty: Any) -> None:
    """No bucket is "made" there."""
    shared, faults = faulty
    faults.answer(404, times=2)
    refused(shared.settings(create_bucket=True), ConfigError, "does `endpoint_url` lead to a store of S3?")


def test_a_program_for_credentials_that_is_not_there(
    one_shared: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default]\ncredential_process = /no/such/program\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    refused(one_shared.settings(), ConfigError, "/no/such/program")


def test_a_bucket_is_made_where_it_may_be(shared: Any) -> None:
    settings = shared.settings(bucket=f"made-{shared.prefix}", create_bucket=True, region="eu-west-1")
    probe = settings.probe()
    assert probe.problems == []
    assert dict(probe.facts)["state"].startswith("will be made")
    for _ in range(2):
        with settings.open(CONTEXT) as tier:
            assert shared.store(tier, [KEY]) == [Outcome.OK]


def test_a_bucket_that_is_made_by_another_at_the_same_time(faulty: Any) -> None:
    shared, faults = faulty
    shared.engine().close()
    faults.answer(404, "NoSuchBucket", method="GET", within="list-type")
    faults.answer(409, "BucketAlreadyOwnedByYou", method="PUT")
    assert shared.store(shared.engine(), [KEY]) == [Outcome.OK]


@pytest.mark.parametrize("within", ["list-type", "namespace.json", "/engines/"])
def test_no_permission(faulty: Any, within: str) -> None:
    shared, faults = faulty
    faults.answer(403, "AccessDenied", "Access Denied", within=within)
    with pytest.raises(ConfigError, match=r"no permission \(AccessDenied: Access Denied\)"):
        shared.engine()
    assert shared.engine().exists([KEY]) == [False]


def test_no_permission_to_write_is_found_by_check(faulty: Any) -> None:
    shared, faults = faulty
    faults.answer(403, "AccessDenied", method="PUT")
    (problem,) = shared.settings().probe().problems
    assert "can't be written: no permission" in problem


def test_who_only_reads_needs_no_permission_to_write(faulty: Any) -> None:
    shared, faults = faulty
    shared.store(shared.engine(), [KEY])
    faults.answer(403, "AccessDenied", method="PUT", times=99)
    reader = shared.engine(write="off")
    reader.maintain(1.0)
    assert shared.load(reader, [KEY]) == [Outcome.OK]
    assert shared.settings(write="off").probe().problems == []


@pytest.mark.parametrize("status", [500, 503])
def test_a_store_that_can_not_now(faulty: Any, status: int) -> None:
    shared, faults = faulty
    faults.answer(status, "SlowDown")
    with pytest.raises(TierUnavailable, match="can't now"):
        shared.engine()
    assert shared.engine().exists([KEY]) == [False]


def test_a_namespace_of_a_newer_version_is_left_alone(one_shared: Any) -> None:
    one_shared.engine().close()
    (name,) = (name for name in one_shared.names() if name.endswith("namespace.json"))
    one_shared.client().put_object(Bucket=one_shared.bucket, Key=name, Body=json.dumps({"format": 99}).encode())
    with pytest.raises(ConfigError, match="in format 99, by a newer version"):
        one_shared.engine()
    assert [one for one in one_shared.names() if one != name and "/engines/" in one] == []


def test_who_only_reads_may_be_refused_when_it_renews_marks(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, faults = faulty
    shared.engine()
    reader = shared.engine(write="off")
    monkeypatch.setattr(upkeep, "RENEW_AFTER", -60.0)
    reader._upkeep._due = 0.0
    faults.answer(403, "AccessDenied", method="PUT", times=9)
    faults.forget()
    reader.maintain(1.0)
    assert [one.method for one in faults.seen].count("PUT") == 1


def test_check_leaves_nothing_behind(shared: Any) -> None:
    shared.engine().close()
    before = sorted(shared.names())
    probe = shared.settings(ttl="1d").probe(1 << 20)
    assert probe.problems == []
    assert probe.chunks is None
    facts = dict(probe.facts)
    assert facts["permissions"] == "list, read, write"
    assert facts["ttl"].startswith("24h" if facts["ttl"].startswith("24h") else "1d")
    assert facts["lifecycle rule"] == "none: nothing is ever removed"
    assert sorted(shared.names()) == before


def test_check_writes_nothing_where_the_store_checks_digests(faulty: Any) -> None:
    """A store has looked who may write before it looks at the digest, which is wrong."""
    shared, faults = faulty
    shared.engine().close()
    faults.forget()
    assert shared.settings().probe().problems == []
    assert [one.method for one in faults.seen if one.method != "GET"] == ["PUT"]


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_check_says_what_is_not_allowed(faulty: Any, method: str) -> None:
    shared, faults = faulty
    shared.engine().close()
    faults.answer(403, "AccessDenied", method=method, within="/check-")
    (problem,) = shared.settings().probe().problems
    assert "no permission" in problem


def test_check_says_which_lifecycle_rule_is_there(one_shared: Any, stores: Any) -> None:
    """On moto, which knows rules."""
    shared = type(one_shared)(stores["moto"])
    bucket = f"rules-{shared.prefix}"
    settings = shared.settings(bucket=bucket)
    settings.open(CONTEXT).close()

    def rule(days: int, **scope: Any) -> dict[str, Any]:
        return {"ID": f"{days}", "Status": "Enabled", "Expiration": {"Days": days}, "Filter": scope}

    for rules, said in (
        ([rule(7, Prefix="")], "after 7 days"),
        ([rule(7, Prefix=shared.prefix + "/"), rule(3, Prefix="")], "after 3 days"),
        ([rule(9, Prefix="elsewhere/")], "none"),
        ([{**rule(5, Prefix=""), "Status": "Disabled"}], "none"),
        ([rule(5, Tag={"Key": "a", "Value": "b"})], "none"),
    ):
        shared.client().put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
        assert said in dict(settings.probe().facts)["lifecycle rule"]


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
def secured(one_shared: Any, tmp_path: Path, certificates: Certificates) -> Any:
    store = rclone(tmp_path, certificates)
    assert store.server is not None
    with store.server:
        one_shared.endpoint = store.endpoint
        yield one_shared
        one_shared.close()


@pytest.mark.parametrize("nbytes", [1, 16 << 10, 1 << 20])
def test_tls(secured: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.ca_file))
    tier, keys = secured.engine(), secured.keys(*range(4))
    assert secured.store(tier, keys, nbytes) == [Outcome.OK] * 4
    assert secured.load(tier, keys, nbytes) == [Outcome.OK] * 4
    assert tier.exists(secured.keys(0, 9)) == [True, False]


def test_tls_of_somebody_whom_nobody_trusts(secured: Any) -> None:
    refused(secured.settings(), ConfigError, "its certificate is not trusted")


def test_a_store_without_tls_where_tls_is_asked_for(one_shared: Any) -> None:
    endpoint = one_shared.endpoint.replace("http:", "https:")
    refused(one_shared.settings(endpoint_url=endpoint), TierUnavailable, "TLS fails")


def test_a_port_for_https_where_tls_is_not_asked_for(secured: Any) -> None:
    endpoint = secured.endpoint.replace("https:", "http:")
    refused(secured.settings(endpoint_url=endpoint), ConfigError, "begin `endpoint_url` with https://")


def test_a_port_that_answers_in_tls_where_it_is_not_asked_for(faulty: Any) -> None:
    shared, faults = faulty
    faults.raw(b"\x15\x03\x01\0\x02\x02F", times=2)
    refused(shared.settings(), TierUnavailable, "it speaks TLS; begin `endpoint_url` with https://")


def test_a_deadline_under_tls(secured: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.ca_file))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"https://127.0.0.1:{silent.getsockname()[1]}"
        refused(secured.settings(endpoint_url=endpoint, deadline="300ms"), TierUnavailable, "within the deadline")
