"""The fake GPUs are as strict as real ones. These tests run on one of them, as a step of `simulate.py`."""

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from brigade.ranks.rank.api import device
from brigade.ranks.runner.ranks import RankFailure, run_ranks

NCCL = {"backend": "nccl", "share_gpu": True, "deadline": 120}


def compare_with_cpu():
    """Return the largest relative difference of some results from exact ones, and whether the results are repeated."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    on_gpu, wide = x.to(device()), x.double()
    pairs = {
        "product": (lambda: on_gpu @ on_gpu, wide @ wide),
        "gelu": (lambda: torch.nn.functional.gelu(on_gpu), torch.nn.functional.gelu(wide)),
        "whole numbers": (lambda: torch.arange(100.0, device=device()).sum(), torch.tensor(4950.0)),
    }
    errors = {
        name: float((run().cpu() - exact).abs().max() / exact.abs().max()) for name, (run, exact) in pairs.items()
    }
    on_cpu = x @ x
    same = {name: torch.equal(run(), run()) for name, (run, _) in pairs.items()}
    return {"errors": errors, "repeated": same, "as on the CPU": torch.equal(on_cpu, (on_gpu @ on_gpu).cpu())}


def test_results_differ_from_those_of_the_cpu_in_the_last_places():
    """A check for equal bits fails, as on a GPU, unless the result is exact or is repeated."""
    [found] = run_ranks(compare_with_cpu, world_size=1, **NCCL)
    assert all(found["repeated"].values()) and not found["as on the CPU"]
    assert found["errors"].pop("whole numbers") == 0
    assert all(1e-9 < error < 1e-6 for error in found["errors"].values()), found


def compute_product(allows_tf32, override):
    """Return the relative error of a product of matrices."""
    torch.backends.cuda.matmul.allow_tf32 = allows_tf32
    if override:
        os.environ["NVIDIA_TF32_OVERRIDE"] = override
    return compare_with_cpu()["errors"]["product"]


@pytest.mark.parametrize(("allows_tf32", "override", "is_used"), [(1, "", 1), (0, "", 0), (1, "0", 0), (0, "1", 1)])
def test_matrix_products_use_tf32_where_it_is_allowed(allows_tf32, override, is_used):
    [error] = run_ranks(compute_product, bool(allows_tf32), override, world_size=1, **NCCL)
    assert 1e-5 < error < 1e-3 if is_used else error < 1e-6


@pytest.mark.parametrize(("containers", "allows"), [("1", "True"), (None, "False")])
def test_the_variable_of_nvidias_containers_allows_tf32(containers, allows):
    """This is torch's own behaviour."""
    variables = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": containers} if containers else {}
    others = {name: value for name, value in os.environ.items() if name != "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}
    program = "import torch; print(torch.backends.cuda.matmul.allow_tf32)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=others | variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == allows


def reduce_in_two_ways(ring):
    """Return whether an all-reduce equals a reduce-scatter and an all-gather, and whether all ranks have its result."""
    os.environ["FAKENCCL_RING"] = ring
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.randn(301 * size, generator=torch.Generator().manual_seed(rank)).to(device())
    whole, shard = values.clone(), values.new_empty(301)
    dist.all_reduce(whole)
    dist.reduce_scatter_tensor(shard, values)
    gathered, others = torch.empty_like(whole), whole.clone()
    dist.all_gather_into_tensor(gathered, shard)
    dist.broadcast(others, 0)
    return torch.equal(gathered, whole), torch.equal(others, whole)


@pytest.mark.parametrize("ring", ["1", "0"])
def test_the_order_of_a_sum_depends_on_the_element(ring):
    results = run_ranks(reduce_in_two_ways, ring, world_size=3, **NCCL)
    assert [tuple(result) for result in results] == 3 * [(ring == "0", True)]


def create_group(interfaces):
    os.environ["NCCL_SOCKET_IFNAME"] = interfaces
    dist.new_group([0, 1])


@pytest.mark.parametrize("interfaces", ["lo", "=lo", "nothing,l", "^docker"])
def test_nccl_uses_the_interfaces_of_the_environment(interfaces):
    run_ranks(create_group, interfaces, **NCCL)


@pytest.mark.parametrize("interfaces", ["nothing", "=l", "^" + ",".join(name for _, name in socket.if_nameindex())])
def test_nccl_fails_without_such_an_interface(interfaces):
    with pytest.raises(RankFailure, match="NCCL error") as caught:
        run_ranks(create_group, interfaces, **NCCL)
    assert "no socket interface found" in str(caught.value)


def test_without_nvml_torch_counts_the_gpus_by_initialising_cuda():
    program = "import torch; print(torch.cuda._raw_device_count_nvml() < 0, torch.cuda.device_count())"
    for nvml, expected in (("0", "True 1"), ("1", "False 1")):
        environment = os.environ | {"FAKE_NVML": nvml, "FAKE_GPUS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
