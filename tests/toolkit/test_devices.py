"""No process touches a GPU unless its rank uses NCCL."""

import os
import subprocess
import sys

import pytest
from torch.optim import Optimizer

from brigade.course.modules import ROOT
from brigade.runner.ranks import run_ranks

# On a machine without a GPU, torch claims to have one and raises an exception if anybody uses it.
FAKE_GPU = """
import sys
from brigade.rank import dynamo_stub
dynamo_stub.import_torch()
import torch

class Touched(BaseException):
    pass

def touch(*args, **kwargs):
    raise Touched

for name in ("current_stream", "current_device_index", "set_stream", "synchronize", "memory_stats"):
    setattr(torch.accelerator, name, touch)
torch.accelerator.is_available = torch.cuda.is_available = torch.backends.cuda.is_built = lambda: True
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = torch.cuda.device_count = lambda: 2
for name in ("init", "_lazy_init", "is_current_stream_capturing", "current_stream", "current_device", "get_rng_state"):
    setattr(torch.cuda, name, touch)

def ask_cuda(self):  # as in torch 2.11
    if torch.backends.cuda.is_built() and torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing()

if sys.argv[1] == "2.11":
    Optimizer = torch.optim.Optimizer
    Optimizer._cuda_graph_capture_health_check = ask_cuda
    Optimizer._accelerator_graph_capture_health_check = lambda self: self._cuda_graph_capture_health_check()
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.zeros(1)
try:
    torch.optim.Adam([weight]).step()
except Touched:
    pass
else:
    raise AssertionError("this fake GPU does not notice the step of Adam")
"""

FORK_SERVER = """
from brigade.rank.fork_server import preload
preload(["brigade.checks.reference", "brigade.checks.tiny_lm"])
"""

PARENT = """
import random
from brigade.checks import plugin, reference
from brigade.runner.ranks import SERVER
for optimizer in reference.OPTIMIZERS:
    reference.Case(random.Random(1), "Plain", 2, steps=2, optimizer=optimizer).train()
"""


@pytest.mark.parametrize("version", ["2.11", "as installed"])  # 2.13 to 2.15 have other names
@pytest.mark.parametrize("program", [FORK_SERVER, PARENT], ids=["fork server", "parent"])
def test_nothing_touches_a_gpu_before_the_fork(version, program):
    command = [sys.executable, "-c", FAKE_GPU + program, version]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


def test_torch_has_one_of_the_names_that_the_parent_replaces():
    from brigade.checks.reference import GRAPH_CHECKS

    assert any(hasattr(Optimizer, name) for name in GRAPH_CHECKS)


def read_visible_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_ranks_with_gloo_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert list(run_ranks(read_visible_devices, world_size=2)) == ["", ""]
