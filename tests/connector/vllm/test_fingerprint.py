"""Which model it is, from its files."""

import hashlib
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


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json", "modeling_own.py"])
def test_how_input_is_processed_and_code_of_the_model_count(folder, name):
    path = folder()
    found = [model_parts(path)]
    for text in ("1", "2"):
        (path / name).write_text(text)
        found.append(model_parts(path))
    assert len({str(parts) for parts in found}) == 3


HUB = {"model": "meta-llama/Llama-3.1-8B", "revision": "0123456789" * 4}


@pytest.fixture
def snapshot(tmp_path):
    """As the hub's client makes it: links to blobs, named by the hash that Git has of a file, or SHA-256."""
    repository = tmp_path / "models--meta-llama--Llama-3.1-8B"
    path = repository / "snapshots" / HUB["revision"]
    path.mkdir(parents=True)
    (repository / "blobs").mkdir()
    config, weights = b'{"hidden_size": 128}', b"weights"
    blobs = {
        "config.json": (hashlib.sha1(b"blob 20\0" + config).hexdigest(), config),
        "model.safetensors": (hashlib.sha256(weights).hexdigest(), weights),
    }
    for name, (blob, content) in blobs.items():
        (repository / "blobs" / blob).write_bytes(content)
        os.utime(repository / "blobs" / blob, ns=(5, 5))
        (path / name).symlink_to(f"../../blobs/{blob}")
    return path


def test_a_snapshot_of_the_hub_is_known_by_name_and_commit(snapshot):
    assert model_parts(snapshot) == HUB


def test_so_is_one_behind_a_link_to_the_cache(snapshot, tmp_path):
    (tmp_path / "cache").symlink_to(tmp_path)
    assert model_parts(tmp_path / "cache" / snapshot.relative_to(tmp_path)) == HUB


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["written", "replaced", "linked"])
def test_files_of_a_snapshot_that_are_not_the_hubs_count(snapshot, tmp_path, name, how):
    file = snapshot / name
    if how == "written":
        file.write_bytes(b"other")
        os.utime(file, ns=(5, file.lstat().st_mtime_ns + 1))
    else:
        file.unlink()
        (tmp_path / "other").write_bytes(b"other")
        file.symlink_to(tmp_path / "other") if how == "linked" else file.write_bytes(b"other")
    found = model_parts(snapshot)
    assert found.items() > HUB.items()
    other = file.resolve()
    other.write_bytes(b"another")
    os.utime(other, ns=(5, file.lstat().st_mtime_ns + 1))
    assert model_parts(snapshot) != found


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
