"""The s3 tier does what every tier must, on every store that is there."""

from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import StoredConformance, TierConformance
from kvcascade.testing.conformance import Opener
from kvcascade.testing.wrappers import TierWrapper
from kvcascade.tiers import OpenContext, StoredChunk, Tier, TierSettings
from kvcascade.tiers.s3.layout import ENVELOPE, place
from kvcascade.tiers.s3.tier import S3Tier
from kvcascade.types import Key


class TestS3(TierConformance):
    @pytest.fixture(autouse=True)
    def _place(self, shared: Any, insisting: Any) -> None:
        self.shared = shared
        self.insisting = insisting

    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        tier: Tier = self.insisting(self.shared.settings().open(context))
        return tier

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        corrupt(self.shared, self._name(tier, key))

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        client, name = self.shared.client(), self._name(tier, key)
        body = client.get_object(Bucket=self.shared.bucket, Key=name)["Body"].read()
        client.put_object(Bucket=self.shared.bucket, Key=name, Body=body[:-1])

    def raw_remove(self, tier: Tier, key: Key) -> None:
        self.shared.client().delete_object(Bucket=self.shared.bucket, Key=self._name(tier, key))

    def _name(self, tier: Tier, key: Key) -> str:
        assert isinstance(tier, TierWrapper)
        assert isinstance(tier.inner, S3Tier)
        assert tier.inner._era is not None
        return place(tier.inner._era.path, key)

    def test_recency_outlives_a_close(self, opener: Opener) -> None:
        pytest.skip("a bucket keeps no recency")


class TestStored(StoredConformance):
    @pytest.fixture(autouse=True)
    def _place(self, shared: Any) -> None:
        self.shared = shared

    def settings(self, path: Path) -> TierSettings:
        settings: TierSettings = self.shared.settings()
        return settings

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        corrupt(self.shared, chunk.token.name)


def corrupt(shared: Any, name: str) -> None:
    client = shared.client()
    found = client.get_object(Bucket=shared.bucket, Key=name)
    body = bytearray(found["Body"].read())
    body[ENVELOPE + (len(body) - ENVELOPE) // 2] ^= 1
    client.put_object(Bucket=shared.bucket, Key=name, Body=bytes(body), Metadata=found["Metadata"])
