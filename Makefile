# `make quickstart`, `make test`, `make lint` and `make docs`. All make .venv first, the last three with more packages;
# nothing but Python 3.11+, make and pip is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(VENV)/.tested

# Python keeps what it compiles, whatever the environment says: pip compiles nothing below, and without this each
# process would compile torch and all the others anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test lint docs lock clean

# torch goes first and pinned, so that nothing else pulls in another build of it: without an NVIDIA driver the
# CPU build, wherever pip is set up to find it, else the registry's.
TORCH := $(shell grep '^torch==' constraints.txt)
# what makes the package's own wheel and seqeval's; pip would make an environment for each alone
BUILD := hatchling editables setuptools setuptools_scm

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	{ ! command -v nvidia-smi >/dev/null && $(BIN)/python -m pip install -q --no-compile -c constraints.txt "$(TORCH)+cpu" $(BUILD) 2>/dev/null; } \
		|| $(BIN)/python -m pip install -q --no-compile -c constraints.txt "$(TORCH)" $(BUILD)
	$(BIN)/python -m pip install -q --no-compile --no-build-isolation -c constraints.txt -e .
	touch $@

# what tests, checks and the site need besides
$(TESTED): $(READY)
	$(BIN)/python -m pip install -q --no-compile --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(READY)
	$(BIN)/python -m benchmarks.quickstart runs/made
	$(BIN)/python -m lit_compress fit --config quickstart.yaml --ckpt_path last
	$(BIN)/python -m lit_compress factorize runs/quickstart/dense/net runs/quickstart/second_order --data.path runs/made/areas --data.custom.label area
	@echo "Next: $(BIN)/python -m lit_compress report runs/quickstart (a page), then your own model:"
	@echo "  $(BIN)/python -m lit_compress fit --model.backbone MODEL --data.path FILE.csv --data.custom.text COLUMN --data.custom.label COLUMN"

# all tests; with FAST=1 without whole runs, several processes and other devices (marked slow)
test: $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 40 --durations-min 1 $(if $(FAST),-m "not slow")

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 --doctest-modules --import-mode=importlib lit_compress benchmarks

# the site, into site/; a dead link or a missing docstring is an error
docs: $(TESTED)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build -q

# the tested version of every package, also of those that only others need; it needs uv (pip install uv). Pinned versions
# stay, unless UPGRADE names one: make lock UPGRADE="-P transformers"
lock:
	uv pip compile -q pyproject.toml --extra dev --python-version 3.11.5 --no-emit-index-url --no-annotate \
		--custom-compile-command "make lock" $(UPGRADE) -o constraints.txt

clean:
	rm -rf $(VENV) runs site
