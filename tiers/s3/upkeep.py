"""What an engine does for the objects that stand for more than a chunk, so that they outlive the chunks.

A lifecycle rule of the bucket removes what is old, and so might remove a mark that says that an epoch is void,
while chunks that were stored there later are still there. So engines that run write such objects anew, long before
any rule (whose unit is a day) could find them old.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcascade.errors import TierRefused

from .engines import BEAT_EVERY
from .epochs import Epoch

if TYPE_CHECKING:
    from .opening import Opened

__all__ = ["Upkeep"]

RENEW_AFTER = 6 * 3600.0


class Upkeep:
    """Of one engine. Used by one thread at a time."""

    def __init__(
        self, opened: "Opened", arrived: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`arrived`: it has given a sign of life just now."""
        self._opened = opened
        self._clock = clock
        self._due = clock() + (BEAT_EVERY if arrived else 0)

    def run(self, end: float) -> None:
        """Does what is due now.

        Raises:
            TierError: the medium failed; it is tried again when it is due the next time.
        """
        opened = self._opened
        if self._clock() < self._due or opened.epoch is None:
            return
        self._due = self._clock() + BEAT_EVERY
        if opened.writes:
            opened.arrive(end)
            self._renew(opened.epoch, end)
        else:
            with suppress(TierRefused):  # who only reads needs no permission to write
                self._renew(opened.epoch, end)

    def _renew(self, epoch: Epoch, end: float) -> None:
        bucket, old = self._opened.bucket, time.time() - RENEW_AFTER
        for name in (*self._opened.epochs.old(epoch, old, end), *self._description(old, end)):
            body = bucket.read(name, end)
            if body is not None:
                bucket.write(name, body, end)

    def _description(self, old: float, end: float) -> list[str]:
        page = self._opened.bucket.page(self._opened.home.description, end)
        return [found.name for found in page.objects if found.modified < old]
