"""Where an answer may send a request: it carries the credentials' signature and token, and a payload."""

import re
from urllib.parse import quote, urlsplit

from .messages import Answer, Request
from .signing import Terms

__all__ = ["followed"]

_MOVED = (301, 302, 307, 308)
_AWS = re.compile(
    r"(?:[a-z0-9][a-z0-9.-]*\.)?s3(?:[.-](?:dualstack|fips|external-1|[a-z]{2,4}(?:-[a-z]+)+-[0-9]+))*"
    r"\.amazonaws\.com(?:\.cn)?"
)
"""S3's own hosts; others below amazonaws.com are anybody's."""


def followed(used: Terms, request: Request, answer: Answer, home: str) -> Terms | None:
    """The terms for this one request, where its answer sends it to the endpoint's own domain, under the same
    protection; `home` is the endpoint's host."""
    location = answer.fields.get("location", "").partition("?")[0]
    if answer.status not in _MOVED or not _is_ours(location, urlsplit(used.base).scheme, home):
        return None
    base = location.removesuffix(quote(request.name, safe="/~"))
    if not base.endswith("/") or (request.name and base == location) or base == used.base:
        return None
    return used._replace(base=base, region=answer.region or used.region)


def _is_ours(location: str, scheme: str, home: str) -> bool:
    try:
        parts = urlsplit(location)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    if parts.scheme != scheme or parts.username is not None or re.search(r"[^!-~]", location):
        return False
    return host == home or host.endswith("." + home) or bool(_AWS.fullmatch(home) and _AWS.fullmatch(host))
