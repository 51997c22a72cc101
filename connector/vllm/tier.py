"""The third way in: one secondary tier under vLLM's TieringOffloadingSpec, and behind it the tiers of a stack.

--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "KVCascade", "stack": "stack.yaml"}]}}'
"""

import logging
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from itertools import count
from typing import Any

from kvcascade.configs import StackSettings
from kvcascade.configs.registry import nearest
from kvcascade.errors import ConfigError, KVCascadeError
from kvcascade.manager.lower import LowerTiers
from kvcascade.stack import build_lower
from kvcascade.types import Buffer, Key, LookupResult, RequestContext

from . import compat
from . import compat_tier as tiering
from .cache_groups import check_chunks
from .checks import check_engine
from .logs import log_reset, log_start, share_handlers
from .media import allowed, in_vllm, place_of
from .metrics import Counters, definitions
from .options import replica_of, stack_of
from .tier_identity import namespace_of

__all__ = ["KVCascadeTier"]

logger = logging.getLogger("kvcascade")

_RESULTS = {
    LookupResult.HIT: compat.LookupResult.HIT,
    LookupResult.MISS: compat.LookupResult.MISS,
    LookupResult.RETRY: compat.LookupResult.RETRY,
}


class KVCascadeTier(tiering.SecondaryTierManager):
    """vLLM keeps the host memory and decides what is moved when; we move it, straight between that memory and the
    tiers of the stack. The stack's own first tier is left out.

    vLLM knows one tier, hence one answer to where a chunk comes from: what all tiers of the stack have in common.

    Raises:
        ConfigError: the stack can't be used, or can't be used here.
    """

    medium = compat.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        stack: Any = None,
        locality: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        share_handlers()
        compat.warn_if_untested()
        check_chunks(offloading_spec.config)
        for key in rest:
            logger.warning("secondary_tiers: %s: not a key that KVCascade knows%s", key, nearest(key, ["stack"]))
        settings = stack_of({} if stack is None else {"stack": stack})
        places = [place_of(tier) for tier in settings.secondary]
        self._places = {place.name: place for place in places}
        common = _only({place.locality for place in places}, None)
        self.locality = compat.Locality(locality) if locality else common
        unspecified = compat.CacheHitSource.EXTERNAL_UNSPECIFIED
        self.cache_hit_source = _only({place.source for place in places}, unspecified)
        self._counters = Counters()
        self._fills = count()
        self._tell_events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._pool = _Rows(primary_kv_view)
        with ExitStack() as undo:
            undo.callback(self._pool.release)
            self._tiers = _open(settings, offloading_spec.config, self._pool, self._tell_events)
            undo.pop_all()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions()

    def on_new_request(self, req_context: Any) -> Any:
        names = allowed(self._places.values(), req_context.load_tier_filter)
        self._tiers.on_new_request(RequestContext(req_context.req_id, req_context.kv_transfer_params, names))
        return compat.RequestOffloadingContext(policy=compat.OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        self._tiers.on_request_finished(req_context)

    def lookup(self, key: Key, req_context: Any) -> Any:
        return _RESULTS[self._tiers.lookup(key, req_context)]

    def touch(self, keys: Collection[Key], req_context: Any) -> None:
        self._tiers.touch(list(keys), req_context)

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(self._tiers.store, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(self._tiers.load, job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        for carried in self._tiers.take_ended():
            yield tiering.JobResult(
                job_id=carried.order,
                success=carried.whole,
                successful_keys=None if carried.whole or not carried.good else carried.good,
                transfer_time=carried.seconds,
                transfer_bytes=carried.chunks * self.block_size_bytes or None,
            )

    def serve_external_requests(self, parent: Any) -> None:
        """The one moment in which a tier may ask for chunks of vLLM's host memory by itself: for those that were
        promoted from a tier further down, and for stores that did not happen before."""
        wanted = self._tiers.take_wanted()
        if not wanted:
            return
        context = compat.ReqContext(f"kvcascade-fill-{next(self._fills)}")
        parent.on_new_request(context)
        here = [key for key in wanted if parent.lookup(key, context) is compat.LookupResult.HIT]
        if here:
            job = parent.create_store_job(here, context)
            self._submit(lambda order, slots, _: self._tiers.fill(order, slots, wanted), job)
        parent.on_request_finished(context)

    def on_schedule_end(self, context: Any) -> None:
        self._tiers.on_schedule_end()

    def has_pending_work(self) -> bool:
        return self._tiers.has_wanted

    def drain_jobs(self) -> None:
        """vLLM calls it where it clears its host memory, and tells a tier of that in no other way: the stack's
        `reset_scope` says whether the tiers are cleared, too."""
        log_reset(self._tiers.reset())

    def take_events(self) -> Iterable[Any]:
        if self._tell_events:
            yield from in_vllm(self._tiers.take_events(), self._places)

    def get_stats(self) -> Any:
        return self._counters.take(self._tiers.get_stats())

    def shutdown(self) -> None:
        """
        Raises:
            KVCascadeError: transfers still use the host memory: vLLM keeps it then.
        """
        self._tiers.close()
        self._pool.release()

    def _submit(self, begin: Any, job: Any) -> None:
        """Begins an order. vLLM's engine would end with an exception; one of ours ends the job."""
        try:
            slots = dict(zip(job.keys, map(int, job.chunk_ids), strict=True))
            head_first = sorted(slots, key=lambda key: job.req_context.get_offload_key_position(key) or 0)
            begin(job.job_id, {key: slots[key] for key in head_first}, job.req_context)
        except (KVCascadeError, ValueError):
            logger.exception("a transfer of %d chunks could not begin", len(job.keys))
            self._tiers.give_up(job.job_id)


class _Rows:
    """vLLM's host memory as slots, without copies."""

    def __init__(self, view: memoryview) -> None:
        if view.ndim != 2 or not view.c_contiguous:
            raise ConfigError(
                f"host memory of shape {view.shape}; rows of chunks, one after the other, are served"
            )
        self.number = len(view)
        self.nbytes = view.nbytes // self.number
        self._bytes = view.cast("B")

    def slot(self, index: int) -> Buffer:
        return self._bytes[index * self.nbytes : (index + 1) * self.nbytes]

    def release(self) -> None:
        self._bytes.release()


def _open(settings: StackSettings, offloading: Any, pool: _Rows, events: bool) -> LowerTiers:
    engine = tiering.engine_config()
    if engine is not None:
        check_engine(engine, settings)
    namespace = namespace_of(engine, offloading, pool.nbytes)
    place = replica_of(offloading.parallel)
    tiers = build_lower(settings, namespace, pool.nbytes, pool.slot, pool.number, place=place, events=events)
    where = f"below {pool.number} chunks of host memory of vLLM"
    log_start(where, tiers.get_stats(), pool.nbytes, offloading, namespace)
    return tiers


def _only(found: set[Any], otherwise: Any) -> Any:
    """What all have in common."""
    return found.pop() if len(found) == 1 else otherwise
