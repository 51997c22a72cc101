"""What a model's files say of which model it is."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["Unknown", "model_parts"]

_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_READ_ALL = 8 << 30
"""Weights up to this many bytes are hashed whole; of larger files, pieces."""
_PIECE = 1 << 20
_PIECES = 64


class Unknown(Exception):
    """It can't be known which model this is; the text says why."""


def model_parts(path: Path) -> dict[str, str]:
    """Of a model's folder, or its one file: what tells its weights and configuration from all others.

    - A snapshot of the Hugging Face hub is known by name and commit, and by a hash of those of its files that are
      not as the hub has them.
    - Any other folder by a hash of its weights, configuration and Python code. Where the weights have more than
      8 GiB, of their names, sizes, times of change and 64 pieces of each: copies of them are equal only if the
      copying has kept the times.

    Raises:
        Unknown: there are no weights, or they can't be read.
    """
    path = path.expanduser().absolute()
    snapshot = _SNAPSHOT.search(str(path))
    parts = {"model": snapshot[1].replace("--", "/"), "revision": snapshot[2]} if snapshot else {}
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        weights = [file for file in files if file.suffix in _WEIGHTS and file.is_file()]
        configs = [file for file in files if file.name in _CONFIGS or (file.suffix == ".py" and file.is_file())]
        if snapshot:
            weights = [file for file in weights if not _of_hub(file, weights=True)]
            configs = [file for file in configs if not _of_hub(file, weights=False)]
        elif not weights:
            raise Unknown(f"{path}: no weights are there ({', '.join(_WEIGHTS)})")
        if weights:
            parts["weights"] = _hash_weights(weights)
        if configs:
            parts["config"] = _hash_configs(configs)
    except OSError as error:
        raise Unknown(f"{path}: can't be read: {error.strerror or error}") from error
    return parts


def _of_hub(file: Path, weights: bool) -> bool:
    """Whether a snapshot's file is as the hub has it: a link to a blob that is named by its hash. That is verified
    for small files; weights are known to be changed where they have been written after they were linked."""
    blob = file.resolve()
    if not file.is_symlink() or blob.parent != (file.parents[2] / "blobs").resolve():
        return False
    if weights:
        return blob.stat().st_mtime_ns <= file.lstat().st_mtime_ns
    content = blob.read_bytes()
    as_git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return blob.name in (as_git.hexdigest(), hashlib.sha256(content).hexdigest())


def _hash_weights(files: Iterable[Path]) -> str:
    import xxhash

    files = list(files)
    whole = sum(file.stat().st_size for file in files) <= _READ_ALL
    digest = xxhash.xxh3_128(b"whole" if whole else b"pieces")
    for file in files:
        status = file.stat()
        about = [file.name, status.st_size] if whole else [file.name, status.st_size, status.st_mtime_ns]
        digest.update(json.dumps(about).encode())
        starts = range(0, status.st_size, _PIECE)
        step = 1 if whole else max(1, len(starts) // _PIECES)
        with file.open("rb") as opened:
            for start in starts[::step]:
                digest.update(os.pread(opened.fileno(), _PIECE, start))
    return digest.hexdigest()


def _hash_configs(files: Iterable[Path]) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for file in files:
        text = file.read_bytes()
        with suppress(ValueError):  # whatever it is then, it is these bytes
            text = json.dumps(json.loads(text), sort_keys=True).encode()
        digest.update(f"{file.name} {len(text)} ".encode() + text)
    return digest.hexdigest()
