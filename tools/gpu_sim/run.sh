#!/bin/sh
# Run a command with fake GPUs: ./run.sh DIR COMMAND [ARGUMENT...]. FAKE_GPUS=2 ./run.sh ... gives it two.
set -eu

[ $# -ge 2 ] || { echo "usage: run.sh DIR COMMAND [ARGUMENT...]" >&2; exit 2; }
venv=$(cd "$1" && pwd)/venv
shift
[ -d "$venv/fake_gpu" ] || { echo "run.sh: run build.sh first; $venv is not complete" >&2; exit 1; }

export FAKE_GPUS="${FAKE_GPUS:-1}"
FAKENCCL_DIR=$(mktemp -d /dev/shm/fakenccl.XXXXXX)
export FAKENCCL_DIR
export VIRTUAL_ENV="$venv"
export PATH="$venv/bin:$PATH"
trap 'rm -rf "$FAKENCCL_DIR"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Processes whose environment is cleared read their settings here.
env | grep -E '^(FAKE_(GPUS|CUDA_LOG|DRIVER|NVML|ULPS)|FAKENCCL_(DELAY_US|LOG|RENDEZVOUS|RING|VERSION))=' > "$venv/fake_gpu/settings"
find "$venv/fake_gpu" -mindepth 1 -maxdepth 1 -type d -mmin +60 -exec rm -rf {} +

"$@"
