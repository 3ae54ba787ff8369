# One command each, from an empty clone, with nothing but python3 (3.11 to 3.14) and make:
#   make demo    make test    make help
#
# Settings, each on the command line or in the environment:
#   PYTHON=python3.12     the interpreter to build the environment with
#   PIP_ARGS="..."        more arguments for pip, such as another package index
#   VENV=.venv            where the environment goes
#   GPU="RTX 4090"        the card of `make demo`
#   JOBS=2                processes that run the tests
#   PYTEST_ARGS="..."     more arguments for pytest
#   ROWS="2.14.1,2.15.0"  the releases of `make versions`, or its rows by name; all by default
#   LIBRARIES=1           versions of libraries in `make versions`, instead of torch's

PYTHON ?=
PIP_ARGS ?=
VENV ?= .venv
GPU ?= RTX 4090
JOBS ?= 2
PYTEST_ARGS ?=
ROWS ?=
LIBRARIES ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# record.py and plans_on_card.py need a card.
BENCHMARKS = $(sort $(filter-out benchmarks/_% benchmarks/record.py benchmarks/plans_on_card.py,$(wildcard benchmarks/*.py)))
# strangers.py and python_from_debian.py need a folder, foreign_wheels.py needs wheels; house_pages.py and nccl_tables.py write into the repository;
# versions.py has a target of its own.
NO_STUDIES = strangers python_from_debian foreign_wheels house_pages nccl_tables versions
STUDIES = $(sort $(filter-out $(NO_STUDIES:%=studies/%.py),$(wildcard studies/*.py)))

# torchao's compiled extensions want a CUDA build of torch; without this each import of it warns that they do not load.
export TORCHAO_FORCE_SKIP_LOADING_SO_FILES := 1

# An environment whose interpreter has gone away (a moved clone, an upgraded system) is built anew.
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell $(BIN)/python -c 'print(1)' 2>/dev/null),1)
$(shell rm -f $(STAMP))
endif
endif

# The tests start hundreds of interpreters: each is to find its modules compiled, and to leave the other cores alone.
QUICK := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help env browser demo test lint bench studies versions clean

help:
	@echo "make demo    GPT-2 training on a virtual $(GPU): does it fit, and where does the memory go?"
	@echo "make test    the linters, the type checker and all tests"
	@echo "make lint    ruff, mypy and the import contracts alone"
	@echo "make bench   every benchmark, each printing its table"
	@echo "make studies what plans are worth, which models run, which sayings hold: hours"
	@echo "make versions the tests of torch's releases, in an environment for each: docs/versions.md"
	@echo "make browser Chromium for the tests of HTML pages (Debian and Ubuntu, as root); skipped without one"
	@echo "make env     the environment alone, in $(VENV)"
	@echo "make clean   remove the environment, caches and built files"
	@echo
	@echo "Each builds what it needs. On Linux the package index offers PyTorch's CUDA build, several GB large."
	@echo "vramfit needs no more than the CPU build, which is far smaller:"
	@echo '  make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"'

env: $(STAMP)

# The stamp is written last: an environment without it is half built and starts afresh, one with an old stamp
# is brought up to date. Modules are compiled on all cores afterwards; pip does it on one. Some packages ship files that
# no Python 3 compiles.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -e $@ ]; then \
		if [ -n "$(PYTHON)" ]; then candidates="$(PYTHON)"; \
		else candidates="python3 python3.14 python3.13 python3.12 python3.11"; fi; \
		python=; \
		for candidate in $$candidates; do \
			if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; \
			then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "No Python 3.11 to 3.14 among: $$candidates." >&2; \
			echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; \
		fi; \
		if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "$$python lacks the venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
		fi; \
		echo "== [1/3] Creating $(VENV) with $$("$$python" --version)"; \
		rm -rf "$(VENV)"; \
		"$$python" -m venv "$(VENV)"; \
	fi; \
	echo "== [2/3] Installing PyTorch and the build tool (some minutes the first time)"; \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt \
		torch hatchling editables; \
	echo "== [3/3] Installing vramfit, the examples' libraries and the checkers"; \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt \
		--no-build-isolation -e '.[test,lint,examples,frameworks,versions]'; \
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; \
	touch $@; \
	echo "== The environment is ready in $(VENV)"

demo: $(STAMP)
	@echo "== Training GPT-2 small, batch 4 x 1024, on a virtual $(GPU). No GPU is used."
	@echo '== vramfit run --gpu "$(GPU)" examples/gpt2_train.py'
	@$(BIN)/vramfit run --gpu "$(GPU)" examples/gpt2_train.py

lint: $(STAMP)
	@echo "== ruff check: style and common mistakes"
	@$(BIN)/ruff check .
	@echo "== ruff format: layout"
	@$(BIN)/ruff format --check .
	@echo "== mypy: types"
	@MYPY_NUM_WORKERS=2 $(BIN)/mypy
	@echo "== import-linter: the floors"
	@$(BIN)/lint-imports

browser:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then \
		echo "== Chromium is here"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "== Installing Chromium"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; \
	else \
		echo "No Chromium on PATH. On Debian and Ubuntu: sudo apt-get install chromium" >&2; exit 1; \
	fi

# By worksteal, each process begins with tests that stand together: what a file's tests share is made once.
test: lint
	@echo "== pytest: all tests, in $(JOBS) processes"
	@$(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

bench: $(STAMP)
	@set -e; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; $(BIN)/python $$benchmark; \
	done

studies: $(STAMP)
	@set -e; for study in $(STUDIES); do \
		echo "== $$study"; $(BIN)/python $$study; \
	done

versions: $(STAMP)
	@$(BIN)/python studies/versions.py $(if $(LIBRARIES),--libraries,--rows "$(ROWS)") --jobs $(JOBS) --write docs/versions.md

clean:
	rm -rf "$(VENV)" build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
