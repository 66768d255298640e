"""No process touches a GPU unless its rank uses NCCL, and machines without a usable GPU get one line."""

import os
import re
import sys
import warnings

import hang_guard
import pytest
import torch
from in_ranks import basics as functions

from brigade.course.checks import run
from brigade.course.cli import check
from brigade.course.cli.main import main
from brigade.course.table.modules import ROOT
from brigade.ranks.errors import UserError
from brigade.ranks.rank.main import TF32_VARIABLES, forbid_tf32
from brigade.ranks.runner import machine
from brigade.ranks.runner.ranks import run_ranks
from brigade.ranks.runner.server import VISIBLE, Server

# On a machine without a GPU, torch claims to have one and raises an exception if anybody uses it.
FAKE_GPU = """
from brigade.ranks import dynamo_stub
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
from brigade.ranks.rank.fork_server import preload
preload(["brigade.course.checks.reference", "brigade.course.checks.tiny_lm"])
"""

PARENT = """
import random
from brigade.course.checks import plugin, reference
from brigade.ranks.runner.ranks import SERVER
for optimizer in reference.OPTIMIZERS:
    reference.Case(random.Random(1), "Plain", 2, steps=2, optimizer=optimizer).train()
"""


@pytest.mark.parametrize("program", [FORK_SERVER, PARENT], ids=["fork server", "parent"])
def test_nothing_touches_a_gpu_before_the_fork(program):
    hang_guard.run([sys.executable, "-c", FAKE_GPU + program], cwd=ROOT, check=True)


def test_ranks_with_gloo_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert list(run_ranks(functions.read_visible_devices, world_size=2)) == ["", ""]


# ---- machines that have no usable GPU

# (GPUs that torch counts, CUDA of torch, CUDA of the driver, CUDA_VISIBLE_DEVICES)
UNUSABLE = {
    "no driver": (0, "13.0", 0, None),
    "an old driver": (2, "13.0", 12040, None),
    "no GPU": (0, "13.0", 13000, None),
    "hidden GPUs": (0, "13.0", 13000, ""),
    "a build for CPUs": (0, None, 0, None),
}


@pytest.fixture
def pretend(monkeypatch):
    """Make torch and NVIDIA's library describe another machine."""

    def set_up(gpus, built="13.0", driver=13000, visible=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: warnings.warn("no NVML", stacklevel=2) or gpus)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(machine, "read_driver_version", lambda: driver)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_up


def test_a_machine_without_a_usable_gpu_gets_one_line(pretend, refuse, snapshot, recwarn):
    said = []
    for name, facts in UNUSABLE.items():
        pretend(*facts)
        assert machine.count_gpus() == 0
        lines = {
            refuse("check", 1, "--backend", "nccl", "--share-gpu"),
            refuse("bench", "--target", "solutions", "--backend", "nccl"),
            refuse("grade", "--submission", ROOT / "lessons", "--backend", "nccl"),
        }
        assert len(lines) == 1, "every command says the same"
        said.append(f"{name}: {lines.pop()}")
    assert not list(recwarn)
    snapshot("refusals.gpu", "".join(said))


def test_gpus_that_cannot_be_counted_get_one_line(pretend, tmp_path, monkeypatch, capsys):
    """As in a container that may compute with the GPUs, but has no library to manage them."""
    pretend(0, driver=0)
    monkeypatch.setattr(run, "FIRST_GPU", tmp_path / "nvidia0")
    monkeypatch.setattr(check, "check_once", lambda *arguments: 0)
    assert main(["check", "1"]) == 0 and capsys.readouterr().out == ""
    run.FIRST_GPU.touch()
    assert main(["check", "1"]) == 0
    assert "--backend nccl" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "1", "--backend", "gloo"]) == 0 and capsys.readouterr().out == ""
    pretend(1)
    assert main(["check", "1"]) == 0 and capsys.readouterr().out == ""


def test_more_ranks_than_gpus_get_one_line(pretend, capsys):
    pretend(1)
    assert main(["bench", "--target", "solutions", "--ranks", "2", "--backend", "nccl"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"\b2 GPUs.*\b1\b", error) and "--share-gpu" in error and error.count("\n") == 1


def test_ranks_share_a_gpu_only_if_there_are_too_few(pretend):
    pretend(1)
    with pytest.raises(UserError, match=r"\b2 GPUs\b"):
        machine.make_nccl_environments(2, share_gpu=False)
    shared = machine.make_nccl_environments(2, share_gpu=True)
    assert len({variables["NCCL_HOSTID"] for variables in shared}) == 2
    assert {variables["NCCL_MAX_CTAS"] for variables in shared} == {"1"}
    assert {variables["NCCL_RUNTIME_CONNECT"] for variables in shared} == {"0"}
    pretend(2, driver=0)  # an unknown driver is no problem
    assert machine.count_gpus() == 2
    assert machine.make_nccl_environments(2, share_gpu=True) == [{"NCCL_RUNTIME_CONNECT": "0"}] * 2


@pytest.mark.parametrize("sandbox", [None, "some"])
def test_ranks_of_one_machine_use_its_loopback_interface(sandbox, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")  # as docs/gpus.md tells users of several machines
    server = Server()
    server.sandbox = sandbox
    environment = server._make_environment()
    loopback = machine.find_loopback_interface()
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == loopback != "eth0"


def test_ranks_on_gpus_compute_in_full_float32(monkeypatch):
    cudnn = torch.backends.cudnn.allow_tf32
    for name in TF32_VARIABLES:
        monkeypatch.setenv(name, "1")
    torch.set_float32_matmul_precision("high")
    try:
        forbid_tf32()
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32 and not set(TF32_VARIABLES) & os.environ.keys()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = cudnn


def test_ranks_in_a_sandbox_see_the_variables_that_select_a_gpu():
    seen = ["PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"]
    hidden = ["NVIDIA_API_KEY", "HOME", "AWS_SECRET_ACCESS_KEY", "MY_PATH"]
    assert [name for name in seen + hidden if VISIBLE.fullmatch(name)] == seen
