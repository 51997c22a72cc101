"""Requests to a store and its answers, as the modules of this folder hand them around."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from kvcascade.types import Buffer

from .wire import Head

__all__ = ["Answer", "Request", "answer_of", "document", "parsed"]


_LENGTH = re.compile(r"[0-9]{1,18}")


class Request(NamedTuple):
    """A request for an object of the bucket, or, with no name, for the bucket itself."""

    method: str
    name: str = ""
    query: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    body: tuple[Buffer, ...] = ()
    into: tuple[Buffer, ...] = ()
    """Where the body of a good answer goes."""


class Answer(NamedTuple):
    """What a store has answered."""

    status: int
    fields: Mapping[str, str]
    """By name, in lower case."""
    body: bytes = b""
    """Where it was not received into the request's own buffers."""
    received: int = 0
    """Bytes that have come into the request's own buffers."""
    code: str = ""
    """Of an error, as the store names it."""
    message: str = ""
    region: str = ""
    """Where the bucket lies, as far as a refusal says so."""

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def length(self) -> int:
        """Of the body as it was announced, for HEAD too; -1 where it was not."""
        length = self.fields.get("content-length", "")
        return int(length) if _LENGTH.fullmatch(length) else -1


def answer_of(head: Head, body: bytes, received: int) -> Answer:
    """An answer, with what the body of an error says."""
    if 200 <= head.status < 300 or not body:
        return Answer(head.status, head.fields, body, received, region=head.fields.get("x-amz-bucket-region", ""))
    said = document(body)
    region = head.fields.get("x-amz-bucket-region") or said.findtext("{*}Region") or ""
    code, message = said.findtext("{*}Code") or "", said.findtext("{*}Message") or ""
    return Answer(head.status, head.fields, body, received, code, message, region)


def document(xml: bytes) -> ElementTree.Element:
    """The root of a document; one without a name where it is no XML."""
    try:
        return ElementTree.fromstring(xml)
    except (ElementTree.ParseError, ValueError, LookupError):  # the latter two for its encoding
        return ElementTree.Element("")


def parsed(body: bytes | None) -> dict[str, object] | None:
    """What an object says in JSON; None where it says nothing."""
    try:
        said = json.loads(body or b"")
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
