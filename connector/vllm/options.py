"""What a user gives in `kv_connector_extra_config`."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcascade.configs import StackSettings, load_stack, parse_stack
from kvcascade.configs.registry import nearest
from kvcascade.errors import ConfigError

__all__ = ["replica_of", "stack_of"]

logger = logging.getLogger("kvcascade")

_VLLM_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
    }
)
_WHERE = "kv_connector_extra_config"
_EXAMPLE = '"stack": "/etc/kvcascade/stack.yaml"'


def stack_of(extra: Mapping[str, Any]) -> StackSettings:
    """The stack that `stack` gives: the path of a YAML file, the name of a stack that ships, or the stack itself.

    Raises:
        ConfigError: there is none, or it can't be used, or another key asks for what is not served.
    """
    if "stack" not in extra:
        near = nearest("stack", [key for key in extra if key not in _VLLM_KEYS])
        raise ConfigError(f"{_WHERE}.stack: required, but missing{near}; for example {_EXAMPLE}")
    if extra.get("canonical_layout"):
        raise ConfigError(f"{_WHERE}.canonical_layout: not served; leave it out")
    for key in extra.keys() - _VLLM_KEYS - {"stack", "canonical_layout"}:
        near = nearest(key, [*_VLLM_KEYS, "stack"])
        logger.warning("%s.%s: not a key that KVCascade knows%s; it is left to vLLM", _WHERE, key, near)
    stack = extra["stack"]
    if isinstance(stack, Mapping):
        return parse_stack(dict(stack), f"{_WHERE}.stack")
    if isinstance(stack, str | Path) and str(stack):
        return load_stack(stack)
    raise ConfigError(
        f"{_WHERE}.stack: {stack!r}: expected the path of a YAML file, a shipped stack's name or a stack"
    )


def replica_of(parallel: Any) -> int:
    """Which replica this engine is, of those that vLLM starts together; 0 for an engine by itself. Replicas of a
    dense model are each told that they are the only one, but keep their index. `parallel`: vLLM's
    `OffloadingParallelConfig`."""
    return int(parallel.data_parallel_index)
