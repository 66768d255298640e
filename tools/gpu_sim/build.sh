#!/bin/sh
# Create DIR/venv: the CUDA build of torch with fake NVIDIA libraries. A second call builds the libraries again.
# Usage: ./build.sh DIR        Variables: PYTHON=python3, TORCH=2.13.0
set -eu

here=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] || { echo "usage: build.sh DIR" >&2; exit 2; }
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "build.sh: this needs Linux on x86-64" >&2; exit 1; }
for tool in g++ readelf nm; do
    command -v $tool > /dev/null || { echo "build.sh: $tool is missing; on Debian: apt install g++ binutils" >&2; exit 1; }
done
mkdir -p "$1"
dir=$(cd "$1" && pwd)
venv=$dir/venv
torch=${TORCH:-2.13.0}

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

install filelock typing-extensions sympy networkx jinja2 fsspec "setuptools>=77" numpy pytest rich psutil matplotlib ipyparallel ipykernel
# "===" compares the version as text, so pip cannot prefer a local build such as 2.13.0+cpu. Without --no-deps, torch
# would install 3 GB of NVIDIA libraries, which the fakes replace, and triton.
if ! "$venv/bin/python" -m pip show torch 2> /dev/null | grep -qx "Version: $torch"; then
    install --no-deps "torch===$torch"
fi
if [ ! -e "$dir/headers/nvidia/cu13/include/crt/host_defines.h" ]; then
    install --no-deps --upgrade --target "$dir/headers" nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
fi
if [ ! -e "$dir/headers/nvidia/cu13/include/cuda_runtime_api.h" ]; then
    echo "build.sh: the CUDA headers are missing in $dir/headers" >&2
    exit 1
fi

# Ranks of any user exchange data here if their environment was cleared.
mkdir -p "$venv/fake_gpu"
chmod 1777 "$venv/fake_gpu"
site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" "$here/make_libraries.py" "$site_packages" "$dir/headers" "$venv/fake_gpu" "$dir/work"
cp "$here"/python/*.py "$site_packages"
echo "import _fakecuda_hook" > "$site_packages/_fakecuda.pth"

FAKE_GPUS=1 "$here/run.sh" "$dir" python -c 'import torch; print(torch.__version__, torch.ones(2, device="cuda") + 1)'
