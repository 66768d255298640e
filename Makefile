# make demo and make test are all that a newcomer needs: each does its own set-up first.
#   PYTHON=python3.12              which Python makes the virtual environment (3.10 or newer)
#   TORCH_INDEX=https://...        a package index to take torch from, such as one with CPU builds only
#   GRADE_OPTIONS="--modules 1-4"  for make gradescope: options of `brigade grade`, used for every submission
#   GPU_OPTIONS="--minutes 9"      for make gpu-check: its options

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: help demo test setup figures gradescope gpu-check claims promises soak lint clean

help:
	@echo "make demo     train the ladder on real text, draw it, check one right and one wrong answer"
	@echo "make test     everything that must hold: lint, skeletons, graded checks, mutants, toolkit, notebooks"
	@echo "make setup    the virtual environment in .venv; then: source .venv/bin/activate"
	@echo "make figures  draw the readings' pictures anew from runs on this machine"
	@echo "make gradescope  the autograder for Gradescope as out/gradescope.zip"
	@echo "make gpu-check  checks, mutants and the ladder on NCCL; needs only a python3 with torch and pytest"
	@echo "make claims   the experiments behind the readings' claims, in a minute"
	@echo "make promises  measure what the course promises, on a machine that does nothing else"
	@echo "make soak     all graded checks 30 times while both cores are busy; about half an hour"

demo: setup
	$(BIN)/python -m brigade.lab.demo

test: setup lint
	$(BIN)/python -m pytest -q --target solutions

setup: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; PYTHON=... names one")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) $(shell grep ^torch== requirements.txt))
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/brigade skeletons --check

figures: setup
	$(BIN)/python -m brigade.lab.figures
	$(BIN)/python -m brigade.lab.memory

gradescope: setup
	$(BIN)/python -m brigade.autograde.package $(GRADE_OPTIONS)

gpu-check:
	$(PYTHON) -m brigade.lab.gpu_check $(GPU_OPTIONS)

claims: setup
	$(BIN)/python -m brigade.lab.claims

promises: setup
	$(BIN)/python tests/promises.py

soak: setup
	$(BIN)/python tests/soak.py

clean:
	rm -rf $(VENV) out *.egg-info
