"""The worked example of docs/tiers.md is a complete tier: found by its entry point, and it passes."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"
FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The example's files, as pip would install them."""
    if not PAGE.exists():
        pytest.skip("the docs are in the source tree only")
    files = dict(FILE.findall(PAGE.read_text()))
    assert set(files) == {"pyproject.toml", "kvcascade_sqlite.py", "test_sqlite.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    points = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]
    metadata = tmp_path / "kvcascade_sqlite-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcascade-sqlite\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in point.items()) for group, point in points.items()
        )
    )
    return tmp_path


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=package,
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_passes_the_conformance_tests(package: Path) -> None:
    ran = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite.py")
    assert ran.returncode == 0, ran.stdout
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed, ran.stdout
    assert int(passed[1]) > 60


def test_a_stack_file_finds_it(package: Path) -> None:
    (stack,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (package / "stack.yaml").write_text(stack)
    ran = run(
        package,
        "-c",
        "from kvcascade import load_stack; print(type(load_stack('stack.yaml').tiers[1]).__name__)",
    )
    assert ran.stdout.strip() == "SqliteSettings", ran.stderr
