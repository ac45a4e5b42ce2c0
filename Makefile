# Start with `make demo` (a first comparison) or `make test` (all checks). Both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1
export PYTHONDONTWRITEBYTECODE :=  # otherwise every process would compile fedflat again

.PHONY: demo test lint style types generated docs notebooks package test-flower coverage fuzz lock tables-small clean

demo: .venv/core
	$(BIN)/fedflat compare "fedavg+wima(window=20)" fedsam scaffold fedswa fedmoswa --rounds 60 --seeds 3 --target 0.9 --out demo

test: .venv/installed
	$(MAKE) -j2 lint
	$(BIN)/pytest -n 4

lint: style types generated

style: .venv/installed
	$(BIN)/ruff check src tests docs tools notebooks
	$(BIN)/ruff format --check src tests tools notebooks
	$(BIN)/lint-imports

types: .venv/installed
	$(BIN)/mypy

generated: .venv/installed
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

# The other supported version of Flower, in an environment that has everything else from .venv.
OTHER_FLOWER := 1.42
test-flower: .venv/installed
	$(PYTHON) -m venv .venv-flower
	echo $(CURDIR)/$$($(BIN)/python -c "import sysconfig, os; print(os.path.relpath(sysconfig.get_path('purelib')))") \
		> $$(.venv-flower/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/installed.pth
	.venv-flower/bin/python -m pip install -q --disable-pip-version-check "flwr==$(OTHER_FLOWER).*"
	PYTHONPATH=src .venv-flower/bin/python -m pytest -n 3 tests/deploy

coverage: .venv/installed
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest  # report coverage even if a test with resource limits fails
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

fuzz: .venv/installed
	PYTHONPATH=. $(BIN)/python -m tests.fuzz

lock:
	$(PYTHON) tools/lock.py

# Python compiles modules when they are first imported; pip would compile all 22,000 of them.
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt

.venv/core: pyproject.toml constraints.txt
	@echo "Setting up .venv (1.5 GB); this takes a few minutes, once."
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/installed: pyproject.toml constraints.txt
	@echo "Setting up .venv with development dependencies and extras (2.6 GB); this takes a few minutes, once."
	$(PYTHON) -m venv .venv
	$(INSTALL) -e ".[dev]"
	touch .venv/core $@

clean:
	rm -rf .venv demo site build
