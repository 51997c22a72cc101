"""`kvcascade check --vllm-model`: what tells a model's chunks from others'."""

import json

from click.testing import CliRunner

from kvcascade.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["check", "host-only", *map(str, arguments)])


def test_the_parts_of_a_model_are_printed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128}))
    first = run("--vllm-model", tmp_path)
    assert first.exit_code in (0, 2), first.output  # 2: not enough memory for that stack here
    assert "weights" in first.stdout and "config" in first.stdout and "(at start) vLLM's version" in first.stdout
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert run("--vllm-model", tmp_path).stdout != first.stdout


def test_a_model_that_can_not_be_known_is_said(tmp_path):
    result = run("--vllm-model", tmp_path)
    assert result.exit_code == 2
    assert "--vllm-model:" in result.stderr and "no weights are there" in result.stderr
