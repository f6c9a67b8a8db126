# Everything happens in environments in this folder, which are made when they are needed.
PY ?= python3
BIN := .venv/bin
# Test files that run at a time: real workers mostly wait for each other.
N ?= 2
PARALLEL := -n $(N) --dist loadfile --no-loadscope-reorder
# What `make test-versions` installs, and its tests: whatever calls PyTorch or transformers, and whole runs.
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.22.2
CORE := tests/distributed/test_golden_curves.py tests/distributed/test_any_layout.py tests/distributed/test_lora.py \
	tests/distributed/test_resume.py tests/test_cli.py tests/test_api.py tests/test_readme.py tests/batch tests/checkpoint \
	tests/comm tests/cpu tests/model tests/roles tests/rollout tests/train tests/weights
# The tests of a first hour, which `make test-wheel` runs from an installed wheel.
FIRST_HOUR := tests/test_wheel.py tests/test_readme.py tests/test_cli.py tests/examples/test_sorting.py tests/page/test_server.py
# The tests of extras: with `[dev]` alone they skip.
EXTRAS := tests/observe/test_trackers.py tests/reward/test_reward_gym.py tests/reward/test_reward_math.py \
	tests/agents/test_adapters.py tests/agents/test_environment_adapters.py tests/examples/test_verifiers.py \
	tests/distributed/test_optimizers_resume.py tests/train/test_adamw8bit.py \
	tests/distributed/test_ray.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm test-cuda test-extras test-harnesses test-wheel test-versions lint slow bench setup clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do \
		printf '  make %-15s %s\n' "$$name" "$$what"; done

demo: setup  ## a small model learns to sort: SFT, then GRPO, on two workers; minutes on a laptop
	OMP_NUM_THREADS=1 $(BIN)/python examples/sorting/demo.py

setup: .venv/ready  ## .venv, with PyTorch for CPU and all that the tests need

lint: setup  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: setup lint  ## lint, and all tests but the slow ones; N=4 runs four files at a time
	$(BIN)/pytest $(PARALLEL)

slow: setup  ## the tests that take minutes
	$(BIN)/pytest $(PARALLEL) -m slow

test-vllm: .venv-vllm/ready  ## the real vLLM, for CPU, in .venv-vllm
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest $(PARALLEL) tests/vllm_engine

test-extras: .venv-extras/ready  ## trackers, Ray, gyms, math-verify, verifiers and torchao as they are, in .venv-extras
	PATH="$(CURDIR)/.venv-extras/bin:$$PATH" OMP_NUM_THREADS=1 .venv-extras/bin/pytest -m '' $(EXTRAS)

test-harnesses: setup .venv-harness/ready  ## agents of other projects as they are, also Claude Code and Codex, with npm
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/agents/test_harnesses.py

test-cuda: .venv-cuda/ready  ## what PyTorch's build for CUDA has, without a GPU or a driver, in .venv-cuda
	OMP_NUM_THREADS=1 .venv-cuda/bin/pytest -m slow tests/accelerator/test_cuda_build.py

test-wheel: .venv-wheel/ready  ## the first hour of a user, from a wheel in an environment without the source tree
	rm -rf dist
	.venv-wheel/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	.venv-wheel/bin/pip install --quiet --no-deps --force-reinstall dist/*.whl
	OMP_NUM_THREADS=1 .venv-wheel/bin/pytest -m 'not slow' $(FIRST_HOUR)

test-versions:  ## the core tests with other versions: PY=python3.13 TORCH=2.15.0 TRANSFORMERS=5.23.0
	$(PY) -m venv --clear .venv-versions
	.venv-versions/bin/pip install --quiet torch==$(TORCH)
	.venv-versions/bin/pip install --quiet torch==$(TORCH) transformers==$(TRANSFORMERS) --editable '.[dev]'
	OMP_NUM_THREADS=1 .venv-versions/bin/pytest $(PARALLEL) $(CORE)

bench: setup  ## every benchmark; each prints one JSON object as its last line
	$(BIN)/python bench/routes.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/exchange.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/long.py
	$(BIN)/python bench/recall.py
	$(BIN)/python bench/rollout.py
	$(BIN)/python bench/step.py
	$(BIN)/python bench/learn.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/soak.py
	$(BIN)/python bench/chaos.py
	$(BIN)/python bench/determinism.py
	$(BIN)/python bench/fuzz.py
	$(BIN)/python bench/page.py
	$(BIN)/python bench/agents.py
	$(BIN)/python bench/overlap.py
	$(BIN)/python bench/staleness_curve.py
	$(BIN)/python bench/walk.py
	$(BIN)/python bench/rehearsal.py

clean:  ## removes the environments, caches and runs
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis dist runs

# PyTorch first and pinned, so that nothing else chooses a build of it.
.venv/ready: pyproject.toml constraints.txt
	$(PY) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.PHONY: docs
docs: setup  ## the documentation as a site, in build/site; links are checked
	$(BIN)/mkdocs build --strict

# vLLM for CPU pins versions of its own, and asks for packages of which there is no build for CPUs: nothing is resolved.
.venv-vllm/ready: requirements-vllm.txt pyproject.toml
	$(PY) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet torch==2.13.0
	.venv-vllm/bin/pip install --quiet --no-deps -r requirements-vllm.txt
	.venv-vllm/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# PyPI's build is for CUDA; `===` leaves out others of this version, such as one for CPUs that pip has been pointed to.
.venv-cuda/ready: pyproject.toml constraints.txt
	$(PY) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet torch===2.13.0
	.venv-cuda/bin/pip install --quiet --constraint constraints.txt --editable . hypothesis pytest pytest-timeout
	touch $@

# Pinned, with all that they ask for, as a new version of a tracker may break its tests.
.venv-extras/ready: requirements-extras.txt constraints.txt pyproject.toml
	$(PY) -m venv .venv-extras
	.venv-extras/bin/pip install --quiet --constraint constraints.txt torch
	.venv-extras/bin/pip install --quiet --no-deps -r requirements-extras.txt
	.venv-extras/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Agents, each with its own idea of what it depends on: none of it is installed for anything else.
.venv-harness/ready: tests/harnesses/requirements.txt tests/harnesses/package.json
	$(PY) -m venv .venv-harness
	.venv-harness/bin/pip install --quiet -r tests/harnesses/requirements.txt
	cp tests/harnesses/package.json .venv-harness/
	npm install --silent --prefix .venv-harness
	touch $@

# What the wheel itself asks for, so that a requirement that is missing is missed; and what the tests need.
.venv-wheel/ready: pyproject.toml constraints.txt
	$(PY) -m venv --clear .venv-wheel
	.venv-wheel/bin/pip install --quiet --constraint constraints.txt torch
	.venv-wheel/bin/pip install --quiet --constraint constraints.txt '.[completion,page]' hypothesis pytest pytest-timeout
	touch $@
