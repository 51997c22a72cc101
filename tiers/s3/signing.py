"""A request as bytes, signed by botocore."""

import hashlib
import hmac
import time
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth

from .failures import of_credentials
from .messages import Request
from .wire import Origin

__all__ = ["Terms", "frozen", "signed"]

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
        """Where connections lead."""
        return _parts(self.base)[0]


@lru_cache(maxsize=64)
def _parts(base: str) -> tuple[Origin, str, str]:
    """Of a URL: where connections lead, what the Host field says, the path."""
    parts = urlsplit(base)
    origin = Origin(parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme])
    return origin, parts.netloc, parts.path


class _Unsigned:
    """A request as the signer reads it."""

    def __init__(self, request: Request, path: str, fields: dict[str, str]) -> None:
        self.method = request.method
        self.url = path
        self.params = request.query
        self.headers = fields
        self.context: dict[str, Any] = {}


class _Signer(S3SigV4Auth):
    """botocore's, told the time and the payload's digest, and spared what a request needs not do twice. It logs
    nothing: in botocore's own log session tokens show."""

    def __init__(self, terms: Terms, digest: str) -> None:
        super().__init__(frozen(terms.credentials), terms.service, terms.region)
        self._timestamp = _timestamp(int(time.time() + terms.skew))
        self._digest = digest

    def add_auth(self, request: Any) -> None:
        request.context["timestamp"] = self._timestamp
        self._modify_request_before_signing(request)  # type: ignore[attr-defined]
        self._signed = dict(sorted((name.lower(), value) for name, value in request.headers.items()))
        text = self.string_to_sign(request, self.canonical_request(request))
        signature = self.signature(text, request)
        self._inject_signature_to_request(request, signature)  # type: ignore[attr-defined]

    def payload(self, request: Any) -> str:
        return self._digest

    def headers_to_sign(self, request: Any) -> Any:
        return self._signed

    def canonical_headers(self, headers_to_sign: Any) -> str:
        return "\n".join([f"{name}:{value}" for name, value in headers_to_sign.items()])

    def signed_headers(self, headers_to_sign: Any) -> str:
        return ";".join(headers_to_sign)

    def _sign(self, key: bytes, msg: str, hex: bool = False) -> Any:  # noqa: A002 - the name of the base
        """The first four of a signature's five steps are the same all day."""
        return super()._sign(key, msg, hex=True) if hex else _derived(key, msg)  # type: ignore[misc]


def frozen(credentials: Any) -> Any:
    """What credentials are now; they may have to be renewed first."""
    try:
        return credentials.get_frozen_credentials()
    except Exception as error:  # of providers, some of them code of the user, that promise nothing
        raise of_credentials(error) from error


@lru_cache(maxsize=8)
def _timestamp(second: int) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))


@lru_cache(maxsize=64)
def _derived(key: bytes, message: str) -> bytes:
    return hmac.digest(key, message.encode(), "sha256")


def signed(request: Request, terms: Terms) -> bytes:
    """The head of a request.

    Raises:
        TierUnavailable: the credentials can't be had.
    """
    _, host, folder = _parts(terms.base)
    path = folder + quote(request.name, safe="/~")
    fields = {"Host": host, **dict(request.fields)}
    digest = _UNSIGNED
    if terms.sign_payload:
        sha256 = hashlib.sha256()
        for part in request.body:
            sha256.update(part)
        digest = sha256.hexdigest()
    _Signer(terms, digest).add_auth(_Unsigned(request, path, fields))
    if request.body or request.method in ("PUT", "POST"):
        fields["Content-Length"] = str(sum(map(len, request.body)))
    fields["User-Agent"] = "kvcascade"
    target = f"{path}?{urlencode(request.query, quote_via=quote, safe='-_.~')}" if request.query else path
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join((*lines, "\r\n")).encode()
