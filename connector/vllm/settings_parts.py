"""Which of vLLM's settings change what is computed, or how its KV is kept."""

import dataclasses
import json
import os
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

__all__ = ["digest", "settings_digest"]

_FIELDS = {
    "model_config": (
        "code_revision",
        "config_format",
        "model_class_overrides",
        "model_impl",
        "quantization_config",
        "trust_remote_code",
    ),
    "model_config.multimodal_config": (
        "language_model_only",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    ),
    "cache_config": (
        "kv_cache_dtype_skip_layers",
        "kv_sharing_fast_prefill",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_ssm_cache_dtype",
        "use_kda_recoverssm",
        "use_replayssm",
    ),
    "parallel_config": ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"),
    "load_config": ("ignore_patterns", "load_format", "model_loader_extra_config"),
    "lora_config": ("default_mm_loras", "enable_tower_connector_lora", "lora_dtype"),
    "speculative_config": ("kv_cache_dtype", "method", "quantization"),
    "speculative_config.draft_model_config": ("quantization_config",),
}
"""By the part of vLLM's configuration. One that a release does not have is as one that is not set."""

_LAYER_SPLIT = "VLLM_PP_LAYER_PARTITION"
"""Which layers each rank of a pipeline has."""


def settings_digest(config: Any) -> str:
    """The same for equal settings, in every process. `config`: vLLM's whole configuration."""
    values: dict[str, Any] = {_LAYER_SPLIT: os.environ.get(_LAYER_SPLIT)}
    for part, names in _FIELDS.items():
        owner = config
        for name in part.split("."):
            owner = getattr(owner, name, None)
        values |= {f"{part}.{name}": getattr(owner, name, None) for name in names}
    return digest({name: value for name, value in values.items() if value is not None})


def digest(value: object) -> str:
    """Stands for a value of lists, mappings, dataclasses and text. Of anything else its text is taken, which may
    differ from process to process: what is not known to be equal is not."""
    return sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(one), sort_keys=True) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)
