"""All of vLLM that this package touches, and for which versions it is tested.

Nothing else here imports vLLM, but the two modules beside it, for the names that only some use: a release that
moves or renames something is met in these.

Raises `ConfigError` when it is imported where vLLM is missing, or is of a version that can't work.
"""

import logging
import sys
from enum import Enum
from typing import Any

from kvcascade.errors import ConfigError

__all__ = [
    "TESTED",
    "CacheHitSource",
    "CanonicalKVCaches",
    "ConnectorMetadata",
    "ConnectorStats",
    "CounterMetadata",
    "EventsTracker",
    "FullAttentionSpec",
    "GPULoadStoreSpec",
    "GaugeMetadata",
    "KVConnectorBase",
    "KVConnectorRole",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "MLAAttentionSpec",
    "Medium",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "PromMetrics",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SlidingWindowSpec",
    "SupportsHMA",
    "TierFilter",
    "TierMatcher",
    "TransferResult",
    "TransferResults",
    "WorkerMetadata",
    "cache_config",
    "canonical_caches",
    "current_config",
    "given_to_callers",
    "layer_specs",
    "offloading_config",
    "request_context",
    "version",
    "warn_if_untested",
]

logger = logging.getLogger("kvcascade")

TESTED = ("0.32",)
"""Versions of vLLM that all end-to-end tests pass with, by their first two numbers."""

_WHICH = f"this release of KVCascade is tested with vLLM {', '.join(TESTED)}"

try:
    from vllm import __version__ as version
except ImportError as error:
    raise ConfigError(f"vLLM can't be imported here: {error}; {_WHICH}") from error

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1 as KVConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata as ConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults as TransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata as WorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config as offloading_config,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
        OffloadingEventsTracker as EventsTracker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats as ConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics as PromMetrics
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        _create_req_context as request_context,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_interface import iter_layer_specs as layer_specs
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        OffloadPolicy,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TierFilter,
        TierMatcher,
        TransferResult,
    )
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata as CounterMetadata
    from vllm.v1.kv_offload.base import OffloadingGaugeMetadata as GaugeMetadata
    from vllm.v1.kv_offload.config import OffloadingConfig
except ImportError as error:
    raise ConfigError(f"vLLM {version} can't be used: {error}; {_WHICH}") from error

if not hasattr(ReqContext, "get_offload_key_position"):  # before 0.31
    raise ConfigError(
        f"vLLM {version} can't be used: it does not say in which order a prompt's keys are; {_WHICH}"
    )

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32, which does not ask where hits come from

    class CacheHitSource(Enum):  # type: ignore[no-redef]
        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


def warn_if_untested() -> None:
    """One line in the log where this version of vLLM has not been tested."""
    if ".".join(version.split(".")[:2]) not in TESTED:
        logger.warning("vLLM %s has not been tested; %s", version, _WHICH)


def current_config() -> Any:
    """vLLM's whole configuration, in a worker that is being set up.

    Raises:
        ConfigError: this version does not give it.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        raise ConfigError(f"vLLM {version} does not tell a worker its configuration; {_WHICH}")
    return config


def cache_config() -> Any:
    """vLLM's `KVCacheConfig`, while a connector is being made; None where it can't be found."""
    return given_to_callers("kv_cache_config", KVCacheConfig)


def given_to_callers(name: str, kind: type) -> Any:
    """What a caller has under this name; None where none has. What vLLM makes for a connector is not given all
    that the connector itself was."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        given = frame.f_locals.get(name)
        if isinstance(given, kind):
            return given
    return None


class _Canonical(OffloadingConnectorWorker):
    """vLLM's worker, asked only how it sees the tensors."""

    def _init_worker(self, kv_caches: Any) -> None:
        self.caches = kv_caches


def canonical_caches(spec: Any, config: Any, cache_config: Any, tensors: Any) -> Any:
    """The KV tensors of a worker as vLLM's own OffloadingConnector sees them: raw, padded, packed or aliased ones
    as `CanonicalKVCaches`."""
    worker = _Canonical(spec, config, cache_config)
    worker.register_kv_caches(tensors)
    return worker.caches
