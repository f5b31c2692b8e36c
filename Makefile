# The two commands of the README: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NVFLARE := .venv-nvflare
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Most of the installed modules are never imported: only those that are get compiled, the usual ones by `make install`.
PIP := --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# What does not wait for something else runs beside it: mypy, the linters, NVFlare's environment.
MAKEFLAGS += --jobs=3
export NO_MKDOCS_2_WARNING := 1

.PHONY: install requirements demo test test-all lint types layers bench docs docs-serve notebooks dist release clean
.DEFAULT_GOAL := demo

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP) --constraint constraints.txt torch
	$(BIN)/python -m pip install $(PIP) --constraint constraints.txt --editable '.[dev,docs,flower,huggingface,lightning,bench]'
	$(BIN)/python -c 'import torch._inductor, flwr.app, sklearn, matplotlib.pyplot, bqsgd._src.cli.app'
	touch $(STAMP)

# NVFlare's pins differ from ours, so it has an environment of its own, which finds everything else in ours.
$(NVFLARE)/.installed: constraints-nvflare.txt $(STAMP)
	test -x $(NVFLARE)/bin/python || $(PYTHON) -m venv $(NVFLARE)
	$(NVFLARE)/bin/python -m pip install $(PIP) --constraint constraints-nvflare.txt nvflare
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$($(NVFLARE)/bin/python -c "import site; print(site.getsitepackages()[0])")/zz_ours.pth
	touch $(NVFLARE)/.installed

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

test: lint types layers $(NVFLARE)/.installed
	$(BIN)/pytest -n 2 --dist worksteal

test-all: lint types layers $(NVFLARE)/.installed
	HYPOTHESIS_PROFILE=fresh $(BIN)/pytest -n 2 --dist worksteal -m 'slow or not slow'

# `make bench` lists the names, `make bench NAME=persample` runs one.
bench: install
	$(BIN)/python -m benchmarks $(NAME)

docs: install
	$(BIN)/mkdocs build --strict

docs-serve: install
	$(BIN)/mkdocs serve --strict

notebooks: install
	cd notebooks && ../$(BIN)/jupyter-execute --inplace --NotebookClient.record_timing=False --NotebookClient.coalesce_streams=True *.ipynb
	rm -f notebooks/*.ledger

# The sdist and the wheel in dist/, each installed into an empty environment and run there.
dist: install
	$(BIN)/python .ci/release.py dist

# The same for a final version, and then the tag. Nothing is pushed or uploaded.
release: install
	$(BIN)/python .ci/release.py release

clean:
	rm -rf $(VENV) $(NVFLARE) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
