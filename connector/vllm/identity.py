"""The namespace: everything that decides the bytes of a chunk. What can't be known to be safe to share is kept
apart, by a part that no other process has, or refused."""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcascade.errors import ConfigError
from kvcascade.types import Namespace

from .fingerprint import Unknown, model_parts
from .settings_parts import digest, settings_digest

__all__ = ["ADDED_AT_START", "check_hashes", "engine_parts", "namespace_of", "parts_of_model", "rank_parts"]

logger = logging.getLogger("kvcascade")

_CHUNK_LAYOUT = 1
"""How a chunk lies in a slot: tensor by tensor, block by block. Another number where that changes."""

_SAME_EVERYWHERE = ("sha256", "sha256_cbor")
"""Hash algorithms whose hashes are the same in every process."""


ADDED_AT_START = {
    "engine": "vLLM's version",
    "dtype, kv_dtype, quantization": "how the engine computes and keeps KV",
    "hash": "the algorithm of the block hashes; LoRA adapters and cache salts are in the hashes themselves",
    "parallel, ranks": "how many ranks there are, and which layers and heads each has",
    "block, chunk": "tokens of a block, blocks of a chunk",
    "backend, layout, layers": "how the KV of each layer lies in memory",
    "settings": "of quantisation, multimodal input, Mamba, LoRA, loading and context parallelism, as one hash",
    "overrides, sliding_window, draft_* ...": "only where they are set and change what is computed",
}
"""The other parts of a namespace, which only an engine that starts can tell."""


def parts_of_model(path: str, revision: str | None = None, download_dir: str | None = None) -> dict[str, str]:
    """The parts that a model gives: a folder, a file, or a name of the Hugging Face hub that has been downloaded.

    Raises:
        Unknown: it can't be known which weights these are.
    """
    if Path(path).expanduser().exists():
        return model_parts(Path(path))
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", cache_dir=download_dir, revision=revision)
    except (ImportError, ValueError) as error:
        raise Unknown(f"{path}: {error}") from error
    if not isinstance(found, str):
        raise Unknown(f"{path}: no folder, and not in the local cache of the Hugging Face hub")
    return model_parts(Path(found).parent)


def engine_parts(config: Any, version: str) -> dict[str, str]:
    """The parts that are the same for all ranks. `config`: vLLM's whole configuration."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    apart: list[str] = []
    parts = {
        "engine": f"vllm-{version}",
        "dtype": _name(model.dtype),
        "kv_dtype": _name(cache.cache_dtype),
        "quantization": str(model.quantization),
        "hash": cache.prefix_caching_hash_algo,
        "parallel": " ".join(
            f"{short}={getattr(parallel, long, 1)}"
            for short, long in {
                "tp": "tensor_parallel_size",
                "pp": "pipeline_parallel_size",
                "pcp": "prefill_context_parallel_size",
                "dcp": "decode_context_parallel_size",
            }.items()
        ),
        **_weights("", config, model, apart),
        **_settings(config, model),
        "settings": settings_digest(config),
    }
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None:
        parts |= _weights("draft_", config, draft, apart)
    for reason in apart:
        logger.warning("what is stored is not shared with other engines or later starts: %s", reason)
    return parts | ({"apart": secrets.token_hex(16)} if apart else {})


def _weights(prefix: str, config: Any, model: Any, apart: list[str]) -> dict[str, str]:
    if config.load_config.load_format == "dummy":
        apart.append("its weights are random (load_format=dummy)")
        return {}
    path = model.model_weights or model.model
    try:
        parts = parts_of_model(path, model.revision, config.load_config.download_dir)
        if model.hf_config_path:
            about = parts_of_model(model.hf_config_path)
            parts["config_path"] = digest({name: value for name, value in about.items() if name != "weights"})
    except Unknown as unknown:
        apart.append(f"it can't be known which weights these are: {unknown}")
        return {}
    return {prefix + name: value for name, value in parts.items()}


def _settings(config: Any, model: Any) -> dict[str, str]:
    """Settings that change what is computed. They are not in every namespace, so that most stay as they are."""
    parts = {}
    if model.hf_overrides:
        parts["overrides"] = digest(model.hf_overrides)
    if model.disable_sliding_window:
        parts["sliding_window"] = "disabled"
    if config.additional_config:
        parts["additional"] = digest(config.additional_config)
    if any(word in repr(model.hf_config) for word in ("longrope", "dynamic")):  # depends on the longest prompt
        parts["max_model_len"] = str(model.max_model_len)
    return parts


def rank_parts(config: Any, offloading: Any, tensors: Any) -> dict[str, str]:
    """The parts that one rank adds: where its layers' KV lies and how. `offloading`: vLLM's `OffloadingConfig`;
    `tensors`: its `CanonicalKVCaches`."""
    layers = config.compilation_config.static_forward_context
    names = [name for group in offloading.groups for name in group.layer_names]
    groups = [(group.group_id, group.tokens_per_block, group.layer_names) for group in offloading.groups]
    pages = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in tensors.group_data_refs]
    described = [_layer(layers.get(name)) for name in names]
    cache = offloading.cache
    return {
        "block": " ".join(str(group.tokens_per_block) for group in offloading.groups),
        "chunk": f"{cache.blocks_per_chunk} blocks, {cache.tokens_per_hash} tokens a hash, layout {_CHUNK_LAYOUT}",
        "backend": " ".join(sorted({layer[0] for layer in described})),
        "layout": str(offloading.kv_cache_layout),
        "layers": digest([groups, pages, described]),
    }


def _layer(layer: Any) -> list[str]:
    """How the KV of one layer lies in memory, as far as it can be seen. The number of blocks does not matter."""
    if layer is None:
        return ["unknown"]
    backend = getattr(layer, "attn_backend", None)
    tensors = getattr(layer, "kv_cache", None)
    tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
    scales = [getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float")]
    return [
        backend.get_name() if backend else type(layer).__name__,
        str(getattr(layer, "isa", "")),
        str(getattr(layer, "kv_cache_dtype", "")),
        *(f"{tuple(t.shape[1:])} {tuple(t.stride())} {t.dtype} {t.device.type}" for t in tensors if t is not None),
        *map(str, scales),
    ]


def namespace_of(engine: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> Namespace:
    """The namespace of an engine, of what all its ranks have in common and what each of them has told, in their
    order. Of the latter, what all have told alike is a field of its own; the others stand for their ranks."""
    common = dict(set.intersection(*(set(parts.items()) for parts in ranks)))
    own = [{name: value for name, value in parts.items() if name not in common} for parts in ranks]
    return Namespace.of(**engine, **common, ranks=digest(own) if any(own) else str(len(ranks)))


def check_hashes(algorithm: str, tiers: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: block hashes that no other process has, and tiers that outlive this one.
    """
    if tiers and algorithm not in _SAME_EVERYWHERE and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"prefix_caching_hash_algo: {algorithm!r} gives other hashes in every process, so nothing in the "
            f"tiers {', '.join(tiers)} would ever be found again; use --prefix-caching-hash-algo sha256, or set "
            f"PYTHONHASHSEED to the same number for every engine"
        )


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
