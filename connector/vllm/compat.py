"""All of vLLM that this package touches, and for which versions it is tested.

Nothing else here imports vLLM: a release that moves or renames something is met in this module.

Raises `ConfigError` when it is imported where vLLM is missing, or is of a version that can't work.
"""

import logging
from typing import Any

from kvcascade.errors import ConfigError

__all__ = [
    "TESTED",
    "CacheHitSource",
    "CanonicalKVCaches",
    "ConnectorStats",
    "CounterMetadata",
    "GPULoadStoreSpec",
    "GaugeMetadata",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TierFilter",
    "TierMatcher",
    "TransferResult",
    "current_config",
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
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats as ConnectorStats,
    )
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
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ConfigError(f"vLLM {version} can't be used: {error}; {_WHICH}") from error


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
