"""Which versions of vLLM work is said before anything else goes wrong."""

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcascade

PACKAGE = Path(kvcascade.__file__).parent / "connector" / "vllm"
PROBE = "import kvcascade.connector.vllm.{module} as m; m.{call}"


def run(folder, module, call="__name__"):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    script = PROBE.format(module=module, call=call)
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def old(tmp_path):
    """A vLLM that has none of the names."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.9.1'\n")
    return tmp_path


def test_a_version_that_can_not_work_is_refused_with_those_that_do(old):
    result = run(old, "spec")
    assert result.returncode != 0
    assert "ConfigError: vLLM 0.9.1 can't be used: " in result.stderr
    assert "this release of KVCascade is tested with vLLM 0.32" in result.stderr


def test_the_plugin_does_not_disturb_such_a_version(old):
    assert run(old, "plugin", "register()").returncode == 0


def imported(path):
    """The names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_only_the_compatibility_modules_touch_vllm():
    touch = {path.stem for path in PACKAGE.glob("*.py") if any(n.split(".")[0] == "vllm" for n in imported(path))}
    assert touch == {"compat", "compat_tier", "compat_names"}


@pytest.mark.e2e
def test_an_untested_version_is_warned_of(monkeypatch, caplog):
    from kvcascade.connector.vllm import compat

    caplog.set_level(logging.WARNING, "kvcascade")
    monkeypatch.setattr(compat, "version", "0.32.7")
    compat.warn_if_untested()
    assert "has not been tested" not in caplog.text
    monkeypatch.setattr(compat, "version", "0.33.0")
    compat.warn_if_untested()
    assert "vLLM 0.33.0 has not been tested; this release of KVCascade is tested with vLLM 0.32" in caplog.text
