"""The namespaces in a bucket, for `kvcascade ls` and its kin."""

import re
import time
from typing import TYPE_CHECKING

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError

from .bucket import Bucket
from .failures import NoBucket
from .layout import Home
from .messages import parsed
from .stored import S3Stored

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["clear", "stored"]


def stored(settings: "S3Settings") -> list[S3Stored]:
    """What the bucket holds of each namespace.

    Raises:
        ConfigError: botocore can't use what it finds.
        TierError: the bucket can't be read.
    """
    bucket = Bucket(settings)
    prefix = f"{settings.prefix}/" if settings.prefix else ""
    found: list[S3Stored] = []
    following = ""
    try:
        while True:
            page = bucket.page(prefix, time.monotonic() + settings.deadline, following, delimiter="/")
            for folder in page.folders:
                if re.fullmatch(r"[0-9a-f]{32}/", folder.removeprefix(prefix)):
                    found += _described(bucket, Home(folder), settings.deadline)
            following = page.following
            if not following:
                return found
    except NoBucket:
        return []
    finally:
        bucket.close()


def _described(bucket: Bucket, home: Home, patience: float) -> list[S3Stored]:
    said = parsed(bucket.read(home.description, time.monotonic() + patience))
    return [S3Stored(bucket, home, said, patience)] if said and isinstance(said.get("format"), int) else []


def clear(settings: "S3Settings", tenant: str | None) -> list[str]:
    """Removes the namespaces of `tenant`, or all of them where it is None.

    Raises:
        ConfigError: an engine is using one of them; nothing was removed.
        TierError: the bucket can't be changed.
    """
    doomed = [kept for kept in stored(settings) if tenant in (None, kept.tenant)]
    for kept in doomed:
        if users := kept.holding().used_by:
            raise ConfigError(f"{kept.place} is in use by {users}; end it first. Nothing was removed")
    return [_cleared(kept) for kept in doomed]


def _cleared(kept: S3Stored) -> str:
    cleared = kept.clear()
    left = "; foreign objects in it are left" if cleared.leaves else ""
    return f"removed {kept.place} ({format_size(cleared.bytes)}){left}"
