# The virtual environment, for the course and for the student edition. requirements.txt contains the hash of each package.
#   PYTHON=python3.12              the Python that creates it (3.10 to 3.14: torch 2.13 has no wheel for others)
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
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 15) else "Python 3.10 to 3.14 is needed; choose one with PYTHON=...")'
	@echo "Creating $(VENV), then installing torch and other packages: 0.2 GB for torch without CUDA, and more with it."
	@echo "This takes 2 minutes from a fast index, and 8 or more on a slow or busy machine."
	@$(OPEN) $(PYTHON) -m venv $(VENV)
endef

# Install the packages of a file like requirements.txt. The installed torch says whether it needs the packages for CUDA.
define install-locked
	awk '/^[a-z]/ { is_left_out = /^(torch==|triton==|cuda-|nvidia-)/ } !is_left_out' $(1) > $(VENV)/others.txt
	awk '/^[a-z]/ { is_chosen = /^torch==/ } is_chosen' $(1) > $(VENV)/torch.txt
	awk '/^[a-z]/ { is_chosen = /^(triton==|cuda-|nvidia-)/ } is_chosen' $(1) > $(VENV)/cuda.txt
	$(PIP) install --require-hashes -r $(VENV)/others.txt
	$(if $(HAS_HASHES),$(install-torch),$(PIP) install $(FROM_INDEX) torch==$(TORCH))
endef

FROM_INDEX = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
HAS_HASHES = $(if $(filter $(PINNED_TORCH),$(TORCH)),$(if $(TORCH_INDEX),$(filter %/cpu,$(TORCH_INDEX)),yes))
NEEDS_CUDA := import importlib.metadata as m; print(*(r for r in m.requires("torch") if "nvidia" in r or "cuda" in r))

# pip prefers the wheels of an index that tells hashes, also to a CPU build on this machine. So it chooses before it compares.
define install-torch
	$(PIP) download --no-deps --only-binary :all: --dest $(VENV)/torch $(FROM_INDEX) torch==$(TORCH)
	$(PIP) install --no-deps --no-index --find-links $(VENV)/torch --require-hashes -r $(VENV)/torch.txt
	rm -r $(VENV)/torch
	if [ -n "$$($(BIN)/python -c '$(NEEDS_CUDA)')" ]; then $(PIP) install --require-hashes -r $(VENV)/cuda.txt; fi
endef

clean:
	rm -rf $(VENV) out *.egg-info
