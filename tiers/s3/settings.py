"""The settings of the s3 tier."""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kvcascade.configs.schema import CONTRADICTION, BreakerSettings, NonZeroDuration, PromoteAfter, SharedSettings
from kvcascade.tiers.base import OpenContext, Probe, StoredNamespace, Tier, TierSettings

__all__ = ["S3Settings"]

_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_PREFIX = r"[A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*"
_LONGEST_PREFIX = 512
_REGION = r"(?![0-9]+$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


def _bucket(name: str) -> str:
    if name.startswith("arn:") or name.endswith("--x-s3"):
        raise ValueError("access points and directory buckets are not served; give the name of an ordinary bucket")
    if not re.fullmatch(_BUCKET, name):
        raise ValueError("expected 3 to 63 of a-z, 0-9, '-' and '.', the first and last a letter or digit")
    return name


def _prefix(prefix: str) -> str:
    prefix = prefix.strip("/")
    if prefix and (not re.fullmatch(_PREFIX, prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ValueError("expected letters, digits and !_.*'()- between single slashes")
    if len(prefix) > _LONGEST_PREFIX:
        raise ValueError(f"expected at most {_LONGEST_PREFIX} characters")
    return prefix


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected http://HOST:PORT or https://HOST, or nothing for AWS")
    if parts.username or parts.password:
        raise ValueError("holds a user or password; credentials come from boto3's own chain")
    return url


def _region(name: str) -> str:
    if not re.fullmatch(_REGION, name):
        raise ValueError("expected a region such as eu-central-1: letters, digits and '-'")
    return name


def _storage_class(name: str) -> str:
    if name in _ARCHIVES:
        raise ValueError(f"{name} can't be read at once; a chunk that is to be loaded must be")
    if not re.fullmatch(r"[A-Z0-9_]+", name):
        raise ValueError("expected a storage class such as STANDARD_IA or INTELLIGENT_TIERING")
    return name


def _empty_is_none(value: Any) -> Any:
    return None if value == "" else value


_EMPTY = BeforeValidator(_empty_is_none)


class S3Settings(SharedSettings, TierSettings):
    """A bucket that engines share. What one of them has stored, the others find. Credentials come from boto3's own
    chain (environment, profile, container, instance), never from here."""

    type: Literal["s3"] = "s3"
    bucket: Annotated[str, AfterValidator(_bucket), WithJsonSchema({"type": "string", "pattern": f"^{_BUCKET}$"})]
    prefix: Annotated[str, AfterValidator(_prefix)] = "kvcascade"
    """What the names of all objects begin with."""
    endpoint_url: Annotated[Annotated[str, AfterValidator(_endpoint)] | None, _EMPTY] = None
    """Of a store that is not AWS."""
    region: Annotated[Annotated[str, AfterValidator(_region)] | None, _EMPTY] = None
    """None: what boto3 finds in its configuration, else us-east-1."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket stands in the path or in the host's name; `auto` leaves it to boto3."""
    storage_class: Annotated[Annotated[str, AfterValidator(_storage_class)] | None, _EMPTY] = None
    sse: Annotated[Literal["AES256", "aws:kms"] | None, _EMPTY] = None
    """Server-side encryption that is asked for."""
    checksum: Literal["auto"] | bool = "auto"
    """The SDK's integrity headers; `auto` sends them to AWS only, since other stores may refuse them. Chunks
    carry a checksum of their own in any case."""
    create_bucket: bool = False
    warm: bool = False
    """Lists the namespace at start, in the background."""
    promote: Literal["always", "never"] | PromoteAfter = PromoteAfter(after=2)
    probe_ttl: NonZeroDuration = 60.0
    deadline: NonZeroDuration = 10.0
    concurrency: Annotated[int, Field(ge=1, le=256)] = 16
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    breaker: BreakerSettings = BreakerSettings.model_validate({"probe_every": "10s"})

    @model_validator(mode="after")
    def _virtual_needs_a_plain_name(self) -> Self:
        if self.addressing_style == "virtual" and "." in self.bucket:
            text = f"'virtual' puts the bucket into the host's name, which {self.bucket!r} with its dots can't be"
            raise PydanticCustomError(CONTRADICTION, "virtual", {"found": [(("addressing_style",), text)]})
        return self

    def claims(self) -> frozenset[str]:
        return frozenset({f"{self.endpoint_url or 's3:/'}/{self.bucket}/{self.prefix}".rstrip("/")})

    def open(self, context: OpenContext) -> Tier:
        from .tier import S3Tier

        return S3Tier.open(self, context)

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        from .check import probe

        return probe(self)

    def stored(self, engine_id: str | None = None) -> list[StoredNamespace]:
        from .inventory import stored

        return [*stored(self)]

    def clear(self, tenant: str | None) -> list[str]:
        from .inventory import clear

        return clear(self, tenant)
