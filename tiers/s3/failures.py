"""What went wrong, in words that a person can act on."""

import socket
import ssl

from kvcascade.errors import TierError, TierRefused, TierUnavailable

from .messages import Answer
from .wire import CutShort, Garbled, Origin

__all__ = ["NO_BUCKET", "NoBucket", "is_full", "of_answer", "of_credentials", "of_nonsense", "of_transport"]

NO_BUCKET = "NoSuchBucket"
"""The code, which tells it from a missing object."""
_CLOCKS = ("RequestTimeTooSkewed",)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_FULL = (
    "EntityTooLarge",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
    "QuotaExceeded",
    "QuotaExceededException",
)
_WORDS = {
    "InvalidAccessKeyId": "the access key is not known to the store",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "InvalidToken": "the session token is wrong",
}
_LONGEST = 200


class NoBucket(TierRefused):
    """There is no such bucket."""


def of_answer(answer: Answer, wanted: str) -> TierError:
    """The failure that a bad answer to the request for `wanted` means.

    `TierUnavailable` for what may pass (5xx, SlowDown, a clock, expired credentials), else `TierRefused`.
    """
    said = ": ".join(filter(None, [answer.code, answer.message[:_LONGEST]])) or f"status {answer.status}"
    if answer.code == NO_BUCKET:
        return NoBucket(f"{wanted}: there is no such bucket ({said})")
    if answer.status == 404:
        return TierRefused(f"{wanted}: not found ({said}); does `endpoint_url` lead to a store of S3?")
    if answer.status == 400 and not answer.code and b"https" in answer.body.lower():
        return TierRefused(f"{wanted}: the port is one for https; begin `endpoint_url` with https://")
    if answer.code in _CLOCKS:
        return TierUnavailable(f"{wanted}: this machine's clock differs too much from the store's ({said})")
    if answer.code in _EXPIRED:
        return TierUnavailable(f"{wanted}: the credentials have expired ({said})")
    if answer.code in _WORDS:
        return TierRefused(f"{wanted}: {_WORDS[answer.code]} ({said})")
    if answer.status in (408, 429) or answer.status >= 500:
        return TierUnavailable(f"{wanted}: the store can't now ({said})")
    if answer.status in (401, 403):
        return TierRefused(f"{wanted}: no permission ({said})")
    if answer.status in (301, 302, 307, 308):
        where = f", in region {answer.region}" if answer.region else ""
        return TierRefused(f"{wanted}: the bucket lies elsewhere{where} ({said})")
    return TierRefused(f"{wanted}: the store refuses it ({said})")


def of_transport(error: OSError, origin: Origin) -> TierUnavailable:
    """The failure that an error of the connection means."""
    failure = TierUnavailable(f"{origin}: {_transport_in_words(error, origin)}")
    failure.__cause__ = error
    return failure


def of_nonsense(error: Exception, origin: Origin) -> TierUnavailable:
    """The failure that an answer which can't be understood means."""
    failure = TierUnavailable(f"{origin}: what it answers makes no sense: {error}")
    failure.__cause__ = error
    return failure


def of_credentials(error: Exception) -> TierUnavailable:
    """The failure to get, or to refresh, credentials."""
    failure = TierUnavailable(f"no credentials now: {error}")
    failure.__cause__ = error
    return failure


def is_full(answer: Answer) -> bool:
    """Whether the store has no room for an object, or none for one of its size."""
    return answer.status in (413, 507) or answer.code in _FULL


def _transport_in_words(error: OSError, origin: Origin) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); give its CA in AWS_CA_BUNDLE"
    if isinstance(error, ssl.SSLError):
        return f"TLS fails ({error.reason or error}); is it a port for https?"
    if isinstance(error, TimeoutError):
        return "no answer within the deadline"
    if isinstance(error, ConnectionRefusedError):
        return "refuses connections; does the store run there?"
    if isinstance(error, socket.gaierror):
        return f"the host {origin.host!r} is not known ({error.strerror})"
    if isinstance(error, Garbled | CutShort):
        return str(error)
    return error.strerror or type(error).__name__
