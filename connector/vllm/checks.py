"""Settings of vLLM with which a stack is of no use, or can't work."""

from typing import Any

from kvcascade.configs import StackSettings
from kvcascade.errors import ConfigError

from .identity import check_hashes

__all__ = ["check_engine"]

_END_WITH_PROCESS = frozenset({"memory", "noop"})


def check_engine(engine: Any, stack: StackSettings) -> None:
    """
    Args:
        engine: vLLM's whole configuration.

    Raises:
        ConfigError: the reason why the stack can't be used with it.
    """
    if not engine.cache_config.enable_prefix_caching:
        raise ConfigError("prefix caching is off, so no chunk has a key; start vLLM with --enable-prefix-caching")
    nodes = getattr(engine.parallel_config, "nnodes_within_dp", 1)
    if nodes > 1:
        raise ConfigError(
            f"the engine spans {nodes} nodes, and its host pool can't; use one node for each data-parallel replica"
        )
    outlive = [tier.name for tier in stack.secondary if tier.type not in _END_WITH_PROCESS]
    check_hashes(engine.cache_config.prefix_caching_hash_algo, outlive)
