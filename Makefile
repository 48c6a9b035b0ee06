# What a newcomer types. Every target makes the environment it needs; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

# .venv has everything for a machine without a GPU (torch, vLLM), .venv-gpu for one with NVIDIA GPUs, and .venv-check is
# light, so that `make check` needs no torch.
FULL := .venv/.installed-cpu .venv/.installed-self
FULL_WITH_TOOLS := $(FULL) .venv/.installed-dev .venv/.installed-test
PROMTOOL := .venv/bin/promtool
LIGHT := .venv-check/.installed-dev

# Files that need torch or its like, however indirectly, are type-checked where their types are installed (`make types`).
light_files = $$(.venv-check/bin/python requirements/light_files.py)
unit_files = $$(.venv-check/bin/python requirements/unit_files.py)

# node comes from a wheel, pyright from its own; neither is looked for outside, and nothing is downloaded at run time.
export PYRIGHT_PYTHON_GLOBAL_NODE := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Tests start hundreds of processes, and each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test test-long test-gpu test-api-schemas test-compose types check format lock clean bench-trainer bench-staleness bench-admission bench-fleet bench-queue bench-generator bench-agents bench-push bench-push-model bench-rewarder chaos policy-scan release
.PHONY: check-format check-lint check-mypy check-pyright check-imports check-unit

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(FULL) ## make .venv with all services for CPUs, and train nothing
	@echo ". .venv/bin/activate"

demo: $(FULL) ## train a small model with GRPO through the real services; ARGS="--seed 1" is passed on
	@.venv/bin/headrace demo $(ARGS)

test: $(FULL_WITH_TOOLS) .venv-policy/.installed | $(PROMTOOL) ## the suite: real vLLM, real Redis, real HTTP; in three processes (tests/conftest.py)
	@.venv/bin/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -m "not gpu and not long and not engine" --durations=20 --durations-min=10 $(ARGS)

test-long: $(FULL_WITH_TOOLS) ## what `make test` leaves out: the whole fault matrix, 200 pushes under load, 100 rounds; takes long
	@.venv/bin/python -m pytest -m "long and not gpu and not engine" $(ARGS)

# The environment is large, so it is only made where there is a GPU.
test-gpu: ## tests and benchmarks on GPUs in steps, an hour or two; a second call goes on; ARGS="--list"
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu needs an NVIDIA GPU and its driver: nvidia-smi finds none" >&2; exit 2; }
	@$(MAKE) --no-print-directory .venv-gpu/.installed-gpu
	@.venv-gpu/bin/python -m benchmarks.gpu_check $(ARGS)

test-api-schemas: $(FULL_WITH_TOOLS) ## schemathesis, every phase, against each service for SECONDS_EACH (300)
	@SCHEMATHESIS_SECONDS=$${SECONDS_EACH:-300} .venv/bin/python -m pytest -s --timeout 1200 -m "not vllm" tests/rewarder/score_api/test_openapi.py \
		tests/trainer/run_api/test_openapi.py tests/generator_contract/test_openapi.py tests/sessions/session_api/test_openapi.py $(ARGS)

test-compose: $(FULL_WITH_TOOLS) ## the compose stack in a real Docker engine: build, run, kill, scale; seven minutes and the downloads
	@tests/compose/run.sh .venv/bin/python $(ARGS)

check: $(LIGHT) ## format, lint, types, import rules, file sizes, unit tests without torch; three minutes
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target \
		check-pyright check-mypy check-unit check-imports check-lint check-format

check-format: $(LIGHT)
	@.venv-check/bin/ruff format --check --quiet . || { echo "ruff format: run 'make format'"; exit 1; }

check-lint: $(LIGHT)
	@.venv-check/bin/ruff check --quiet .

check-mypy: $(LIGHT)
	@.venv-check/bin/mypy --follow-imports=silent $(light_files)

check-pyright: $(LIGHT)
	@.venv-check/bin/pyright --pythonpath .venv-check/bin/python $(light_files)

check-imports: $(LIGHT)
	@.venv-check/bin/lint-imports | tail -n +12

check-unit: $(LIGHT)
	@.venv-check/bin/python -m pytest -q -m "unit and not gpu and not vllm and not slow and not long and not engine" $(unit_files)

types: $(FULL_WITH_TOOLS) ## mypy and pyright, strict, on every file, with torch and vLLM installed
	@status=0; \
	.venv/bin/mypy || status=$$?; \
	.venv/bin/pyright --pythonpath .venv/bin/python || status=$$?; \
	exit $$status

bench-trainer: $(FULL_WITH_TOOLS) ## ours and TRL's trainer side by side: throughput and peak memory; minutes
	@.venv/bin/python -m benchmarks.bench_trainer $(ARGS)

bench-end-to-end: $(FULL_WITH_TOOLS) ## whole runs of headrace and TRL in turn, and headrace at several staleness bounds; hours
	@.venv/bin/python -m benchmarks.bench_end_to_end $(ARGS)

bench-staleness: $(FULL_WITH_TOOLS) ## the demo task at several staleness bounds, with and without correction; half an hour
	@.venv/bin/python -m benchmarks.bench_staleness $(ARGS)

bench-admission: $(FULL_WITH_TOOLS) ## admission just in time beside eager: staleness and rate on a simulated generator; 15 minutes
	@.venv/bin/python -m benchmarks.bench_admission $(ARGS)

bench-fleet: $(FULL_WITH_TOOLS) ## 1 to 200 simulated generators on real streams: rate at the trainer, what Redis holds
	@.venv/bin/python -m benchmarks.bench_simulated $(ARGS)

bench-queue: $(FULL_WITH_TOOLS) ## the steps of a run with and without 500 that wait beside it, on a simulated generator; minutes
	@.venv/bin/python -m benchmarks.bench_queue $(ARGS)

bench-generator: $(FULL_WITH_TOOLS) ## tokens/s from prompts stream to completions stream beside bare vLLM; ten minutes
	@.venv/bin/python -m benchmarks.bench_generator $(ARGS)

bench-agents: $(FULL_WITH_TOOLS) ## turns of agents through the sessions service beside the same turns straight at vLLM; twenty minutes
	@.venv/bin/python -m benchmarks.bench_agents $(ARGS)

bench-push: $(FULL_WITH_TOOLS) ## a weight push beside a bare broadcast of the same bytes, and what a delta saves; minutes
	@.venv/bin/python -m benchmarks.bench_push $(ARGS)

bench-push-model: $(FULL_WITH_TOOLS) ## pushes of 7B to 70B models by phase, at stated bandwidths, and a small push beside its model; minutes
	@.venv/bin/python -m benchmarks.bench_push_model $(ARGS)

bench-rewarder: $(FULL_WITH_TOOLS) ## concurrency, overhead, math-verify, hostile answers, a slow reward in a whole run; fifteen minutes
	@.venv/bin/python -m benchmarks.bench_rewarder $(ARGS)

fuzz: $(FULL) ## bad messages for every decoder, and whether one is surprised; ARGS="--cases 1000000 --seed 0"
	@.venv/bin/python -m tests.fuzz.run $(ARGS)

chaos: $(FULL) ## faults at random over the whole stack, and whether anything was lost; ARGS="--minutes 10 --seed 1"
	@.venv/bin/python -m benchmarks.chaos $(ARGS)

policy-scan: $(FULL_WITH_TOOLS) .venv-policy/.installed ## checkov on what the Helm chart renders, against a list of findings with reasons; `make test` does it too
	@.venv/bin/python deploy/helm/policy_scan.py .venv-policy/bin/checkov

release: $(FULL_WITH_TOOLS) ## build images and chart, push both to REGISTRY, write values with digests; needs Docker
	@.venv/bin/python deploy/release.py $(or $(REGISTRY),$(error say where to push to: make release REGISTRY=registry.example.com/team)) $(ARGS)

format: $(LIGHT) ## format the code, fix what lint can fix
	@.venv-check/bin/ruff check --fix-only --quiet .
	@.venv-check/bin/ruff format .

lock: $(LIGHT) ## resolve pyproject.toml anew and write requirements/*.txt
	@.venv-check/bin/python requirements/lock.py

clean: ## remove environments, caches, .headrace and runs: with checkpoints, models, keys and Redis data
	rm -rf .venv .venv-gpu .venv-check .venv-policy .headrace runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed-cpu: requirements/cpu.txt
	@requirements/make_venv.sh new .venv cpu

.venv/.installed-self: pyproject.toml .venv/.installed-cpu
	@requirements/make_venv.sh self .venv

.venv-gpu/.installed-gpu: pyproject.toml requirements/cpu.txt requirements/dev.txt requirements/test.txt
	@requirements/make_venv.sh gpu .venv-gpu

.venv/.installed-dev: requirements/dev.txt .venv/.installed-cpu
	@requirements/make_venv.sh add .venv dev

.venv/.installed-test: requirements/test.txt .venv/.installed-cpu
	@requirements/make_venv.sh add .venv test

# Not a must: without it, and without apt to get it from, the tests of alert rules are skipped.
$(PROMTOOL): | .venv/.installed-cpu
	@requirements/get_promtool.sh .venv

.venv-check/.installed-dev: requirements/dev.txt
	@requirements/make_venv.sh new .venv-check dev

# An environment of its own: what checkov pins, others need otherwise.
.venv-policy/.installed: .venv/.installed-cpu
	@rm -rf .venv-policy
	@.venv/bin/python -m venv --without-pip .venv-policy
	@.venv/bin/python -m pip --python .venv-policy/bin/python install --quiet checkov==3.3.30
	@touch $@
