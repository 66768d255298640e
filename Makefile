# A newcomer needs only make demo and make test. Both create the virtual environment first.
#   PYTHON, TORCH_INDEX, TORCH     see tools/setup.mk
#   EVERYTHING=1                   for make test: also run the tests marked "extended"
#   MODULE=3                       for make module and make new: the module; for make figures, notebooks and slides: do this module only
#   NAME=lockstep                  for make new: the name of the module's file
#   GRADE_OPTIONS="--modules 1-4"  for make gradescope: options of `brigade grade`, used for every submission
#   MATRIX="3.12:2.13.0"           for make matrix: the pairs of Python and torch (default: oldest, pinned and newest)
#   STUDENT=1                      for make site: build the site of the student edition instead
#   HINTS=3                        for make student: include the third hints, which are almost the code
#   BACKEND=gloo                   for make gpu-check: try it without a GPU
#   GPU_OPTIONS="--minutes 9"      for make gpu-check and make gpu-sim: options of the command
#   LOCK="--upgrade"               for make lock: options of `uv pip compile`; TORCH=2.15.0 pins another torch
#   SOAK="tests/test_m03*.py"      for make soak: what pytest runs
#   ROWS=umask-077,space           for make rehearsal: only these surroundings; space+zip is one row with both

COURSE := $(if $(STUDENT),out/student,.)
BACKEND ?= nccl
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell -D- -Dtests/plain_words.txt && \
    $(BIN)/lint-imports --no-logo && $(BIN)/python -m tools.size && $(BIN)/brigade skeletons --check && $(BIN)/mypy
SITE := $(if $(STUDENT),student-site,site)

# Containers often set it. Every process of make test would then compile all tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test module new figures notebooks slides site gradescope student post-mortem package coverage gpu-check gpu-sim validate-plan promises soak matrix rehearsal cluster lint lock setup-demo

help:
	@echo "make demo             train with every core module on real text, plot the result, check one correct and one wrong answer"
	@echo "make test             run all tests: lint, skeletons, graded checks, mutants, toolkit, notebooks"
	@echo "make module MODULE=3  run the tests of one module, which also list what it lacks, after you have changed it"
	@echo "make new MODULE=18 NAME=lockstep  write the files of a new module, in which TODO marks what is missing"
	@echo "make coverage         run all tests, and print which part of brigade they execute, ranks included"
	@echo "make setup            create the virtual environment .venv; then run: source .venv/bin/activate"
	@echo "make figures          draw the pictures of the readings again, from runs on this machine"
	@echo "make notebooks        execute all notebooks and store their outputs; do not run anything else at the same time"
	@echo "make slides           write a deck of slides for each notebook to out/slides"
	@echo "make site             build the course's site, out/site; with STUDENT=1, build the students' site, out/student-site"
	@echo "make gradescope       write the autograder for Gradescope, out/gradescope.zip"
	@echo "make student          write the course without its answers, out/student and out/student.zip"
	@echo "make post-mortem      write module 13's program as one file, out/post_mortem.py, which needs only Python"
	@echo "make package          write out/bucket_brigade-*.whl, with which students run brigade init and brigade update"
	@echo "make gpu-check        run checks, mutants and the benchmark on NCCL, and write a report to out/gpu_run;"
	@echo "                      needs only a python3 with torch, pytest and rich"
	@echo "make gpu-sim          do the same and more on simulated GPUs; downloads 0.6 GB, needs Linux on x86-64 and g++"
	@echo "make validate-plan    compare the plans of docs/published.tsv with what was measured, in seconds and without a GPU"
	@echo "make promises         measure what the course promises; do not run anything else at the same time"
	@echo "make soak             run all graded checks with 30 seeds; takes about half an hour"
	@echo "make matrix           run all tests on the oldest, the pinned and the newest torch, with Python 3.10 to 3.14"
	@echo "make rehearsal        run make demo and make test in surroundings that break programs; takes hours"
	@echo "make cluster          run the Slurm jobs on a cluster of two nodes on this machine; needs root and Debian's slurm-wlm"
	@echo "make lock             write requirements.txt again, which pins all packages of pyproject.toml with their hashes"
	@echo "make clean            remove .venv and out"

demo: setup-demo
	$(BIN)/python -m brigade.lab.cli.demo

# Lint runs beside the tests. If it finds something, it prints this immediately and, because tests follow, at the end again.
test: setup
	@mkdir -p out
	@{ { $(LINT); } > out/lint.txt 2>&1 || { cat out/lint.txt; false; }; } & lint=$$!; \
	$(BIN)/python -m pytest -q -rs -n auto --target solutions $(if $(EVERYTHING),--everything); tests=$$?; \
	wait $$lint || { cat out/lint.txt; exit 1; }; exit $$tests

module: setup
	$(if $(MODULE),,$(error name a module, as in `make module MODULE=3`))
	$(BIN)/ruff check .
	$(BIN)/brigade skeletons --check
	$(BIN)/python -m pytest -q -rs -n 2 --target solutions --module $(MODULE)

new: setup
	$(if $(MODULE),,$(error name a module, as in `make new MODULE=18 NAME=lockstep`))
	$(BIN)/python -m tools.module $(MODULE) $(NAME)

coverage: setup
	rm -rf out/coverage && mkdir -p out/coverage
	-$(BIN)/coverage run -m pytest -q -n auto --target solutions
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --sort=cover

lint: setup
	$(LINT)

lock: setup
	$(BIN)/python -m tools.lock $(if $(TORCH),--torch $(TORCH)) $(if $(LOCK),-- $(LOCK))

figures: setup
	$(BIN)/python -m tools.figures $(MODULE)
	$(if $(MODULE),,$(BIN)/brigade bench --target solutions --comm-ratio 0.8 --png docs/ladder.png)
	$(if $(MODULE),,$(BIN)/python lessons/capstone/train.py --target solutions --png lessons/capstone/pictures/losses.png)

notebooks: setup
	$(BIN)/python -m tools.notebook_files $(MODULE)

slides: setup
	$(BIN)/python -m tools.slides $(MODULE)

site: setup $(if $(STUDENT),student)
	rm -rf out/$(SITE)
	$(if $(STUDENT),,$(BIN)/python site/pyodide.py)
	$(BIN)/python -m sphinx -q -E -W --keep-going -d out/doctrees -c $(COURSE)/site $(COURSE) out/$(SITE)
	@echo "out/$(SITE)/index.html is the start page"

gradescope: setup
	$(BIN)/python -m tools.gradescope $(GRADE_OPTIONS)

student: setup
	$(BIN)/python -m tools.student_edition $(if $(HINTS),--hints $(HINTS))

post-mortem: setup
	mkdir -p out
	$(BIN)/python -m brigade.course.cli.post_mortem out/post_mortem.py

package: student
	cp out/student.zip brigade/course/student.zip
	$(BIN)/python -m brigade.course.cli.post_mortem brigade/course/post_mortem.py
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir out .
	rm -rf build brigade/course/student.zip brigade/course/post_mortem.py

gpu-check:
	$(PYTHON) tools/gpu_first_run.py out/gpu_run --backend $(BACKEND) $(GPU_OPTIONS)

gpu-sim:
	$(PYTHON) -m tools.gpu_sim.simulate $(GPU_OPTIONS)

validate-plan: setup
	$(BIN)/python -m tools.validate_plan

promises: setup
	$(BIN)/python -m tools.promises

soak: setup
	@failed=; for seed in $$(seq 0 29); do \
	    $(BIN)/python -m pytest -q --target solutions --seed $$seed $(or $(SOAK),tests/test_m*.py) || failed="$$failed $$seed"; \
	done; echo "failed with seeds:$${failed:- none}"; [ -z "$$failed" ]

MATRIX ?= 3.10:2.11.0 3.12:2.13.0 3.14:2.15.0

# Each pair has a virtual environment and a log in out/matrix. A pair whose Python is missing fails.
matrix:
	@failed=; for pair in $(MATRIX); do \
	    python=python$${pair%:*}; torch=$${pair#*:}; home=out/matrix/$$python-torch$$torch; mkdir -p $$home; \
	    { make setup PYTHON=$$python TORCH=$$torch BRIGADE_VENV=$$home/venv && \
	      $$home/venv/bin/python -m pytest -q -rs -n auto --target solutions; \
	    } > $$home/tests.log 2>&1 || failed="$$failed $$pair"; \
	    echo "$$pair: $$(tail -n 1 $$home/tests.log)"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed; see out/matrix"; exit 1; }

rehearsal: setup
	$(BIN)/python -m tools.rehearsal $(if $(ROWS),--rows $(ROWS))

cluster: setup
	$(BIN)/python -m tools.cluster

include tools/setup.mk

# `make demo` needs few of the packages.
DEMO := $(VENV)/installed-for-demo

setup-demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))

$(DEMO): requirements.txt pyproject.toml
	$(make-environment)
	$(PYTHON) -m tools.lock torch pytest rich jinja2 matplotlib numpy setuptools > $(VENV)/demo.txt
	$(call install-locked,$(VENV)/demo.txt)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch "$@"
