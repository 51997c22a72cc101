"""What vLLM calls in each of its processes at start, by the entry point group `vllm.general_plugins`."""

import logging
from collections.abc import Callable

__all__ = ["register"]

logger = logging.getLogger("kvcascade")

SPEC = "KVCascade"
CONNECTOR = "KVCascadeConnector"
TIER = "KVCascade"


def register() -> None:
    """Makes our short names known to vLLM. What they stand for is imported when it is asked for, so an engine that
    does not use it is not touched."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError as error:
        logger.debug("this vLLM has no offloading specs: %s", error)
        return
    _once(SPEC, OffloadingSpecFactory.register_spec, "kvcascade.connector.vllm.spec", "KVCascadeSpec")
    _once(CONNECTOR, KVConnectorFactory.register_connector, "kvcascade.connector.vllm.connector", CONNECTOR)
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        logger.debug("this vLLM has no tiers below its host memory: %s", error)
        return
    _once(TIER, SecondaryTierFactory.register_tier, "kvcascade.connector.vllm.tier", "KVCascadeTier")


def _once(name: str, register: Callable[[str, str, str], None], module: str, cls: str) -> None:
    try:
        register(name, module, cls)
    except ValueError:
        logger.debug("%s is registered already", name)
