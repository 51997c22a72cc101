"""What vLLM calls in each of its processes at start, by the entry point group `vllm.general_plugins`."""

import logging

__all__ = ["register"]

logger = logging.getLogger("kvcascade")

SPEC = "KVCascade"


def register() -> None:
    """Makes our short names known to vLLM. What they stand for is imported when it is asked for, so an engine that
    does not use it is not touched."""
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError as error:
        logger.debug("this vLLM has no offloading specs: %s", error)
        return
    try:
        OffloadingSpecFactory.register_spec(SPEC, "kvcascade.connector.vllm.spec", "KVCascadeSpec")
    except ValueError:
        logger.debug("%s is registered already", SPEC)
