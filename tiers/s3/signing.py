"""A request as bytes, signed by botocore."""

import hashlib
import time
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth

from .messages import Request
from .wire import Origin

__all__ = ["Terms", "origin_of", "signed"]

_UNSIGNED = "UNSIGNED-PAYLOAD"
_PORTS = {"http": 80, "https": 443}


class Terms(NamedTuple):
    """What requests are signed by; replaced as a whole when an answer shows that it is wrong."""

    base: str
    """URL of the bucket, with a slash at its end."""
    region: str
    service: str
    credentials: Any
    """botocore's; they may refresh themselves."""
    skew: float = 0.0
    """Seconds by which the store's clock is ahead of ours."""
    sign_payload: bool = False

    @property
    def origin(self) -> Origin:
        return origin_of(self.base)


def origin_of(url: str) -> Origin:
    """Where connections for a URL lead."""
    parts = urlsplit(url)
    return Origin(parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme])


class _Fields(dict[str, str]):
    """The fields of a request, as the signer reads them."""

    def get_all(self, name: str) -> list[str]:
        return [self[name]]


class _Unsigned:
    """A request as the signer reads it."""

    def __init__(self, request: Request, url: str, fields: _Fields) -> None:
        self.method = request.method
        self.url = url
        self.params = request.query
        self.headers = fields
        self.context: dict[str, Any] = {}


class _Signer(S3SigV4Auth):
    """botocore's, told the time and the payload's digest. It logs nothing: in botocore's own log session tokens
    show."""

    def __init__(self, terms: Terms, digest: str) -> None:
        super().__init__(terms.credentials.get_frozen_credentials(), terms.service, terms.region)
        self._now = time.gmtime(time.time() + terms.skew)
        self._digest = digest

    def add_auth(self, request: Any) -> None:
        request.context["timestamp"] = time.strftime("%Y%m%dT%H%M%SZ", self._now)
        self._modify_request_before_signing(request)  # type: ignore[attr-defined]
        text = self.string_to_sign(request, self.canonical_request(request))
        signature = self.signature(text, request)
        self._inject_signature_to_request(request, signature)  # type: ignore[attr-defined]

    def payload(self, request: Any) -> str:
        return self._digest

    def headers_to_sign(self, request: Any) -> Any:
        return _Fields((name.lower(), value) for name, value in request.headers.items())


def signed(request: Request, terms: Terms) -> bytes:
    """The head of a request.

    Raises:
        BotoCoreError: the credentials can't be had.
    """
    url = terms.base + quote(request.name, safe="/~")
    parts = urlsplit(url)
    fields = _Fields({"Host": parts.netloc, **dict(request.fields)})
    digest = _UNSIGNED
    if terms.sign_payload:
        sha256 = hashlib.sha256()
        for part in request.body:
            sha256.update(part)
        digest = sha256.hexdigest()
    _Signer(terms, digest).add_auth(_Unsigned(request, url, fields))
    if request.body or request.method in ("PUT", "POST"):
        fields["Content-Length"] = str(sum(map(len, request.body)))
    fields["User-Agent"] = "kvcascade"
    target = (
        f"{parts.path}?{urlencode(request.query, quote_via=quote, safe='-_.~')}" if request.query else parts.path
    )
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join((*lines, "\r\n")).encode()
