# The only commands one needs to know. CONTRIBUTING.md has the table with contents and time limits.
#   make PYTHON=/path/to/python3    choose the interpreter
#   make SETUP=installed|pinned     use what is installed, or insist on the pinned versions
#   make bench BUDGET=440           seconds of the table and its curves; what they cut is named

SHELL := /bin/sh
PYTHON ?= python3
SETUP ?= auto
OUT ?= out
BUDGET ?= 440
TRITON ?= $(OUT)/triton
PY := .venv/bin/python
# A PYTHON that was named must be the one in use; the default takes what an earlier set-up left.
INSIST := $(if $(filter file,$(origin PYTHON)),,--insist)
# One worker for each core where pytest-xdist is installed, else none.
WORKERS = $$($(PY) -c "import xdist; print('-n auto --dist worksteal')" 2>/dev/null)
# Where it is set, every process compiles anew what it imports: half the cost of a test with one of its own.
unexport PYTHONDONTWRITEBYTECODE
# Each worker has one core: more threads of torch would wait for one another, at twice the cost.
test versions property lint: export OMP_NUM_THREADS = 1
# The part that other versions of torch, Triton and Python move: what compiles, launches, replays and judges.
VERSIONED = tests/replay tests/fast tests/proof/test_prove*.py tests/parity/test_parity_main.py \
	tests/parity/test_parity_engines.py tests/parity/test_parity_races.py tests/parity/test_parity_causes.py
# Tests that `make test` leaves out; the environment has no say in it.
DONE =
READY = sh tools/setup.sh "$(PYTHON)" --choice $(SETUP) $(INSIST)

.PHONY: help setup parity test versions check lint property compile peers compat golden-rerecord bench gpu-check ptx-corpus foreign mutate mutate-full clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup:  ## .venv with the pinned versions, or with what is installed where there is no network
	@$(READY)

parity:  ## judge every kernel of ours against the reference, then train on real text through both
	@$(READY)
	@echo "$(PY) -m twinstep.parity run; beside it $(PY) -m twinstep.scenarios lockstep"; \
	said=$$(mktemp); $(PY) -m twinstep.scenarios lockstep >$$said 2>&1 & beside=$$!; \
	trap 'kill $$beside; rm -f $$said; exit 130' INT TERM; $(PY) -m twinstep.parity run; judged=$$?; \
	wait $$beside; trained=$$?; cat $$said; rm $$said; \
	if [ $$judged -ne 0 ]; then exit $$judged; fi; exit $$trained

test:  ## all tests that need no GPU
	@$(READY) --need pytest
	$(PY) -m pytest $(WORKERS) $(DONE)

# PY=/path/to/python of an environment with other versions, in which `pip install -e .[dev]` has run.
versions:  ## the third of the tests that other versions of torch and Triton move (docs/reference/versions.md)
	@$(if $(filter file,$(origin PY)),$(READY) --need pytest)
	$(PY) -m pytest $(WORKERS) $(VERSIONED)

# Behind `make lint`, which runs these first.
check: DONE = --ignore=tests/house
check: lint parity test  ## the gate: lint, parity, then test

lint:  ## the static part of the gate: format, lint, types, import contracts, tests on our own source
	@$(READY) --need ruff mypy import-linter pytest
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()"
	$(PY) -m pytest -q $(WORKERS) tests/house

property:  ## the property tests with many more examples, drawn anew each time
	@$(READY) --need pytest
	$(PY) -m pytest $(WORKERS) --hypothesis-profile=property

mutate:  ## the gate on the judge: wrong kernels must die, harmless ones pass, 24 faults planted in our source
	@$(READY)
	$(PY) -m twinstep.parity mutate --quick --json $(OUT)/mutate.json

mutate-full:  ## the same in full: every law on every dtype combination, every fault that can be planted
	@$(READY)
	$(PY) -m twinstep.parity mutate --json $(OUT)/mutate-full.json

peers:  ## DeepSpeed installed beside us, and other projects judged as we are (docs/reference/peers.md)
	@$(READY)
	DS_BUILD_OPS=0 $(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[peers]'
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(PY) -m twinstep.parity peers
	DS_ACCELERATOR=cpu $(PY) -m pytest -q tests/proof/test_peers_checkpoints.py tests/proof/test_peers_edges.py \
		tests/proof/test_peers_compat.py tests/proof/test_peers_names.py \
		tests/proof/test_peers_ranks.py tests/proof/test_peers_schedules.py

compat:  ## tests of torch, DeepSpeed and apex on our classes (docs/reference/compat.md)
	@$(READY)
	$(PY) -m twinstep.parity.proof.compat

ptx-corpus:  ## compile the replay corpus again, with four Tritons and two NVRTCs
	@$(READY)
	$(PY) -m twinstep.replay.corpus make --also twinstep.parity.proof.replay_cases
	$(PY) -m twinstep.replay.corpus census --write

foreign:  ## Triton's own tests on replay, from TRITON=/path/to/checkout or a clone of its release branch
	@$(READY) --need pytest pytest-xdist
	@test -d "$(TRITON)" || git clone --quiet --depth 1 --branch \
		release/$$($(PY) -c "import triton; print('.'.join(triton.__version__.split('.')[:2]))").x \
		https://github.com/triton-lang/triton "$(TRITON)"
	$(PY) -m tools.foreign "$(TRITON)" --outcomes $(OUT)/foreign.jsonl

golden-rerecord:  ## record the golden traces again from torch and DeepSpeed (REASON="..." where something changed)
	@$(READY)
	DS_BUILD_OPS=0 $(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[peers]'
	$(PY) -m twinstep.golden.record torch $(if $(REASON),--reason "$(REASON)")
	DS_ACCELERATOR=cpu TORCH_COMPILE_DISABLE=1 $(PY) -m twinstep.golden.record deepspeed \
		$(if $(REASON),--reason "$(REASON)")

compile:  ## registers, spills, widths of every kernel on four targets, held to recorded ceilings
	@$(READY)
	$(PY) -m twinstep.parity compile

bench:  ## our kernels and classes beside peers and plain passes: a table, and a picture under the folder OUT
	@$(READY) --need pytest pytest-benchmark matplotlib
	@mkdir -p $(OUT)
	$(PY) -m pytest -q -p pytest_benchmark.plugin twinstep/benchmarks/bench_kernels.py \
		--benchmark-quiet --benchmark-json $(OUT)/pytest-benchmark.json
	$(PY) -m twinstep.parity bench run --curves --budget $(BUDGET) --json $(OUT)/bench.json --picture $(OUT)/bench.png

gpu-check:  ## everything that only a GPU can show; results under the folder OUT (default: out)
	@$(READY)
	OUT=$(OUT) $(PY) -m twinstep.benchmarks.gpu_check

clean:  ## remove .venv and everything that tools left behind
	rm -rf .venv .corpus-venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
