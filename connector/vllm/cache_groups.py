"""vLLM's KV cache groups as ours: those that the connector serves."""

from typing import Any

from kvcascade.connector.groups import GroupSpec
from kvcascade.errors import ConfigError

from . import compat

__all__ = ["check_chunks", "check_served", "groups_of"]

_FULL = (compat.FullAttentionSpec, compat.MLAAttentionSpec)


def check_served(cache_config: Any) -> None:
    """
    Raises:
        ConfigError: the model has a cache group that is neither full attention nor a sliding window; the other way
            in may serve it.
    """
    for number, group in enumerate(cache_config.kv_cache_groups):
        kinds = {type(spec) for spec in compat.layer_specs(group.kv_cache_spec)}
        transferred = number in cache_config.prefix_cacheable_group_ids
        if not kinds <= {*_FULL, compat.SlidingWindowSpec} or not transferred or group.host_resident:
            raise ConfigError(
                f"KVCascadeConnector serves full attention and sliding windows; cache group {number} of this "
                f"model ({_names(kinds)}: {', '.join(group.layer_names[:2])} ...) is neither. Use "
                f'"kv_connector": "OffloadingConnector" with "spec_name": "KVCascade" instead'
            )


def check_chunks(offloading: Any) -> None:
    """Where vLLM's own scheduler decides what is stored: it stores a chunk whose last block is there, and leaves
    out the blocks that a window has passed. `offloading`: vLLM's `OffloadingConfig`.

    Raises:
        ConfigError: a cache group may lose blocks, and its chunks have more than one.
    """
    blocks, cache_config = offloading.cache.blocks_per_chunk, compat.cache_config()
    if blocks == 1 or cache_config is None:
        return
    for number in (group.group_id for group in offloading.groups):
        kinds = {type(spec) for spec in compat.layer_specs(cache_config.kv_cache_groups[number].kv_cache_spec)}
        if not all(issubclass(kind, _FULL) for kind in kinds):
            raise ConfigError(
                f"blocks_per_chunk: {blocks}; vLLM's OffloadingConnector would store chunks of cache group "
                f"{number} ({_names(kinds)}) without the blocks that the model has passed. Use 1, "
                f'or for sliding windows "kv_connector": "KVCascadeConnector"'
            )


def groups_of(cache_config: Any, offloading: Any) -> list[GroupSpec]:
    """`cache_config`: vLLM's `KVCacheConfig`, checked; `offloading`: its `OffloadingConfig`."""
    return [
        GroupSpec(
            tokens_per_block=group.tokens_per_block,
            blocks_per_chunk=offloading.cache.blocks_per_chunk,
            window=_window(cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
            draft=cache_config.kv_cache_groups[group.group_id].is_eagle_group,
            index=group.group_id,
        )
        for group in offloading.groups
    ]


def _window(spec: Any) -> int | None:
    """The widest window of the group's layers; None where a layer attends to all."""
    layers = list(compat.layer_specs(spec))
    if any(type(layer) in _FULL for layer in layers):
        return None
    return int(max(2, *(layer.sliding_window + layer.extra_retained_tokens for layer in layers)))


def _names(kinds: set[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))
