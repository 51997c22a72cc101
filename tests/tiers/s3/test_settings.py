"""The settings of the s3 tier."""

from typing import Any

import pytest
from pydantic import ValidationError

from kvcascade.configs.schema import PromoteAfter
from kvcascade.tiers.s3 import S3Settings


def test_defaults() -> None:
    settings = S3Settings(bucket="kv-cache")
    assert (settings.type, settings.name, settings.prefix) == ("s3", "s3", "kvcascade")
    assert (settings.endpoint_url, settings.region, settings.addressing_style) == (None, None, "auto")
    assert (settings.storage_class, settings.sse, settings.checksum) == (None, None, "auto")
    assert (settings.create_bucket, settings.warm, settings.write, settings.fill) == (
        False,
        False,
        "through",
        False,
    )
    assert (settings.promote, settings.ttl, settings.probe_ttl) == (PromoteAfter(after=2), None, 60.0)
    assert (settings.breaker.failures, settings.breaker.probe_every) == (5, 10.0)
    assert (settings.deadline, settings.concurrency, settings.queue, settings.retries) == (10.0, 16, 0.125, 2)


def test_what_a_variable_leaves_empty_is_not_given() -> None:
    """`${KVCASCADE_S3_ENDPOINT:-}` means AWS."""
    settings = S3Settings(bucket="kv-cache", endpoint_url="", region="", storage_class="", sse="")
    assert (settings.endpoint_url, settings.region, settings.storage_class, settings.sse) == (None,) * 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Field required"),
        ({"bucket": ""}, "3 to 63 of a-z"),
        ({"bucket": "ab"}, "3 to 63 of a-z"),
        ({"bucket": "Bucket"}, "3 to 63 of a-z"),
        ({"bucket": "arn:aws:s3:us-west-2:1:accesspoint/mine"}, "access points and directory buckets"),
        ({"bucket": "mine--usw2-az1--x-s3"}, "access points and directory buckets"),
        ({"prefix": "a b"}, "letters, digits"),
        ({"prefix": "a//b"}, "letters, digits"),
        ({"prefix": "a/../b"}, "letters, digits"),
        ({"prefix": "a" * 600}, "at most 512"),
        ({"endpoint_url": "minio:9000"}, "expected http://HOST:PORT"),
        ({"endpoint_url": "ftp://minio"}, "expected http://HOST:PORT"),
        ({"endpoint_url": "http://"}, "expected http://HOST:PORT"),
        ({"endpoint_url": "http://u:p@minio:9000"}, "credentials come from boto3's own chain"),
        ({"region": "eu central"}, "expected a region such as eu-central-1"),
        ({"region": "-x"}, "expected a region such as eu-central-1"),
        ({"storage_class": "DEEP_ARCHIVE"}, "can't be read at once"),
        ({"storage_class": "standard"}, "STANDARD_IA"),
        ({"sse": "aes"}, "'AES256' or 'aws:kms'"),
        ({"addressing_style": "virtual", "bucket": "a.b.c"}, "virtual"),
        ({"checksum": "crc32"}, "checksum"),
        ({"access_key": "AKIA"}, "Extra inputs"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        S3Settings(**({} if given == {} else {"bucket": "kv-cache", **given}))


def test_two_tiers_can_not_have_one_prefix() -> None:
    claims = [
        S3Settings(bucket="bucket", **given).claims()
        for given in ({}, {"prefix": "/kvcascade/"}, {"prefix": "other"}, {"endpoint_url": "http://minio:9000"})
    ]
    assert claims[0] == claims[1]
    assert len({*claims}) == 3
