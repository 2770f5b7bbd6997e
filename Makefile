# Each target runs exactly what CI runs. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread a rank: two ranks on two cores must not fight over them.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Where it is set, every rank of every test compiles torch and Megatron anew (16 s of CPU each).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup format lint types test test-unit test-upstream test-distributed test-e2e \
	test-matrix test-slow test-elastic test-convergence test-slurm demo bench bench-balancers bench-trigger bench-migration \
	bench-sparse-attention bench-pruning bench-elastic bench-dynamics patches docs lock dist clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) ## Make .venv with everything needed (once; seconds afterwards)

# The interpreter's path goes to uv because uv does not see through pyenv's shims.
$(STAMP): pyproject.toml constraints.txt scripts/find_python.sh
	@python=$$(scripts/find_python.sh) || exit 1; \
	echo "Python: $$python"; \
	test -x $(BIN)/python || "$$python" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $@

format: setup ## Rewrite the sources in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## Style and import rules; rewrites nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup ## Static types
	$(BIN)/mypy

# The one test that needs packages of the system.
SLURM := $(if $(shell PATH=$$PATH:/usr/sbin; command -v slurmctld && command -v munged),test-slurm)

test: lint types test-unit test-upstream test-distributed test-e2e $(SLURM) ## All that CI runs

test-unit: setup ## Pure logic, on all cores
	$(BIN)/pytest -n auto --dist worksteal tests/unit

test-upstream: setup ## Patch contracts against the installed Megatron
	$(BIN)/pytest -n auto --dist worksteal tests/upstream

test-distributed: setup ## Spawned ranks over gloo
	$(BIN)/pytest tests/distributed -m "not matrix"

test-e2e: setup ## Real pretraining of a tiny GPT
	$(BIN)/pytest tests/e2e -m "not matrix"

# What the promise of exactness and the table of faults rest on.
MATRIX := $(addprefix tests/e2e/,test_random_moves.py test_leaks.py \
	test_moved_checkpoint.py test_checkpoint_roundtrips.py test_faults_real.py) \
	tests/distributed/test_faults.py

test-matrix: setup ## Random moves in every configuration, round trips of checkpoints, all faults
	$(BIN)/pytest -m "" --timeout 3600 $(MATRIX)

test-slow: setup ## All that is too slow for CI, test-matrix among it (needs SLURM too)
	$(BIN)/pytest -m matrix --timeout 3600

ELASTIC := $(addprefix tests/e2e/,test_elastic.py test_elastic_faults.py test_elastic_emulated.py)

test-elastic: setup ## Packing and rejoining in many configurations, faults, emulated devices
	$(BIN)/pytest -m "" --timeout 3600 $(ELASTIC)

test-slurm: setup ## A real SLURM with four virtual nodes: give nodes back (needs slurm-wlm and munge)
	$(BIN)/pytest tests/slurm -m "not matrix"

test-convergence: setup ## Each dynamic against the dense model, a few hundred iterations (outside CI)
	$(BIN)/python scripts/convergence.py

demo: setup ## Real text, real Megatron, a layer that moves: static against balanced
	$(BIN)/python scripts/demo.py

bench-balancers: setup ## Quality and time of all balancers side by side
	$(BIN)/python scripts/bench_balancers.py

bench-trigger: setup ## Emulated ranks whose costs change: static, best static, ours
	$(BIN)/python scripts/bench_trigger.py

bench-migration: setup ## What a move costs: time by phase, share of the raw transport, extra memory
	$(BIN)/python scripts/bench_migration.py

bench-sparse-attention: setup ## Sparse against dense core attention, on one thread
	$(BIN)/python scripts/bench_sparse_attention.py

bench-pruning: setup ## Pruned against whole layers, on one thread
	$(BIN)/python scripts/bench_pruning.py

bench-elastic: setup ## Emulated ranks packed and taken back: seconds, throughput
	$(BIN)/python scripts/bench_elastic.py

bench-dynamics: setup ## Each kind of dynamic, real on 2 cores and on 8 emulated ranks
	$(BIN)/python scripts/bench_dynamics.py

bench: demo bench-balancers bench-trigger bench-migration bench-sparse-attention bench-pruning \
	bench-elastic bench-dynamics ## All benchmarks that write benchmarks/results

patches: setup ## List and check the patches of Megatron
	$(BIN)/dynmo patches list
	$(BIN)/dynmo patches check

docs: setup ## Rewrite the documents that are made from the sources
	$(BIN)/dynmo patches list --markdown > docs/patches.md

lock: setup ## Pin the newest allowed versions in constraints.txt
	$(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate --no-emit-index-url \
		--no-emit-find-links --extra dev pyproject.toml -o constraints.txt

dist: setup ## Wheel and sdist in dist/
	$(BIN)/python -m build --installer uv

clean: ## Remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
