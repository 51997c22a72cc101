"""All of vLLM's tiering that this package touches; `compat` has the rest. Apart, so that a release without it, or
with another one, hinders the tier only.

Raises `ConfigError` when it is imported where vLLM has no such thing.
"""

import platform
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcascade.errors import ConfigError

from . import compat

__all__ = ["JobResult", "SecondaryTierManager", "TransferJob", "attention_backend", "device", "engine_config"]

try:
    from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise ConfigError(
        f"vLLM {compat.version} has no tiering that can be used: {error}; this release of KVCascade is tested "
        f"with vLLM {', '.join(compat.TESTED)}"
    ) from error


def engine_config() -> Any:
    """vLLM's whole configuration, in the process of its scheduler; None where it can't be found.

    A tier is not given it, but is made while a connector is, and that was: it is looked for among the callers.
    """
    found = get_current_vllm_config_or_none()
    return compat.given_to_callers("vllm_config", VllmConfig) if found is None else found


def attention_backend(config: Any) -> str:
    """The name of the attention backend that the workers of this engine choose."""
    model = config.model_config
    with set_current_vllm_config(config):
        backend = get_attn_backend(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=config.cache_config.cache_dtype,
            use_mla=model.use_mla,
        )
    return str(backend.get_name())


def device() -> str:
    """What kind of device the KV lies on: which kernels are chosen, and so how it lies there, depends on it."""
    name = f"{current_platform.get_device_name()} {platform.machine()}"
    if not current_platform.is_cpu():
        return name
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{name} {sha256(flags.encode()).hexdigest()[:16]}"
