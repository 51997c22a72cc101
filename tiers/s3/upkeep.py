"""What an engine does for the objects that stand for more than a chunk, so that they outlive the chunks.

A lifecycle rule of the bucket removes what is old, and so might remove a mark that says that an epoch is void,
while chunks that were stored there later are still there. So engines that run write such objects anew, long before
any rule (whose unit is a day) could find them old.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .engines import BEAT_EVERY

if TYPE_CHECKING:
    from .opening import Opened

__all__ = ["Upkeep"]

RENEW_AFTER = 6 * 3600.0


class Upkeep:
    """Of one engine. Used by one thread at a time."""

    def __init__(self, opened: "Opened", clock: Callable[[], float] = time.monotonic) -> None:
        self._opened = opened
        self._clock = clock
        self._due = clock() + BEAT_EVERY

    def run(self, end: float) -> None:
        """Does what is due now.

        Raises:
            TierError: the medium failed; it is tried again when it is due the next time.
        """
        if self._clock() < self._due or not self._opened.writes:
            return
        self._due = self._clock() + BEAT_EVERY
        opened = self._opened
        opened.presence.beat(opened.stamp, end)
        old = time.time() - RENEW_AFTER
        for name in (*opened.epochs.old(opened.epoch, old, end), *self._description(old, end)):
            body = opened.bucket.read(name, end)
            if body is not None:
                opened.bucket.write(name, body, end)

    def _description(self, old: float, end: float) -> list[str]:
        page = self._opened.bucket.page(self._opened.home.description, end)
        return [found.name for found in page.objects if found.modified < old]
