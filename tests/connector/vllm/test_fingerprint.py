"""Which model it is, from its files."""

import json
import os

import pytest

from kvcascade.connector.vllm import fingerprint
from kvcascade.connector.vllm.fingerprint import Unknown, model_parts


@pytest.fixture
def folder(tmp_path):
    def make(name="model", weights=b"\x01" * 5000, config=None):
        path = tmp_path / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(weights)
        (path / "config.json").write_text(json.dumps(config or {"hidden_size": 128}))
        return path

    return make


def test_a_copy_of_a_model_is_the_same_model(folder):
    assert model_parts(folder("one")) == model_parts(folder("two"))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"\x01" * 4999 + b"\x02"},
        {"weights": b"\x01" * 5001},
        {"config": {"hidden_size": 128, "rope_scaling": {"type": "yarn", "factor": 4}}},
        {"config": {"hidden_size": 128, "sliding_window": 4096}},
    ],
    ids=["one byte", "longer", "rope scaling", "sliding window"],
)
def test_another_model_is_another(folder, change):
    """As in vllm-project/vllm#49261."""
    assert model_parts(folder("one")) != model_parts(folder("two", **change))


def test_the_order_in_a_config_does_not_matter(folder):
    one = folder("one", config={"a": 1, "b": 2})
    two = folder("two", config={"b": 2, "a": 1})
    assert model_parts(one) == model_parts(two)


def test_a_snapshot_of_the_hub_is_known_by_name_and_commit(tmp_path):
    path = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / ("0123456789" * 4)
    path.mkdir(parents=True)
    assert model_parts(path) == {"model": "meta-llama/Llama-3.1-8B", "revision": "0123456789" * 4}


def test_of_large_weights_size_pieces_and_time_count(folder, monkeypatch):
    monkeypatch.setattr(fingerprint, "_READ_ALL", 1000)
    one, two = folder("one"), folder("two")
    for path in (one, two):
        os.utime(path / "model.safetensors", ns=(5, 5))
    assert model_parts(one) == model_parts(two)
    os.utime(two / "model.safetensors", ns=(5, 6))
    assert model_parts(one) != model_parts(two)


def test_one_file_is_a_model_too(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"weights")
    assert set(model_parts(tmp_path / "model.gguf")) == {"weights"}


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_without_weights_nothing_is_known(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unknown):
        model_parts(tmp_path / name)
