#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image. With DRY_RUN=1, it only prints the commands. TORCH_INDEX is
# the package index for torch, by default one with CPU builds. All packages have the hashes in requirements.txt and
# torch.txt, except torch and its CUDA packages from another index.
set -euo pipefail
cd "$(dirname "$0")"
umask 022 # submissions run as another user, who needs Python's packages
export DEBIAN_FRONTEND=noninteractive

run() {
    echo "+ $*"
    if [ -z "${DRY_RUN:-}" ]; then "$@"; fi
}

run apt-get update
run apt-get install --yes python3 python3-venv
run python3 -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 15) else "Python 3.10 to 3.14 is needed: use another base image")'
run python3 -m venv .venv
run .venv/bin/python -m pip install --quiet --require-hashes --requirement requirements.txt
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
case $index in
    */cpu) run .venv/bin/python -m pip install --quiet --index-url "$index" --no-deps --require-hashes --requirement torch.txt ;;
    *) run .venv/bin/python -m pip install --quiet --index-url "$index" "$(grep -o '^torch==[^ ]*' torch.txt)" ;;
esac
run chmod -R go-rwx tests solutions secret options
run .venv/bin/python -m brigade grade --submission solutions --modules 1 # the build log then shows 8 of 8 points
