"""The conformance class sees what it is there to see: each broken tier fails the test that names its fault."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

BROKEN = Path(__file__).with_name("broken_tiers.py")


def loaded() -> ModuleType:
    spec = spec_from_file_location("broken_tiers", BROKEN)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SEEN_BY = {name: kind.seen_by for name, kind in vars(loaded()).items() if name.startswith("Test")}
SOUND = "TestKept"
FAULTY = {name: test for name, test in SEEN_BY.items() if name != SOUND}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What became of each class's tests: its name -> "passed", "failed", "skipped" or "error", one a test."""
    report = tmp_path_factory.mktemp("report") / "report.xml"
    wanted = [f"{BROKEN}::{name}::{test}" for name, test in FAULTY.items()] + [f"{BROKEN}::{SOUND}"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *wanted],
        cwd=BROKEN.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found: dict[str, list[str]] = {name: [] for name in SEEN_BY}
    for case in ET.parse(report).iter("testcase"):
        outcome = {"failure": "failed"}.get(case[0].tag, case[0].tag) if len(case) else "passed"
        found[case.attrib["classname"].rpartition(".")[2]].append(outcome)
    return found


@pytest.mark.parametrize("name", FAULTY)
def test_a_broken_tier_fails(outcomes: dict[str, list[str]], name: str) -> None:
    assert "failed" in outcomes[name]
    assert "error" not in outcomes[name]


def test_a_sound_one_passes(outcomes: dict[str, list[str]]) -> None:
    assert set(outcomes[SOUND]) == {"passed", "skipped"}
    assert outcomes[SOUND].count("passed") > 60
