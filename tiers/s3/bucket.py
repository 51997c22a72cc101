"""The operations of S3 that a tier is made of."""

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.types import Buffer

from . import failures
from .client import Client
from .messages import Answer, Request, document
from .sdk import Sdk

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["Bucket", "Found", "Got", "Object", "Page", "Put", "Written"]

_BULK = 1000
_IS_THERE = ("BucketAlreadyOwnedByYou", "BucketAlreadyExists")
_WRONG_DIGEST = ("BadDigest", "InvalidDigest")
_MISSING = 404
_KEPT = (409, 412)


class Found(NamedTuple):
    """What a store says of one object."""

    nbytes: int
    etag: str
    fields: Mapping[str, str]


class Got(NamedTuple):
    """What has come of an object."""

    nbytes: int
    """That the store says it has."""
    received: int
    """That have come."""
    etag: str


class Put(NamedTuple):
    """An object to write."""

    name: str
    body: tuple[Buffer, ...]
    fields: tuple[tuple[str, str], ...]
    """Of HTTP: metadata, type."""


class Written(Enum):
    """What became of an object that was to be written."""

    DONE = auto()
    KEPT = auto()
    """There was one of that name, which the store has kept."""
    FULL = auto()
    """The store has no room for it."""


class Object(NamedTuple):
    """An object as it is listed."""

    name: str
    nbytes: int
    modified: float
    """Unix time, of the store's clock."""
    etag: str = ""


class Page(NamedTuple):
    """A part of a list."""

    objects: list[Object]
    folders: list[str]
    """What names begin with, up to the delimiter."""
    following: str
    """Asks for the next page; "" where this is the last."""


class Bucket:
    """One bucket. Thread-safe. `end` is the time, of the monotonic clock, at which a call fails.

    Methods over many objects answer one by one, in order, with an error in the place of an answer; the others
    raise `TierError`.
    """

    def __init__(self, settings: "S3Settings") -> None:
        """
        Raises:
            ConfigError: botocore can't use what it finds.
        """
        self.name = settings.bucket
        self.keeps = False
        """Whether the store can be told to keep what it has."""
        self._sdk = Sdk(settings)
        self._concurrency = settings.concurrency
        self._client = Client(self._sdk, settings.concurrency)
        self._put_fields = tuple(
            (name, value)
            for name, value in (
                ("x-amz-storage-class", settings.storage_class),
                ("x-amz-server-side-encryption", settings.sse),
            )
            if value is not None
        )

    @property
    def place(self) -> str:
        """Where the bucket is reached, and the region that requests are signed for."""
        return f"{self._sdk.terms.base.rstrip('/')} ({self._sdk.terms.region})"

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return self._client.under_way

    def forked(self) -> None:
        """In a fork: the connections are the parent's, and so may be any lock."""
        self._sdk.forked()
        self._client = Client(self._sdk, self._concurrency)

    def close(self) -> None:
        """Closes all connections, after the last call has returned."""
        self._client.close()

    # -- many objects

    def find(self, names: Iterable[str], end: float) -> Iterator[Found | TierError | None]:
        """What there is of each name; None for nothing."""
        for answer in self._client.each((Request("HEAD", name) for name in names), end):
            if isinstance(answer, TierError):
                yield answer
            elif answer.good:
                yield Found(answer.length, _etag(answer), answer.fields)
            else:
                yield _missing(answer, "can't be looked for")

    def get(
        self, wanted: Iterable[tuple[str, tuple[Buffer, ...]]], end: float
    ) -> Iterator[Got | TierError | None]:
        """Each object's body, received into the buffers that stand beside its name, as far as they go; None where
        it is missing."""
        requests = (Request("GET", name, into=into) for name, into in wanted)
        for answer in self._client.each(requests, end):
            if isinstance(answer, TierError):
                yield answer
            elif answer.good:
                yield Got(answer.length, answer.received, _etag(answer))
            else:
                yield _missing(answer, "can't be read")

    def put(self, objects: Iterable[Put], end: float, only_new: bool = False) -> Iterator[Written | TierError]:
        """Writes objects; with `only_new` those that are not there, if the store `keeps` what it has."""
        condition = (("If-None-Match", "*"),) if only_new else ()
        for answer in self._client.each((self._request(one, condition) for one in objects), end):
            if isinstance(answer, TierError):
                yield answer
            elif answer.good:
                yield Written.DONE
            elif only_new and answer.status in _KEPT:
                yield Written.KEPT
            elif failures.is_full(answer):
                yield Written.FULL
            else:
                yield failures.of_answer(answer, "can't be written")

    def delete(self, names: Iterable[str], end: float) -> Iterator[TierError | None]:
        """Removes objects, those that are there."""
        for answer in self._client.each((Request("DELETE", name) for name in names), end):
            yield answer if isinstance(answer, TierError) else _missing(answer, "can't be removed")

    # -- one thing

    def read(self, name: str, end: float, nbytes: int | None = None) -> bytes | None:
        """An object, or its first `nbytes`; None where it is missing."""
        fields = (("Range", f"bytes=0-{nbytes - 1}"),) if nbytes is not None else ()
        answer = self._client.ask(Request("GET", name, fields=fields), end)
        _check_missing(answer, "can't be read")
        return answer.body[:nbytes] if answer.good else None

    def write(self, name: str, body: bytes, end: float, only_new: bool = False) -> None:
        """Writes a small object; with `only_new` what is there stays, if the store `keeps` what it has."""
        (written,) = self.put([_small(name, body)], end, only_new and self.keeps)
        if isinstance(written, TierError):
            raise written
        if written is Written.FULL:
            raise TierRefused("can't be written: the store is full")

    def takes_what_is_damaged(self, name: str, body: bytes, end: float) -> bool:
        """Whether the store takes a body whose digest is wrong. Raises TierError where it refuses it for anything
        else, such as who has sent it."""
        wrong = ("Content-MD5", base64.b64encode(bytes(16)).decode())
        put = _small(name, body)
        answer = self._client.ask(self._request(put._replace(fields=(*put.fields, wrong)), ()), end)
        if not answer.good and answer.code not in _WRONG_DIGEST:
            raise failures.of_answer(answer, "can't be written")
        return answer.good

    def learn_from(self, name: str, body: bytes, end: float) -> None:
        """Finds out whether the store `keeps` what it has, by writing an object that is there again, as it is."""
        (written,) = self.put([_small(name, body)], end, only_new=True)
        self.keeps = written is Written.KEPT

    def page(self, prefix: str, end: float, following: str = "", delimiter: str = "", most: int = 1000) -> Page:
        """A page of the list of all objects whose names begin with `prefix`, in the order of their names."""
        query = [("list-type", "2"), ("max-keys", str(most)), ("prefix", prefix)]
        query += [("continuation-token", following)] if following else []
        query += [("delimiter", delimiter)] if delimiter else []
        answer = self._client.ask(Request("GET", query=tuple(sorted(query))), end)
        if not answer.good:
            raise failures.of_answer(answer, "can't be listed")
        return _page_of(answer.body)

    def list(self, prefix: str, end: Callable[[], float]) -> Iterator[Object]:
        """All objects whose names begin with `prefix`; `end` is asked for each page."""
        following = ""
        while True:
            page = self.page(prefix, end(), following)
            yield from page.objects
            following = page.following
            if not following:
                return

    def create(self, end: float) -> None:
        """Makes the bucket; it may be there."""
        region = self._sdk.terms.region
        body = b""
        if region != "us-east-1":
            body = (
                '<CreateBucketConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<LocationConstraint>{escape(region)}</LocationConstraint></CreateBucketConfiguration>"
            ).encode()
        answer = self._client.ask(Request("PUT", body=(memoryview(body),) if body else ()), end)
        if not answer.good and answer.code not in _IS_THERE:
            raise failures.of_answer(answer, "can't be made")

    def erase(self, names: Sequence[str], end: float) -> None:
        """Removes any number of objects, with a request for each thousand."""
        for start in range(0, len(names), _BULK):
            listed = "".join(
                f"<Object><Key>{escape(name)}</Key></Object>" for name in names[start : start + _BULK]
            )
            body = f"<Delete><Quiet>true</Quiet>{listed}</Delete>".encode()
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            request = Request(
                "POST", query=(("delete", ""),), fields=(("Content-MD5", digest),), body=(memoryview(body),)
            )
            answer = self._client.ask(request, end)
            error = document(answer.body).find("{*}Error")
            if error is not None:
                code, message = error.findtext("{*}Code", ""), error.findtext("{*}Message", "")
                answer = answer._replace(status=403, code=code, message=message)
            if not answer.good:
                raise failures.of_answer(answer, "can't be removed")

    def lifecycle(self, end: float) -> bytes | None:
        """The bucket's lifecycle rules as the store writes them; None where there are none."""
        answer = self._client.ask(Request("GET", query=(("lifecycle", ""),)), end)
        _check_missing(answer, "can't be asked for its lifecycle")
        return answer.body if answer.good else None

    def _request(self, put: Put, condition: tuple[tuple[str, str], ...]) -> Request:
        fields = (*self._put_fields, *put.fields, *condition)
        if self._sdk.checksums:
            crc = 0
            for part in put.body:
                crc = zlib.crc32(part, crc)
            value = base64.b64encode(crc.to_bytes(4, "big")).decode()
            fields += (("x-amz-checksum-crc32", value), ("x-amz-sdk-checksum-algorithm", "CRC32"))
        return Request("PUT", put.name, fields=fields, body=put.body)


def _small(name: str, body: bytes) -> Put:
    return Put(name, (memoryview(body),), (("Content-Type", "application/json"),))


def _missing(answer: Answer, what: str) -> TierError | None:
    """None where the object is not there; else what failed."""
    if answer.good or (answer.status == _MISSING and answer.code != failures.NO_BUCKET):
        return None
    return failures.of_answer(answer, what)


def _check_missing(answer: Answer, what: str) -> None:
    failure = _missing(answer, what)
    if failure is not None:
        raise failure


def _etag(answer: Answer) -> str:
    """Changes with an object's content; some stores quote it in one place and not in another."""
    return answer.fields.get("etag", "").strip('"')


def _page_of(xml: bytes) -> Page:
    root = document(xml)
    following = root.findtext("{*}NextContinuationToken", "")
    truncated = root.findtext("{*}IsTruncated", "").lower() == "true"
    if not root.tag.endswith("ListBucketResult") or truncated != bool(following):
        raise TierUnavailable("can't be listed: what the store answers is no list")
    folders = [found.findtext("{*}Prefix", "") for found in root.iterfind("{*}CommonPrefixes")]
    return Page([_object_of(found) for found in root.iterfind("{*}Contents")], folders, following)


def _object_of(found: Element) -> Object:
    name, etag = found.findtext("{*}Key", ""), found.findtext("{*}ETag", "").strip('"')
    try:
        modified = datetime.fromisoformat(found.findtext("{*}LastModified", "")).timestamp()
        return Object(name, int(found.findtext("{*}Size", "")), modified, etag)
    except (ValueError, OverflowError) as error:
        raise TierUnavailable(f"can't be listed: what the store says of {name[:200]!r}: {error}") from error
