# The virtual environment, for the course and for the student edition. requirements.txt contains the hash of each package.
#   PYTHON=python3.12              the Python that creates it (3.10 or newer)
#   TORCH_INDEX=https://...        the package index for torch, such as one with CPU builds only
#   TORCH=2.15.0                   another version of torch
#   BRIGADE_VENV=/opt/venv         the directory of the environment instead of .venv; can also be an environment variable
# requirements.txt has the hashes of the pinned torch on PyPI and in the index with CPU builds. From any other index, or of
# another version, torch and the CUDA packages that it needs are installed without hashes.

PYTHON ?= python3
SPACE := $(subst ,, )
VENV := $(subst $(SPACE),\ ,$(or $(BRIGADE_VENV),.venv))
BIN := $(VENV)/bin
# All users may read the packages, whatever the umask is, because a grader runs submissions as another user.
OPEN := umask 022 &&
PIP := $(OPEN) $(BIN)/python -m pip
INSTALLED := $(VENV)/installed
PINNED_TORCH := $(shell sed -n 's/^torch==\([^ ]*\).*/\1/p' requirements.txt)
TORCH ?= $(PINNED_TORCH)

.PHONY: setup clean

setup: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml
	$(make-environment)
	$(call install-locked,requirements.txt)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch "$@"
	@echo "Ready. Now run these two commands:"
	@echo "  source $(BIN)/activate"
	@echo "  brigade next"

define make-environment
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; choose one with PYTHON=...")'
	@echo "Creating $(VENV), then installing torch and other packages: 0.2 GB for torch without CUDA, and more with it."
	@echo "This takes 2 minutes from a fast index, and 8 or more on a slow or busy machine."
	@$(OPEN) $(PYTHON) -m venv $(VENV)
endef

# Install the packages of a file like requirements.txt. If torch does not come from PyPI as pinned, install it after all
# others, because its index has other versions of these.
install-locked = $(if $(TORCH_INDEX)$(filter-out $(PINNED_TORCH),$(TORCH)),$(install-torch-apart),$(PIP) install --require-hashes -r $(1))

define install-torch-apart
	awk '/^[a-z]/ { left_out = /^(torch==|triton==|cuda-|nvidia-)/ } !left_out' $(1) > $(VENV)/others.txt
	awk '/^[a-z]/ { torch = /^torch==/ } torch' $(1) > $(VENV)/torch.txt
	$(PIP) install --require-hashes -r $(VENV)/others.txt
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(if $(filter %/cpu+$(PINNED_TORCH),$(TORCH_INDEX)+$(TORCH)),--no-deps --require-hashes -r $(VENV)/torch.txt,torch==$(TORCH))
endef

clean:
	rm -rf $(VENV) out *.egg-info
