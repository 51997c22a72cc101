"""Installing beside vLLM leaves vLLM's environment as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def pip(*arguments):
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def test_installing_changes_no_version():
    report = json.loads(pip("install", "--quiet", "--dry-run", "--report", "-", str(ROOT)))
    assert [found["metadata"]["name"] for found in report["install"]] == ["kvcascade"]


def test_vllm_does_without_it():
    """Where the plugin is not loaded, as after an uninstall, vLLM knows nothing of it."""
    script = (
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.v1.kv_offload.factory import OffloadingSpecFactory\n"
        "import sys\n"
        "load_general_plugins()\n"
        "print('KVCascade' in OffloadingSpecFactory._registry, 'kvcascade.connector' in sys.modules)"
    )

    def run(plugins):
        env = os.environ | plugins
        return subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert run({}).split()[-2:] == ["True", "True"]
    assert run({"VLLM_PLUGINS": "another"}).split()[-2:] == ["False", "False"]
