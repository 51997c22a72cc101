# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
LINKED := src/kvcascade/tiers/ src/kvcascade/manager/ src/kvcascade/connector/ src/kvcascade/configs/

.PHONY: run test lint format clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: .venv/installed
	$(BIN)/python -m kvcascade.replay.demo

test: .venv/installed
	$(BIN)/pytest -q -m 'not e2e'

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check src $(LINKED) tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix src $(LINKED) tests

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
