"""An engine that may do hardly anything."""

import os
import subprocess
import tempfile
from pathlib import Path
from shutil import which

import pytest

from kvcascade.testing.vllm import LOADED, on_disk


def may_mount():
    """Only who may can take everything else away."""
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return (
        bool(which("setpriv") and which("unshare")) and not subprocess.run(trial, capture_output=True).returncode
    )


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not may_mount(), reason="may not make mounts"),
]

NOBODY = 65534
READS = "dac_read_search"
"""The one capability that is left: the interpreter may lie in a folder that is not open to everybody."""
BOX = f"""
mount --bind "$0" "$0" && mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -o remount,bind,ro / &&
exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --no-new-privs --bounding-set=-all,+{READS} \\
    --inh-caps=-all,+{READS} --ambient-caps=-all,+{READS} "$@"
"""


@pytest.fixture
def path():
    """The one folder that the engine may write to."""
    with tempfile.TemporaryDirectory(prefix="kvcascade-e2e-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def test_an_ordinary_user_with_nothing_to_write_to_but_the_path(engine, way, path, ask, seen):
    """No HOME, a root file system that is read-only, a /dev/shm of 64 MiB, where only vLLM's own region for the
    third way lies."""
    nowhere = {
        "HOME": "/nonexistent",
        "TMPDIR": str(path),
        "VLLM_CACHE_ROOT": str(path / "cache"),
        "VLLM_CONFIG_ROOT": str(path / "config"),
        "HF_HOME": str(path / "hf"),
        "TORCHINDUCTOR_CACHE_DIR": str(path / "inductor"),
        "VLLM_RPC_BASE_PATH": str(path),
    }
    prefix = ["unshare", "--mount", "bash", "-c", BOX, str(path)]
    boxed = engine(on_disk(path / "kv", "16MiB"), way, prefix=prefix, env=nowhere)
    assert ask(boxed) == [0, 0, 0]
    assert boxed.reset()
    assert ask(boxed) == LOADED
    seen.note(way, "an ordinary user, read-only root, /dev/shm of 64 MiB", LOADED)
