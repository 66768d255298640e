# make demo and make test are all that a newcomer needs: each does its own set-up first.
#   PYTHON, TORCH_INDEX            see setup.mk
#   MODULE=3                       for make module and make unlock: which; for make figures: that module's timeline alone
#   GRADE_OPTIONS="--modules 1-4"  for make gradescope: options of `brigade grade`, used for every submission
#   MATRIX="3.12:2.13.0"           for make matrix: its pairs of Python and torch
#   HINTS=3                        for make student: also the third hints, which are almost the code
#   ANSWERS=1                      for make student: also the model answers to the written questions
#   GPU_OPTIONS="--minutes 9"      for make gpu-check: its options

.PHONY: help demo test module figures gradescope student unlock gpu-check claims promises soak matrix lint

help:
	@echo "make demo     train the ladder on real text, draw it, check one right and one wrong answer"
	@echo "make test     everything that must hold: lint, skeletons, graded checks, mutants, toolkit, notebooks"
	@echo "make module MODULE=3  run the tests of one module, after you have changed it"
	@echo "make setup    the virtual environment in .venv; then: source .venv/bin/activate"
	@echo "make figures  draw the pictures of the readings again, from runs on this machine"
	@echo "make gradescope  the autograder for Gradescope as out/gradescope.zip"
	@echo "make student  the course without its answers, for students, as out/student and out/student.zip"
	@echo "make unlock MODULE=5  the reference of one module, for students who are stuck on it, as out/unlock-5.zip"
	@echo "make gpu-check  checks, mutants and the ladder on NCCL; needs only a python3 with torch and pytest"
	@echo "make claims   the experiments behind the readings' claims, in a minute"
	@echo "make promises  measure what the course promises, on a machine that does nothing else"
	@echo "make soak     all graded checks 30 times while both cores are busy; about half an hour"
	@echo "make matrix   all tests on the oldest, the pinned and the newest torch, with Python 3.10 to 3.14"

demo: setup
	$(BIN)/python -m brigade.cli.demo

test: setup lint
	$(BIN)/python -m pytest -q -rs -n 3 --dist worksteal --target solutions

module: setup lint
	$(if $(MODULE),,$(error say which module, as in `make module MODULE=3`))
	$(BIN)/python -m pytest -q -rs -n 3 --dist worksteal --target solutions --module $(MODULE)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python tests/plain_words.py
	$(BIN)/brigade skeletons --check

figures: setup
	$(BIN)/python -m brigade.lab.figures $(MODULE)
	$(if $(MODULE),,$(BIN)/python -m brigade.lab.memory --target solutions)
	$(if $(MODULE),,$(BIN)/brigade bench --target solutions --comm-ratio 0.8 --png docs/ladder.png)

gradescope: setup
	$(BIN)/python -m brigade.cli.gradescope $(GRADE_OPTIONS)

student: setup
	$(BIN)/python -m brigade.course.student_edition $(if $(HINTS),--hints $(HINTS)) $(if $(ANSWERS),--answers)

unlock: setup
	$(if $(MODULE),,$(error say which module, as in `make unlock MODULE=5`))
	$(BIN)/python -m brigade.course.student_edition --unlock $(MODULE)

gpu-check:
	$(PYTHON) -m brigade.lab.gpu_check $(GPU_OPTIONS)

claims: setup
	$(BIN)/python -m brigade.lab.claims

promises: setup
	$(BIN)/python tests/promises.py

soak: setup
	$(BIN)/python tests/soak.py

matrix: setup
	$(BIN)/python tests/matrix.py $(MATRIX)

include setup.mk
