"""The line in the log that says how a stack does."""

import logging
from threading import Event

from kvcascade.manager.stats import StackStats, TierStats
from kvcascade.manager.summary import SummaryLog


def line(stats, caplog):
    """The first one that is logged."""
    asked = Event()

    def get_stats():
        asked.set()
        return stats

    with caplog.at_level(logging.INFO, "kvcascade"):
        log = SummaryLog(0.001, get_stats)
        assert asked.wait(30)
        log.close()
    return caplog.messages[0]


def test_each_tier_says_its_share_of_what_was_looked_up_and_what_it_has_taken(caplog):
    host = TierStats("host", "host", chunks=4, bytes=4096, capacity=8192, hits=30, written=50, refused=2)
    disk = TierStats("nvme", "disk", chunks=9, bytes=9216, hits=10, written=40, refused=1, shed=2, up=False)
    assert line(StackStats([host, disk], requests=7, lookups=80, hits=40), caplog) == (
        "7 requests, 80 chunks looked up, 50.0% delivered; "
        "host: 4 chunks, 4 KiB of 8 KiB, 30 hits (37.5%), 50 stored, 2 refused; "
        "nvme DOWN: 9 chunks, 9 KiB, 10 hits (12.5%), 40 stored, 3 refused"
    )


def test_nothing_was_looked_up_yet(caplog):
    host = TierStats("host", "host")
    assert "0 chunks looked up, 0.0% delivered; host: 0 chunks, 0 B, 0 hits (0.0%)" in line(
        StackStats([host]), caplog
    )
