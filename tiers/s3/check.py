"""What `kvcascade check` finds out about a bucket."""

import secrets
import time
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from kvcascade.configs.units import format_duration
from kvcascade.errors import ConfigError, TierError
from kvcascade.tiers.base import Probe

from .bucket import Bucket
from .failures import NoBucket
from .messages import document
from .opening import acting

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["probe"]


def probe(settings: "S3Settings") -> Probe:
    """Looks whether the tier would open and work, without changing anything in a store that checks digests."""
    found = Probe()
    try:
        bucket = Bucket(settings)
        found.facts.append(("bucket", bucket.place))
        try:
            with acting(bucket):
                _look(settings, bucket, found)
        finally:
            bucket.close()
    except (ConfigError, TierError) as error:
        found.problems.append(str(error))
    return found


def _look(settings: "S3Settings", bucket: Bucket, found: Probe) -> None:
    end = time.monotonic() + settings.deadline
    prefix = f"{settings.prefix}/" if settings.prefix else ""
    try:
        page = bucket.page(prefix, end, most=1)
    except NoBucket as error:
        if not settings.create_bucket:
            raise ConfigError(f"{error}; make it, or let `create_bucket: true` do so") from error
        found.facts.append(("state", "will be made, if these credentials may"))
        return
    found.facts.append(("state", "in use" if page.objects else f"nothing yet below {prefix or 'the bucket'}"))
    bucket.read(f"{prefix}check-{secrets.token_hex(8)}", end, 1)
    if settings.write != "off":
        _try_writing(bucket, f"{prefix}check-{secrets.token_hex(8)}", end)
    found.facts.append(("permissions", "list, read" if settings.write == "off" else "list, read, write"))
    found.facts.append(("lifecycle rule", _rules(bucket, prefix, end)))
    if settings.ttl is not None:
        found.facts.append(
            ("ttl", f"{format_duration(settings.ttl)}: older chunks are misses, and are left there")
        )


def _try_writing(bucket: Bucket, name: str, end: float) -> None:
    """A store that checks digests refuses what has a wrong one, after it has looked who may write; what another
    one has taken is removed again."""
    if bucket.takes_what_is_damaged(name, b"kvcascade check", end):
        for failure in bucket.delete([name], end):
            if failure is not None:
                raise failure


def _rules(bucket: Bucket, prefix: str, end: float) -> str:
    """What the bucket's lifecycle removes of ours, in words."""
    try:
        rules = document(bucket.lifecycle(end) or b"")
    except TierError as error:
        return f"not known: {error}"
    days = [_days(rule) for rule in rules.iterfind("{*}Rule") if _concerns(rule, prefix)]
    expiring = [int(day) for day in days if day.isdecimal()]
    return f"removes chunks after {min(expiring)} days" if expiring else "none: nothing is ever removed"


def _concerns(rule: Element, prefix: str) -> bool:
    if (rule.findtext("{*}Status") or "") != "Enabled":
        return False
    scope = rule.find("{*}Filter")
    within = rule if scope is None else scope
    if within.find("{*}Tag") is not None:
        return False
    both = within.find("{*}And")
    return prefix.startswith((within if both is None else both).findtext("{*}Prefix") or "")


def _days(rule: Element) -> str:
    return rule.findtext("{*}Expiration/{*}Days") or ""
