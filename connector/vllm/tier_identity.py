"""The namespace of a tier under vLLM's host memory. The tier is made where the scheduler is and hears nothing of
the workers, so what they would tell of themselves is derived from what decides it."""

import json
import logging
import secrets
from hashlib import sha256
from typing import Any

from kvcascade.types import Namespace

from . import compat, identity
from . import compat_tier as tiering

__all__ = ["namespace_of"]

logger = logging.getLogger("kvcascade")


def namespace_of(engine: Any, offloading: Any, row_bytes: int) -> Namespace:
    """Everything that decides the bytes of a row of vLLM's host memory.

    Args:
        engine: vLLM's whole configuration; None where it is not known. Then nothing is shared, with anybody.
        offloading: vLLM's `OffloadingConfig`.
        row_bytes: of one chunk, all ranks together, with what vLLM pads it by.
    """
    parts = _row_parts(offloading, row_bytes)
    if engine is None:
        logger.warning(
            "what is stored is not shared with other engines or later starts: vLLM %s does not tell a tier its "
            "configuration",
            compat.version,
        )
        return Namespace.of(**parts, apart=secrets.token_hex(16))
    parts |= {"backend": tiering.attention_backend(engine), "device": tiering.device()}
    return Namespace.of(**identity.engine_parts(engine, compat.version), **parts)


def _row_parts(offloading: Any, row_bytes: int) -> dict[str, str]:
    groups = [(group.group_id, group.tokens_per_block, group.layer_names) for group in offloading.groups]
    cache = offloading.cache
    return {
        "block": " ".join(str(group.tokens_per_block) for group in offloading.groups),
        "chunk": f"{cache.blocks_per_chunk} blocks, {cache.tokens_per_hash} tokens a hash",
        "layout": str(offloading.kv_cache_layout),
        "layers": sha256(json.dumps(groups).encode()).hexdigest()[:32],
        "ranks": str(offloading.parallel.world_size),
        "row": f"{row_bytes} bytes, replicated={offloading.replicated_layout}, "
        f"canonical={offloading.canonical_layout}",
    }
