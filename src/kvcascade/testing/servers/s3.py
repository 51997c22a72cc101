"""Real stores that speak the protocol of S3: rclone, moto, MinIO, and whichever the environment names."""

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .base import HOST, ServerProcess, free_port
from .tls import Certificates

__all__ = ["ENDPOINT_VARIABLE", "S3Store", "available_stores", "minio", "moto", "rclone", "running_store"]

ENDPOINT_VARIABLE = "KVCASCADE_TEST_S3_ENDPOINT"
"""Names an endpoint on which the tests run too, with the credentials that boto3 finds."""
ACCESS_KEY, SECRET_KEY = "kvcascade-access-key", "kvcascade-secret-key"


class S3Store(NamedTuple):
    """A store that runs."""

    kind: str
    endpoint: str
    environment: dict[str, str]
    """Variables with which boto3 finds its credentials."""
    server: ServerProcess | None = None
    """None for one that was running before."""


def rclone(folder: Path, certificates: Certificates | None = None) -> S3Store:
    """`rclone serve s3`, with objects in memory; with TLS where there are certificates. It checks signatures;
    conditional writes it ignores."""
    port = free_port()
    path = Path(sys.executable).with_name("rclone")
    command = [
        str(path if path.exists() else shutil.which("rclone")),
        *("serve", "s3", "--addr", f"{HOST}:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
        *("--config", os.devnull, "--cache-dir", str(folder / "cache"), ":memory:"),
    ]
    if certificates is None:
        return _store("rclone", port, command, folder)
    command += ["--cert", str(certificates.cert_file), "--key", str(certificates.key_file)]
    return _store("rclone", port, command, folder)._replace(endpoint=f"https://{HOST}:{port}")


def moto(folder: Path) -> S3Store:
    """moto's server: objects are in memory. It lets everybody in, and knows conditions and lifecycle rules."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", HOST, "-p", str(port)]
    return _store("moto", port, command, folder)


def minio(folder: Path) -> S3Store:
    """MinIO, where its binary is on the PATH."""
    port = free_port()
    command = [str(shutil.which("minio")), "server", "--address", f"{HOST}:{port}", str(folder / "objects")]
    return _store("minio", port, command, folder)


_STARTERS = {"rclone": rclone, "moto": moto, "minio": minio}


def available_stores() -> list[str]:
    """The kinds of stores that tests can run on here."""
    return [
        *(["rclone"] if shutil.which("rclone") or Path(sys.executable).with_name("rclone").exists() else []),
        *(["moto"] if importlib.util.find_spec("moto") and importlib.util.find_spec("flask") else []),
        *(["minio"] if shutil.which("minio") else []),
        *(["environment"] if os.environ.get(ENDPOINT_VARIABLE) else []),
    ]


@contextmanager
def running_store(kind: str, folder: Path) -> Iterator[S3Store]:
    """A store of this kind, started and stopped; that of the environment is left running."""
    if kind == "environment":
        names = [name for name in os.environ if name.startswith("AWS_")]
        yield S3Store(kind, os.environ[ENDPOINT_VARIABLE], {name: os.environ[name] for name in names})
        return
    store = _STARTERS[kind](folder)
    if store.server is None:
        raise TypeError(f"{kind} is started by a process")
    with store.server:
        yield store


def _store(kind: str, port: int, command: list[str], folder: Path) -> S3Store:
    credentials = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    roots = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}
    server = ServerProcess(command, folder, lambda: _listens(port), kind, roots if kind == "minio" else None)
    return S3Store(kind, f"http://{HOST}:{port}", credentials, server)


def _listens(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=1):
        return True
