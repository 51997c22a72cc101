"""What vLLM calls in each of its processes at start, by the entry point group `vllm.general_plugins`."""

from . import compat_names as names

__all__ = ["CONNECTOR", "SPEC", "TIER", "register"]

SPEC = "KVCascade"
CONNECTOR = "KVCascadeConnector"
TIER = "KVCascade"


def register() -> None:
    """Makes our short names known to vLLM. What they stand for is imported when it is asked for, so an engine that
    does not use it is not touched."""
    names.register_spec(SPEC, "kvcascade.connector.vllm.spec", "KVCascadeSpec")
    names.register_connector(CONNECTOR, "kvcascade.connector.vllm.connector", "KVCascadeConnector")
    names.register_tier(TIER, "kvcascade.connector.vllm.tier", "KVCascadeTier")
