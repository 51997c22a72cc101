"""The fixture fails a test that leaves something behind. Each is run in a pytest of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "file descriptor": "import os; os.open('/dev/null', os.O_RDONLY)",
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "mapping": (
        "global kept; import mmap, os; memory = os.memfd_create('kvcascade-test'); os.ftruncate(memory, 4096); "
        "kept = mmap.mmap(memory, 4096); os.close(memory)"
    ),
    "shared memory": "open('/dev/shm/kvcascade-test-leak', 'w').close()",
}
CLEAN = """
    import gc, os, threading, time
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    cycle = [open('/dev/null')]
    cycle.append(cycle)
    os.close(os.memfd_create('kvcascade-test'))
"""


def run_test(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(
        "import kvcascade.testing.leaks as leaks\n"
        "leaks.GRACE = 0.3\n"
        "from kvcascade.testing import no_leaks\n"
        "__all__ = ['no_leaks']\n"
    )
    (folder / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors and mappings are found in /proc")
@pytest.mark.parametrize("kind", LEAKS)
def test_what_is_left_behind_is_named(tmp_path: Path, kind: str) -> None:
    try:
        ran = run_test(tmp_path, LEAKS[kind])
    finally:
        Path("/dev/shm/kvcascade-test-leak").unlink(missing_ok=True)
    assert ran.returncode == 1, ran.stdout
    assert "left behind: " in ran.stdout
    assert f"('{kind}'" in ran.stdout


def test_what_ends_soon_is_no_leak(tmp_path: Path) -> None:
    ran = run_test(tmp_path, CLEAN)
    assert ran.returncode == 0, ran.stdout
