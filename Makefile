# The two commands of the README: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: install requirements demo test test-all lint types layers bench bench-persample bench-distributed bench-scattering bench-scaling bench-clients docs docs-serve notebooks clean bench-secure
.DEFAULT_GOAL := demo

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,flower,bench]'
	touch $(STAMP)

# Pinned versions with hashes, for this platform and this index: see the head of constraints.txt.
requirements: install
	$(BIN)/uv pip compile pyproject.toml --extra flower --constraint constraints.txt --generate-hashes --quiet \
		--python $(BIN)/python --output-file requirements.txt

demo: install
	$(BIN)/bqsgd demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

test: lint types layers
	$(BIN)/pytest -n 2 --dist worksteal

test-all: lint types layers
	HYPOTHESIS_PROFILE=fresh $(BIN)/pytest -n 2 -m 'slow or not slow'

bench: install
	$(BIN)/python -m benchmarks.mechanism

bench-persample: install
	$(BIN)/python -m benchmarks.persample

bench-accountant: install
	$(BIN)/python -m benchmarks.accountant

bench-distributed: install
	$(BIN)/python -m benchmarks.distributed

bench-scattering: install
	$(BIN)/python -m benchmarks.scattering

bench-scaling: install
	$(BIN)/python -m benchmarks.scaling

bench-clients: install
	$(BIN)/python -m benchmarks.clients

bench-secure: install
	$(BIN)/python -m benchmarks.secure

docs: install
	$(BIN)/mkdocs build --strict

docs-serve: install
	$(BIN)/mkdocs serve --strict

notebooks: install
	cd notebooks && ../$(BIN)/jupyter-execute --inplace --NotebookClient.record_timing=False --NotebookClient.coalesce_streams=True *.ipynb
	rm -f notebooks/*.ledger

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
