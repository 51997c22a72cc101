"""Installing beside vLLM leaves vLLM's environment as it is."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from kvcascade.testing.vllm import ONE_THREAD, SPEC, host, transfer_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


SCRIPT = """
import json, sys
from importlib.util import find_spec
from vllm import LLM, SamplingParams

model, transfer = sys.argv[1], json.loads(sys.argv[2])
settings = {"kv_transfer_config": transfer} if transfer else {}
settings |= {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 512}
llm = LLM(model=model, **settings)
terms = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
prompt = {"prompt_token_ids": list(range(1, 200))}
(answer,) = llm.generate([prompt], terms, use_tqdm=False)
print("ANSWER", json.dumps([find_spec("kvcascade") is not None, list(answer.outputs[0].token_ids)]))
"""


def run(*command):
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    env |= ONE_THREAD | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What a user installs, built from a copy: what earlier builds have left lying about would get in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copytree(ROOT, source, symlinks=True, ignore=ignore_patterns(".*", "build", "dist", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source))
    (found,) = folder.glob("*.whl")
    return str(found)


@pytest.fixture
def python(tmp_path):
    """Of an environment with all that this one has, but without this package."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "kvcascade" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return str(tmp_path / "venv" / "bin" / "python")


def test_installing_changes_no_version(wheel, python):
    report = json.loads(run(python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", wheel))
    assert [found["metadata"]["name"] for found in report["install"]] == ["kvcascade"]


def test_installed_used_and_uninstalled(wheel, python, model):
    """vLLM answers the same before, with it, and after."""

    def answer(transfer=None):
        said = run(python, "-c", SCRIPT, str(model), json.dumps(transfer)).split("ANSWER ")[1]
        return json.loads(said.splitlines()[0])

    before = answer()
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    assert answer(transfer_config(SPEC, host())) == [True, before[1]]
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "kvcascade")
    assert before[0] is False and answer() == before
