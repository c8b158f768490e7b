# Two commands matter on a fresh machine: `make demo` and `make test`. Both set everything up first.
VENV ?= $(CURDIR)/.venv
BIN := $(VENV)/bin
PACKAGES := client/src services/extractor/src services/extractor/tap/src services/trainer/src
CODE := $(PACKAGES) tests benchmarks deploy
PROFILE ?= demo
KEEP ?=
STOP ?=
SOAK_S ?= 300
SEED ?=

.DEFAULT_GOAL := help
.PHONY: help setup browser demo test check test-long soak bench bench-tap bench-writer bench-service bench-isolation lock format clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: ## make the virtual environment with pinned dependencies (quick when nothing changed)
	@TAPHOUSE_VENV=$(VENV) bash deploy/local/setup.sh

browser: ## find Chromium for the dashboard's tests; root on Debian gets it by apt
	@bash deploy/local/browser.sh

demo: setup ## the main job on the real engine; PROFILE=smoke|demo|kimi-k2.5, KEEP=1 leaves it running, STOP=1 stops that
	@$(BIN)/python deploy/local/demo.py --profile $(PROFILE) $(if $(KEEP),--keep) $(if $(STOP),--stop)

check: setup ## format, lint, types, import contracts, unit tests: a minute and a half
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n 2 --dist worksteal tests/unit

test: browser check ## everything but the long tests: real engine, real Redis, real trainer, real browser
	$(BIN)/pytest tests --ignore=tests/unit -m "not slow" --durations=15

test-long: setup ## the tests marked slow
	$(BIN)/pytest tests -m slow

soak: setup ## kill and freeze the service's processes at random for SOAK_S=300 seconds, SEED=n for the same again
	$(BIN)/python -m tests.queue.soak --seconds $(SOAK_S) $(if $(SEED),--seed $(SEED))

bench: setup ## benchmarks on this machine; docs/benchmarks.md says how to read them
	$(BIN)/python -m benchmarks.codec
	$(MAKE) bench-writer
	$(MAKE) bench-service
	$(MAKE) bench-tap

bench-tap: setup ## the tap's cost to an engine on this machine's CPU (benchmarks/tap_gpu.py is for GPUs)
	$(BIN)/python deploy/local/model.py
	$(BIN)/python -m benchmarks.capture_cpu

bench-writer: setup ## how fast one rank's slice writer is, without an engine and without a GPU
	$(BIN)/python benchmarks/writer.py

bench-service: setup ## what queue, workers, codec and ledger cost, and what is held in memory at a million rows
	$(BIN)/python deploy/local/model.py
	$(BIN)/python -m benchmarks.service

bench-isolation: setup ## what production feels of extraction, mode by mode: tables, and docs/isolation.svg
	$(BIN)/python deploy/local/model.py
	$(BIN)/python -m benchmarks.isolation_cpu

lock: setup ## resolve requirements/base.in into requirements/lock.txt
	$(BIN)/uv pip compile -q --python-version 3.11 --override requirements/overrides.txt \
		requirements/base.in -o requirements/lock.txt --no-annotate --no-header

format: setup ## let ruff format and fix
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean: ## remove what the demo, the tests and the checkers made (not the environment)
	rm -rf .demo .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
