"""What botocore decides, without a store: nothing here is sent."""

import inspect
import logging
from pathlib import Path
from typing import Any

import boto3
import botocore.auth
import botocore.session
import pytest

from kvcascade.errors import ConfigError
from kvcascade.tiers.s3 import S3Settings
from kvcascade.tiers.s3.messages import Request
from kvcascade.tiers.s3.sdk import Sdk
from kvcascade.tiers.s3.signing import Terms, signed

BUCKET = "kv-cache"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-key")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def sdk(**given: Any) -> Sdk:
    return Sdk(S3Settings(bucket=BUCKET, **given))


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ({}, "https://kv-cache.s3.amazonaws.com/"),
        ({"region": "eu-west-1"}, "https://kv-cache.s3.eu-west-1.amazonaws.com/"),
        ({"region": "cn-north-1"}, "https://kv-cache.s3.cn-north-1.amazonaws.com.cn/"),
        ({"region": "eu-west-1", "addressing_style": "path"}, "https://s3.eu-west-1.amazonaws.com/kv-cache/"),
        ({"endpoint_url": "http://minio.local:9000"}, "http://minio.local:9000/kv-cache/"),
        (
            {"endpoint_url": "http://minio.local:9000", "addressing_style": "virtual"},
            "http://kv-cache.minio.local:9000/",
        ),
        (
            {"endpoint_url": "http://10.0.0.1:9000", "addressing_style": "virtual"},
            "http://10.0.0.1:9000/kv-cache/",
        ),
        ({"endpoint_url": "https://gateway/s3"}, "https://gateway/s3/kv-cache/"),
    ],
)
def test_where_a_bucket_is_reached(given: dict[str, Any], base: str) -> None:
    """folbricht/desync#81: the bucket in the host's name does not resolve at private endpoints."""
    assert sdk(**given).terms.base == base


def test_a_bucket_with_dots_stands_in_the_path() -> None:
    assert Sdk(S3Settings(bucket="a.b.c")).terms.base == "https://s3.amazonaws.com/a.b.c/"


def test_boto3s_own_configuration_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "[profile x]\nregion = eu-north-1\nendpoint_url = http://minio:9000\n"
        "s3 =\n  addressing_style = virtual\n  payload_signing_enabled = true\n"
        "aws_access_key_id = AKIDPROFILE\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    terms = sdk().terms
    assert terms.base == "http://kv-cache.minio:9000/"
    assert (terms.region, terms.sign_payload) == ("eu-north-1", True)
    assert terms.credentials.access_key == "AKIDPROFILE"
    assert sdk(region="eu-west-1", endpoint_url="http://other:1").terms.region == "eu-west-1"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, True),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com", "region": "eu-west-1"}, True),
        ({"endpoint_url": "http://minio:9000"}, False),
        ({"endpoint_url": "http://minio:9000", "checksum": True}, True),
        ({"checksum": False}, False),
    ],
)
def test_who_gets_the_sdks_integrity_headers(given: dict[str, Any], sent: bool) -> None:
    """boto/s3transfer#327, aws/aws-cli#9214: stores refused uploads when the SDK began to send them."""
    assert sdk(**given).checksums is sent


def test_the_sdks_own_switch_for_integrity_headers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    assert sdk().checksums is False
    assert sdk(checksum=True).checksums is True


def test_no_credentials_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """llm-d/llm-d-kv-cache#499: what is missing surfaced as a cryptic error."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="no credentials: set AWS_ACCESS_KEY_ID and"):
        sdk()


def test_half_of_the_credentials_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="missing: AWS_SECRET_ACCESS_KEY"):
        sdk()


def test_a_profile_that_is_not_there_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(ConfigError, match="profile \\(missing\\)"):
        sdk()


def test_a_bundle_that_is_not_there_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such.pem")
    with pytest.raises(ConfigError, match=r"CA bundle /no/such.pem"):
        sdk()


def test_boto3s_default_session_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto/boto3#1592: threads that shared it met a KeyError now and then."""

    def fails(**_: Any) -> None:
        raise AssertionError("the default session was made")

    monkeypatch.setattr(boto3, "setup_default_session", fails)
    sdk()
    assert boto3.DEFAULT_SESSION is None


def test_the_signature_is_botocores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The light request that is signed here gets what botocore's own request gets."""
    terms = sdk(region="eu-west-1").terms
    fields = (("x-amz-meta-a", "b"), ("Range", "bytes=0-9"))
    request = Request("GET", "a/b~c d", (("list-type", "2"), ("prefix", "a/b c")), fields)
    head = signed(request, terms).decode()
    ours = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
    theirs = botocore.awsrequest.AWSRequest(
        "GET",
        terms.base + "a/b~c%20d",
        params=dict(request.query),
        headers={"Host": "kv-cache.s3.eu-west-1.amazonaws.com", **dict(fields)},
    )
    theirs.context["payload_signing_enabled"] = False
    stamp = ours["X-Amz-Date"]
    moment = botocore.auth.datetime.datetime.strptime(stamp, botocore.auth.SIGV4_TIMESTAMP)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: moment)
    auth = botocore.auth.S3SigV4Auth(terms.credentials, "s3", "eu-west-1")
    theirs.context["client_config"] = type("Config", (), {"s3": {"payload_signing_enabled": False}})()
    auth.add_auth(theirs)
    assert ours["Authorization"] == theirs.headers["Authorization"]
    assert ours["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
    assert head.startswith("GET /a/b~c%20d?list-type=2&prefix=a%2Fb%20c HTTP/1.1\r\n")


def test_a_digest_is_sent_where_payloads_are_signed() -> None:
    terms = sdk().terms._replace(sign_payload=True)
    head = signed(Request("PUT", "x", body=(memoryview(b"abc"), memoryview(b"def"))), terms).decode()
    assert "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721" in head
    assert "Content-Length: 6\r\n" in head


def test_secrets_stay_out_of_logs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-session-token")
    caplog.set_level(logging.DEBUG)
    found = sdk()
    head = signed(Request("GET", "x"), found.terms)
    assert b"the-session-token" in head
    assert "the-session-token" not in caplog.text
    assert "the-secret-key" not in caplog.text + repr(found.terms)


def test_credentials_that_refresh_themselves_are_asked_each_time() -> None:
    """Those of a role: botocore renews them, each request takes what it has now."""

    class Turning:
        turn = 0

        def get_frozen_credentials(self) -> Any:
            self.turn += 1
            return botocore.credentials.ReadOnlyCredentials(f"AKID{self.turn}", "s", None)

    terms = Terms("http://h/b/", "us-east-1", "s3", Turning())
    heads = [signed(Request("GET", "x"), terms).decode() for _ in range(2)]
    assert ["Credential=AKID1/" in heads[0], "Credential=AKID2/" in heads[1]] == [True, True]


def test_what_is_used_of_botocore_is_there() -> None:
    """Names that it does not promise: a release without them must show here first."""
    signer = botocore.auth.S3SigV4Auth
    for name in ("_modify_request_before_signing", "_inject_signature_to_request", "headers_to_sign", "payload"):
        assert list(inspect.signature(getattr(signer, name)).parameters)[:2] == ["self", "request"]
    source = inspect.getsource(signer.add_auth)
    assert "self.string_to_sign(request, canonical_request)" in source
    assert "self.signature(string_to_sign, request)" in source
