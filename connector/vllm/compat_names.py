"""vLLM's registries of short names. Apart from `compat`, since this is called in each of vLLM's processes, also
where KVCascade is not used: little is imported, and nothing is raised."""

import logging
from collections.abc import Callable

__all__ = ["register_connector", "register_spec", "register_tier"]

logger = logging.getLogger("kvcascade")


def register_connector(name: str, module: str, cls: str) -> None:
    """From now on `"kv_connector": name` stands for this class, which is imported when it is asked for."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logger.debug("this vLLM has no connectors: %s", error)
        return
    _once(name, KVConnectorFactory.register_connector, module, cls)


def register_spec(name: str, module: str, cls: str) -> None:
    """The same for `"spec_name": name` under vLLM's OffloadingConnector."""
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError as error:
        logger.debug("this vLLM has no offloading specs: %s", error)
        return
    _once(name, OffloadingSpecFactory.register_spec, module, cls)


def register_tier(name: str, module: str, cls: str) -> None:
    """The same for `"type": name` among the `secondary_tiers` of vLLM's TieringOffloadingSpec."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        logger.debug("this vLLM has no tiers below its host memory: %s", error)
        return
    _once(name, SecondaryTierFactory.register_tier, module, cls)


def _once(name: str, register: Callable[[str, str, str], None], module: str, cls: str) -> None:
    try:
        register(name, module, cls)
    except ValueError:
        logger.debug("%s is registered already", name)
