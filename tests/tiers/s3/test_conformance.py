"""The s3 tier does what every tier must, on every store that is there."""

import secrets
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import TierConformance
from kvcascade.testing.conformance import Opener
from kvcascade.testing.servers.s3 import S3Store
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.s3 import S3Settings
from kvcascade.tiers.s3.layout import ENVELOPE, place
from kvcascade.tiers.s3.tier import S3Tier
from kvcascade.types import Key

BUCKET = "kvcascade-tests"


class TestS3(TierConformance):
    @pytest.fixture(autouse=True)
    def _place(self, store: S3Store) -> None:
        self.store = store
        self.prefix = f"test-{secrets.token_hex(6)}"

    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        settings = S3Settings(
            bucket=BUCKET, prefix=self.prefix, endpoint_url=self.store.endpoint, create_bucket=True
        )
        return settings.open(context)

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        client, name = self._raw(tier, key)
        body = bytearray(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        body[ENVELOPE + (len(body) - ENVELOPE) // 2] ^= 1
        client.put_object(Bucket=BUCKET, Key=name, Body=bytes(body))

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        client, name = self._raw(tier, key)
        body = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        client.put_object(Bucket=BUCKET, Key=name, Body=body[:-1])

    def raw_remove(self, tier: Tier, key: Key) -> None:
        client, name = self._raw(tier, key)
        client.delete_object(Bucket=BUCKET, Key=name)

    def _raw(self, tier: Tier, key: Key) -> Any:
        import boto3

        assert isinstance(tier, S3Tier)
        assert tier._era is not None
        client = boto3.session.Session().client("s3", "us-east-1", endpoint_url=self.store.endpoint)
        return client, place(tier._era.path, key)

    def test_recency_outlives_a_close(self, opener: Opener) -> None:
        pytest.skip("a store keeps no recency")
