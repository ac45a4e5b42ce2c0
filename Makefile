# Two commands for newcomers: `make demo` (a first picture) and `make test` (everything checked). Both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1

.PHONY: demo test lint docs package coverage lock tables-small clean

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

package: .venv/installed
	$(BIN)/python tools/check_package.py

coverage: .venv/installed
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest  # the report is of use even where a test that limits itself has no room for being measured
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lock:
	$(PYTHON) tools/lock.py

.venv/core: pyproject.toml constraints.txt
	@echo "Setting up .venv with what fedflat needs: some quiet minutes and 1.5 GB, once."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch .venv/core

.venv/installed: .venv/core
	@echo "Adding to .venv what tests, documentation and extras need: some quiet minutes and 1.1 GB more, once."
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch .venv/installed

clean:
	rm -rf .venv demo site build
