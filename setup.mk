# The virtual environment, for the course and for the student edition.
#   PYTHON=python3.12              the Python that creates it (3.10 or newer)
#   TORCH_INDEX=https://...        the package index for torch, such as one with CPU builds only
#   BRIGADE_VENV=/opt/venv         the directory of the environment instead of .venv; can also be an environment variable

PYTHON ?= python3
SPACE := $(subst ,, )
VENV := $(subst $(SPACE),\ ,$(or $(BRIGADE_VENV),.venv))
BIN := $(VENV)/bin
# All users may read the packages, whatever the umask is, because a grader runs submissions as another user.
OPEN := umask 022 &&
PIP := $(OPEN) $(BIN)/python -m pip
INSTALLED := $(VENV)/installed
DEMO := $(VENV)/installed-for-demo

.PHONY: setup setup-demo clean

setup: $(INSTALLED)

setup-demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))

$(INSTALLED): requirements.txt pyproject.toml
	$(make-environment)
	$(PIP) install -r requirements.txt
	@$(PIP) install --quiet --no-deps --editable .
	@touch "$@"
	@echo "Ready. Now run these two commands:"
	@echo "  source $(BIN)/activate"
	@echo "  brigade next"

$(DEMO): requirements.txt pyproject.toml
	$(make-environment)
	$(PIP) install --constraint requirements.txt --editable .[demo]
	@touch "$@"

define make-environment
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; choose one with PYTHON=...")'
	@echo "Creating $(VENV), then installing torch and other packages: 0.2 GB for torch without CUDA, and more with it."
	@echo "This takes 2 minutes from a fast index, and 8 or more on a slow or busy machine."
	@$(OPEN) $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install --index-url $(TORCH_INDEX) $(shell grep ^torch== requirements.txt))
endef

clean:
	rm -rf $(VENV) out *.egg-info
