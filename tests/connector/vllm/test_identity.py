"""What decides the bytes is in the namespace; what can't be known keeps an engine apart."""

import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace as Object

import pytest

from kvcascade.connector.vllm.identity import check_hashes, engine_parts, namespace_of, rank_parts
from kvcascade.errors import ConfigError


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128}))
    return tmp_path


def config(model, **changes):
    parts = {
        "dtype": "torch.bfloat16",
        "cache_dtype": "auto",
        "quantization": None,
        "algorithm": "sha256",
        "tp": 1,
        "pp": 1,
        "load_format": "auto",
        "hf_overrides": {},
        "hf_config": {},
        "max_model_len": 2048,
        "disable_sliding_window": False,
        "additional": {},
        "draft": None,
        "name": str(model),
        "settings": {},
    } | changes
    about = Object(
        model=parts["name"],
        model_weights="",
        revision=None,
        hf_config_path=None,
        dtype=parts["dtype"],
        quantization=parts["quantization"],
        hf_overrides=parts["hf_overrides"],
        hf_config=parts["hf_config"],
        max_model_len=parts["max_model_len"],
        disable_sliding_window=parts["disable_sliding_window"],
    )
    made = Object(
        model_config=about,
        lora_config=None,
        cache_config=Object(cache_dtype=parts["cache_dtype"], prefix_caching_hash_algo=parts["algorithm"]),
        parallel_config=Object(
            tensor_parallel_size=parts["tp"],
            pipeline_parallel_size=parts["pp"],
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        load_config=Object(load_format=parts["load_format"], download_dir=None),
        speculative_config=parts["draft"],
        additional_config=parts["additional"],
    )
    for path, value in parts["settings"].items():
        owner = made
        *parents, name = path.split(".")
        for parent in parents:
            if getattr(owner, parent, None) is None:
                setattr(owner, parent, Object())
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return made


def layout(tokens=32, blocks=1, page=8192, shape=(2, 32, 64), backend="CPU_ATTN", layers=("a", "b"), per_hash=32):
    import torch

    one = Object(
        attn_backend=Object(get_name=lambda: backend),
        isa="amx",
        kv_cache=torch.zeros(3, *shape),
        kv_cache_dtype="auto",
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
    engine = Object(compilation_config=Object(static_forward_context=dict.fromkeys(layers, one)))
    offloading = Object(
        groups=(Object(group_id=0, tokens_per_block=tokens, layer_names=layers),),
        cache=Object(blocks_per_chunk=blocks, tokens_per_hash=per_hash),
        kv_cache_layout="LBHNC",
    )
    refs = [[Object(tensor_idx=place, page_size_bytes=page) for place in range(len(layers))]]
    return rank_parts(engine, offloading, Object(group_data_refs=refs))


def namespace(model, version="0.32.0", ranks=1, layouts=None, **changes):
    return namespace_of(engine_parts(config(model, **changes), version), layouts or [layout()] * ranks)


def test_the_same_engine_has_the_same_namespace(model):
    assert namespace(model) == namespace(model)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.32.1"},
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"algorithm": "sha256_cbor"},
        {"tp": 2},
        {"pp": 2},
        {"ranks": 2},
        {"hf_overrides": {"rope_scaling": {"factor": 4}}},
        {"disable_sliding_window": True},
        {"additional": {"plugin": 1}},
        {"layouts": [layout(tokens=64)]},
        {"layouts": [layout(blocks=4)]},
        {"layouts": [layout(page=4096)]},
        {"layouts": [layout(shape=(32, 2, 64))]},
        {"layouts": [layout(backend="FLASH_ATTN")]},
        {"layouts": [layout(layers=("a", "c"))]},
        {"layouts": [layout(per_hash=16)]},
    ],
    ids=str,
)
def test_what_changes_the_bytes_changes_the_namespace(model, change):
    """As in vllm-project/vllm#49261 and #55904."""
    assert namespace(model, **change) != namespace(model)


@dataclass
class Quantisation:
    linear: str
    ignore: list


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("model_config.quantization_config", {"ignore": []}, {"ignore": ["*.0*"]}),
        ("model_config.quantization_config", Quantisation("fp8", []), Quantisation("fp8", ["*.0*"])),
        ("model_config.model_class_overrides", {}, {"LlamaForCausalLM": "x:Y"}),
        ("model_config.model_impl", "auto", "transformers"),
        ("model_config.trust_remote_code", False, True),
        ("model_config.code_revision", None, "abc"),
        ("model_config.multimodal_config.mm_processor_kwargs", None, {"max_pixels": 1}),
        ("model_config.multimodal_config.video_pruning_rate", None, 0.5),
        ("model_config.multimodal_config.media_io_kwargs", {}, {"video": {"num_frames": 4}}),
        ("cache_config.kv_cache_dtype_skip_layers", [], ["0"]),
        ("cache_config.mamba_cache_dtype", "auto", "float16"),
        ("cache_config.mamba_ssm_cache_dtype", "auto", "float16"),
        ("parallel_config.cp_kv_cache_interleave_size", 1, 32),
        ("parallel_config.dcp_kv_cache_interleave_size", 1, 32),
        ("load_config.load_format", "safetensors", "pt"),
        ("load_config.model_loader_extra_config", {}, {"a": 1}),
        ("lora_config.lora_dtype", "float16", "bfloat16"),
        ("speculative_config.method", "eagle", "mtp"),
    ],
)
def test_settings_that_change_what_is_computed_count(model, name, one, other):
    assert namespace(model, settings={name: one}) == namespace(model, settings={name: one})
    assert namespace(model, settings={name: one}) != namespace(model, settings={name: other})


def test_which_layers_a_rank_has_counts(model, monkeypatch):
    """Also where no rank tells it."""
    before = namespace(model)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,5")
    assert namespace(model) != before


def test_settings_are_told_alike_in_every_process():
    script = (
        "from types import SimpleNamespace as Object\n"
        "from kvcascade.connector.vllm.settings_parts import settings_digest\n"
        "model = Object(quantization_config={'ignore': {'b', 'a', 'c'}, 'linear': None}, model_impl='auto')\n"
        "print(settings_digest(Object(model_config=model)))"
    )
    run = [sys.executable, "-c", script]
    assert len({subprocess.run(run, capture_output=True, check=True).stdout for _ in range(3)}) == 1


def test_the_order_of_ranks_counts(model):
    one, other = layout(layers=("a", "b")), layout(layers=("c", "d"))
    assert namespace(model, layouts=[one, other]) != namespace(model, layouts=[other, one])


def test_the_longest_prompt_counts_only_where_positions_depend_on_it(model):
    assert namespace(model, max_model_len=4096) == namespace(model)
    long = {"rope_parameters": {"rope_type": "longrope"}}
    assert namespace(model, hf_config=long, max_model_len=4096) != namespace(model, hf_config=long)


@pytest.mark.parametrize(
    "change",
    [{"load_format": "dummy"}, {"name": "an-org/a-model-that-nobody-has"}, {"name": "s3://bucket/model"}],
    ids=str,
)
def test_what_can_not_be_known_is_kept_apart(model, change, caplog):
    assert namespace(model, **change) != namespace(model, **change)
    assert "is not shared with other engines or later starts" in caplog.text


def test_a_draft_model_counts(model, tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"draft")
    draft = Object(draft_model_config=config(tmp_path / "draft").model_config)
    assert namespace(model, draft=draft) != namespace(model)
    assert namespace(model, draft=draft) == namespace(model, draft=draft)


def test_hashes_of_one_process_are_refused_for_tiers_that_outlive_it(monkeypatch):
    """As in vllm-project/vllm#51875."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"'xxhash'.*tiers nvme.*sha256.*PYTHONHASHSEED"):
        check_hashes("xxhash", ["nvme"])
    check_hashes("xxhash", [])
    check_hashes("sha256", ["nvme"])
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_hashes("xxhash", ["nvme"])
