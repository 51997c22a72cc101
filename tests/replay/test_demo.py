"""What `make run` shows, in small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = """
import sys
from kvcascade.replay import demo
demo._REQUESTS, demo._AGAIN, demo._HOST = 60, 10, 16 << 20
sys.exit(demo.main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("stack", [[], ["shared-fs"]])
def test_it_shows_a_replay_a_plot_and_a_restart_and_leaves_the_plot_only(stack: list[str], tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", SMALL, *stack],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "0 wrong bytes" in ran.stdout and "hit rate" in ran.stdout and "After a restart" in ran.stdout
    assert (tmp_path / "kvcascade-demo.png").stat().st_size > 10_000
    assert not [path for path in temporary.iterdir() if path.name.startswith("kvcascade")]
