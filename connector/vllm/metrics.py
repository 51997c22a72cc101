"""Our counters in vLLM's metrics: the numbers of each tier, with the tier's name as label."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvcascade.manager.stats import StackStats, TierStats

from . import compat

__all__ = ["Counters", "definitions"]


class _Metric(NamedTuple):
    text: str
    value: Callable[[TierStats], float]


_COUNTERS = {
    "vllm:kvcascade_hit_chunks": _Metric(
        "Chunks that requests have loaded, by the tier they were found in.", lambda t: t.hits
    ),
    "vllm:kvcascade_missed_chunks": _Metric(
        "Chunks that requests asked for and that this tier did not have.", lambda t: t.misses.total()
    ),
    "vllm:kvcascade_read_bytes": _Metric("Bytes read from the tier.", lambda t: t.read_bytes),
    "vllm:kvcascade_written_bytes": _Metric("Bytes written to the tier.", lambda t: t.written_bytes),
    "vllm:kvcascade_evicted_chunks": _Metric("Chunks that have gone to make room.", lambda t: t.evictions),
    "vllm:kvcascade_failed_chunks": _Metric(
        "Chunks whose read or write has failed.", lambda t: t.failed_reads + t.failed_writes
    ),
    "vllm:kvcascade_corrupt_chunks": _Metric(
        "Chunks that were not what had been stored, and were not served.", lambda t: t.corrupt
    ),
    "vllm:kvcascade_refused_chunks": _Metric("Chunks that the tier had no room for.", lambda t: t.refused),
    "vllm:kvcascade_shed_chunks": _Metric("Chunks not written, since too many were waiting.", lambda t: t.shed),
    "vllm:kvcascade_late_jobs": _Metric("Transfers that had not ended by their deadline.", lambda t: t.timed_out),
}
_GAUGES = {
    "vllm:kvcascade_chunks": _Metric("Chunks that the tier holds.", lambda t: t.chunks),
    "vllm:kvcascade_bytes": _Metric("Bytes that those occupy.", lambda t: t.bytes),
    "vllm:kvcascade_queued_jobs": _Metric("Transfers that wait or run.", lambda t: t.queue),
    "vllm:kvcascade_up": _Metric("1 where the tier is in use, 0 where it is down.", lambda t: int(t.up)),
}
_LOST = "vllm:kvcascade_lost_chunks"
_FAILED_STORES = "vllm:kvcascade_failed_store_chunks"
_FAILED_LOADS = "vllm:kvcascade_failed_load_chunks"


def definitions() -> dict[str, Any]:
    """What vLLM has to know of our metrics before there are any."""
    label = ("tier",)
    return {
        **{name: compat.CounterMetadata(metric.text, label) for name, metric in _COUNTERS.items()},
        **{name: compat.GaugeMetadata(metric.text, label) for name, metric in _GAUGES.items()},
        _LOST: compat.CounterMetadata("Chunks of finished requests that the host memory had no room for."),
        _FAILED_STORES: compat.CounterMetadata("Chunks that could not be copied from the device."),
        _FAILED_LOADS: compat.CounterMetadata("Chunks that could not be copied to it, and were computed instead."),
    }


class Counters:
    """Gives vLLM what has been added since it asked last: vLLM sums counters up itself."""

    def __init__(self) -> None:
        self.lost = 0
        self.failed_stores = 0
        self.failed_loads = 0
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, stats: StackStats) -> Any:
        """What is new, as vLLM's stats; None where nothing is."""
        told = compat.ConnectorStats()
        for name, labels, value in self._values(stats, _COUNTERS):
            more = value - self._told.get((name, labels), 0)
            if more > 0:
                told.increase_counter(name, more, labels)
                self._told[name, labels] = value
        for name, labels, value in self._values(stats, _GAUGES):
            if self._told.get((name, labels)) != value:
                told.set_gauge(name, value, labels)
                self._told[name, labels] = value
        return None if told.is_empty() else told

    def _values(
        self, stats: StackStats, metrics: Mapping[str, _Metric]
    ) -> "list[tuple[str, tuple[str, ...], float]]":
        values: list[tuple[str, tuple[str, ...], float]] = [
            (name, (tier.name,), metric.value(tier)) for tier in stats.tiers for name, metric in metrics.items()
        ]
        if metrics is _COUNTERS:
            own = {_LOST: self.lost, _FAILED_STORES: self.failed_stores, _FAILED_LOADS: self.failed_loads}
            values += [(name, (), value) for name, value in own.items()]
        return values
