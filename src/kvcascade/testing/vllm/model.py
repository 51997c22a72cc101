"""A tiny model, and prompts for it."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["BLOCK", "LOADED", "PROMPTS", "full_blocks", "make_model", "prompt", "text_of"]

BLOCK = 32
"""Tokens of a block: the smallest that vLLM's attention on a CPU takes."""

_VOCABULARY = 1024


def prompt(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, _VOCABULARY) for _ in range(length)]


def text_of(tokens: Sequence[int]) -> str:
    """What the model's tokenizer makes of these tokens, as they go on from a prompt."""
    return "".join(f" w{token}" for token in tokens)


def full_blocks(tokens: int, block: int = BLOCK) -> int:
    """Tokens of a prompt that can be loaded: whole blocks, and the last token is always computed."""
    return (tokens - 1) // block * block


PROMPTS = [prompt(length, seed) for seed, length in enumerate((200, 700, 1500))]
LOADED = [full_blocks(len(one)) for one in PROMPTS]
"""How many tokens of each of `PROMPTS` can be loaded."""


def make_model(path: Path, seed: int, layers: int = 2, hidden: int = 128, **config: Any) -> Path:
    """Writes a Llama with seeded weights into the folder: large enough that greedy decoding has clear winners.
    `hidden`: a multiple of 64; the KV of a token is as large whatever it is."""
    import torch
    from safetensors.torch import save_file

    width, kv_heads = 32, 2
    heads, inner = hidden // width, 2 * hidden
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(described | config))
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    seeded = torch.Generator().manual_seed(seed)

    def weights(*shape: int, scale: float = 0.08) -> Any:
        return torch.randn(*shape, generator=seeded) * scale

    tensors = {
        "model.embed_tokens.weight": weights(_VOCABULARY, hidden, scale=0.4),
        "lm_head.weight": weights(_VOCABULARY, hidden, scale=0.4),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "self_attn.q_proj.weight": weights(hidden, hidden, scale=0.16),
            at + "self_attn.k_proj.weight": weights(kv_heads * width, hidden, scale=0.16),
            at + "self_attn.v_proj.weight": weights(kv_heads * width, hidden, scale=0.16),
            at + "self_attn.o_proj.weight": weights(hidden, hidden, scale=0.16),
            at + "mlp.gate_proj.weight": weights(inner, hidden),
            at + "mlp.up_proj.weight": weights(inner, hidden),
            at + "mlp.down_proj.weight": weights(hidden, inner),
            at + "input_layernorm.weight": torch.ones(hidden),
            at + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def _tokenizer() -> dict[str, Any]:
    """A word is a token: w3, w4 ..."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, _VOCABULARY)}
    special = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for word, number in list(words.items())[:3]
    ]
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
