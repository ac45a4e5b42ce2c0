# Start with `make demo` (a first comparison) or `make test` (all checks). Both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1

.PHONY: demo test lint docs notebooks package coverage fuzz lock tables-small clean

demo: .venv/core
	$(BIN)/fedflat compare "fedavg+wima(window=20)" fedsam scaffold fedswa fedmoswa --rounds 60 --seeds 3 --target 0.9 --out demo

test: .venv/installed lint
	$(BIN)/pytest -n 2

lint: .venv/installed
	$(BIN)/ruff check src tests docs tools notebooks
	$(BIN)/ruff format --check src tests tools notebooks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/scale.py --check

tables-small: .venv/installed
	$(BIN)/fedflat reproduce all --scale small --representative --seeds 1

docs: .venv/installed
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: .venv/installed
	$(BIN)/python tools/run_notebooks.py

package: .venv/installed
	$(BIN)/python tools/check_package.py

coverage: .venv/installed
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest  # report coverage even if a test with resource limits fails
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

fuzz: .venv/installed
	PYTHONPATH=. $(BIN)/python -m tests.fuzz

lock:
	$(PYTHON) tools/lock.py

.venv/core: pyproject.toml constraints.txt
	@echo "Setting up .venv (1.5 GB); this takes a few minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch .venv/core

.venv/installed: .venv/core
	@echo "Installing development dependencies and extras into .venv (1.1 GB); this takes a few minutes, once."
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch .venv/installed

clean:
	rm -rf .venv demo site build
