# Every target works on a machine that has Python 3.10+, make and a network; .venv/ is all that it leaves behind.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip would compile one file after the other, most of the time of an installation. compileall takes all cores, and leaves
# out the packages' own tests.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/site-packages/.*/tests?/' $(VENV)/lib || true
SEED ?= 1
CASES ?= 200000

RELEASE ?=
PART ?= tests/unit tests/process

# Two targets at once would install into one environment.
.NOTPARALLEL:
.PHONY: help demo test test-slurm check style types unit coverage fuzz gpu-check docs rack wheel clean

help:
	@echo "make demo    two ranks on this machine learn to tell shapes apart, in under a minute"
	@echo "make test    what CI runs: linters, types, import contracts, all tests"
	@echo "make check   linters, types and import contracts only"
	@echo "make unit    the tests that start no processes of a run"
	@echo "make gpu-check  what clusterddp does on the GPUs of this machine, as a file to send: make gpu-check DATA=DIR (CIFAR-10)"
	@echo "make coverage  which lines of clusterddp/ the tests reach that need no test cluster: make coverage PART=tests/unit/spec"
	@echo "make fuzz    mutate everything that is read from outside: make fuzz SEED=1 CASES=200000"
	@echo "make rack    a Slurm cluster of four hosts on this machine, and a shell on its login node (root; see tests/testbed/README.md)"
	@echo "make rack RELEASE=trixie    the same with that Debian release's Slurm: bullseye, bookworm, trixie or sid"
	@echo "make test-slurm RELEASE='trixie sid'    the tests that need Slurm, with theirs; writes the table of docs/slurm.md"
	@echo "make docs    write what docs/ takes from the code, and build the site into site/"
	@echo "make wheel   build the wheel and the sdist into dist/"
	@echo "make clean   remove .venv/ and what the tools left"

demo: $(VENV)/.train
	$(BIN)/clusterddp demo

# Debian's packages are installed while Python's are.
test:
	tests/testbed/install & $(MAKE) style; style=$$?; wait $$! && exit $$style
	tests/run_all $(BIN)/pytest

unit: $(VENV)/.dev
	$(BIN)/pytest -n 2 tests/unit

coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 $(PART)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --seed $(SEED) --cases $(CASES)

gpu-check: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu_check.py $(if $(DATA),--data-dir $(DATA))

check: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/lint-imports

ifeq ($(RELEASE),)
rack:
	CLUSTERDDP_TEST_RACK=required tests/testbed/install
	$(PYTHON) -m tests.testbed
else
rack: $(VENV)/.dev
	tests/testbed/in_release $(RELEASE) $(BIN)/python -m tests.testbed
endif

test-slurm: $(VENV)/.dev
	$(BIN)/python tests/slurm_releases.py $(RELEASE)

docs: $(VENV)/.docs
	$(BIN)/python tools/write_docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/.dev
	$(BIN)/python -m hatchling build

clean:
	rm -rf $(VENV) dist build site .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"clusterddp needs Python 3.10 or newer, $(PYTHON) is {sys.version.split()[0]}; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.train: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable ".[train]"
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable ".[train]" --group dev
	@$(COMPILE)
	@touch $@ $(VENV)/.train

$(VENV)/.docs: $(VENV)/.train
	$(INSTALL) --group docs
	@$(COMPILE)
	@touch $@
