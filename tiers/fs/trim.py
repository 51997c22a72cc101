"""What `kvcascade gc` does for a directory as a whole, beside its namespaces."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.tiers.files import mapped
from kvcascade.tiers.stored import Removed

from .chunkfile import facts
from .fullness import TOTAL_NAME
from .layout import GONE, homes, server_time, sweeper_folder, writers_folder
from .lease import Lease
from .opening import access_of
from .survey import Candidate, Survey
from .writers import SILENT, Identity, dead, living, remove

if TYPE_CHECKING:
    from .settings import FsSettings

__all__ = ["sweep"]


def sweep(settings: "FsSettings", dry_run: bool) -> Removed:
    """Removes what killed writers of namespaces that are not there have left; and what lies above a soft capacity,
    where no engine sees to that.

    Raises:
        ConfigError: the directory can never be changed like this.
        TierError: it can't be changed now.
    """
    root = Path(settings.path)
    with mapped(root):
        writers = writers_folder(root)
        if not writers.is_dir():
            return Removed()
        now = time.time() if dry_run else server_time(writers)
        return _sweep_strangers(root, now, dry_run).plus(_trim(settings, root, now, dry_run))


def _sweep_strangers(root: Path, now: float, dry_run: bool) -> Removed:
    names = [home.path.name for home in homes(root)]
    nbytes = others = 0
    for identity, left in dead(root, now):
        if any(name.startswith(identity.namespace) for name in names):
            continue
        others += len(left)
        nbytes += sum(info.st_size for path in left[:-1] if (info := facts(str(path))))
        if not dry_run:
            with contextlib.suppress(OSError):
                remove(left)
    return Removed(0, nbytes, others)


def _trim(settings: "FsSettings", root: Path, now: float, dry_run: bool) -> Removed:
    """From above the high mark of a soft capacity down to the low one, the least recently used first."""
    if (
        settings.capacity is None
        or settings.exclusive
        or any(user.exclusive for user in living(root, now, SILENT))
    ):
        return Removed()
    lease = Lease(sweeper_folder(root), Identity.new("", exclusive=False), access_of(settings), time.monotonic)
    free = lease.is_free(now) if dry_run else lease.held(lambda: now)
    if not free:
        return Removed()
    removed = Removed()
    try:
        for candidate in _excess(settings, root, now):
            if not dry_run and not (lease.held(lambda: now) and _delete(candidate)):
                continue
            removed = removed.plus(Removed(1, candidate.nbytes))
        if removed.chunks and not dry_run:
            (sweeper_folder(root) / TOTAL_NAME).unlink(missing_ok=True)  # engines count anew
    finally:
        lease.release()
    return removed


def _excess(settings: "FsSettings", root: Path, now: float) -> Iterator[Candidate]:
    """What is to go; where it is more than one look remembers, that much."""
    survey = Survey(root, now, tidy=False)
    for _ in survey.steps():
        pass
    capacity = settings.capacity or 0
    if survey.total.bytes <= capacity * settings.watermarks.high:
        return
    excess = survey.total.bytes - capacity * settings.watermarks.low
    candidates = survey.candidates()
    while excess > 0 and (candidate := candidates.pop()) is not None:
        yield candidate
        excess -= candidate.nbytes


def _delete(candidate: Candidate) -> bool:
    try:
        info = facts(candidate.path)
        if info is None or info.st_mtime > candidate.used:
            return False
        Path(candidate.path).unlink()
    except OSError as error:
        if error.errno not in GONE:
            raise
        return False
    return True
