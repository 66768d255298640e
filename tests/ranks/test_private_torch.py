"""Torch's private names that the course uses: each test shows what breaks if torch changes one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from brigade.lab.planned_device import PlannedDevice, fully_shard_without_memory
from brigade.ranks.rank import process_group
from brigade.ranks.runner.machine import find_loopback_interface
from brigade.ranks.runner.ranks import run_ranks

COALESCE = "coalesce in solutions/m06_coalesced/coalesced.py needs "


def test_names_of_the_coalescing_manager():
    assert callable(getattr(c10d, "_coalescing_manager", None)), COALESCE + "c10d._coalescing_manager"
    assert isinstance(c10d._world.pg_coalesce_state, dict), COALESCE + "c10d._world.pg_coalesce_state, by group"


def capture() -> list[tuple[str, bool, int]]:
    """Return what the manager knows about the calls in its block."""
    tensors = [torch.ones(2), torch.ones(3)]
    with c10d._coalescing_manager(async_ops=True) as handle:
        for tensor in tensors:
            dist.all_reduce(tensor)
        calls = c10d._world.pg_coalesce_state[dist.group.WORLD]
        found = [(call.op.__name__, call.redop == dist.ReduceOp.SUM, call.tensor.numel()) for call in calls]
    handle.wait()
    assert [tensor.sum().item() for tensor in tensors] == [4.0, 6.0]
    return found


def test_behaviour_of_the_coalescing_manager():
    calls = [("all_reduce", True, 2), ("all_reduce", True, 3)]
    assert list(run_ranks(capture, world_size=2, mode="record")) == [calls] * 2, COALESCE + "op, redop and tensor"


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_grad_scaler_asks_the_optimizer_before_it_decides(factor):
    """Its step reads `_step_supports_amp_scaling`, as modules 8 and 15 expect."""

    class Refusing(torch.optim.SGD):
        @property
        def _step_supports_amp_scaling(self):
            raise RuntimeError("refused")

    weight = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum() * factor).backward()
    with pytest.raises(RuntimeError, match="refused"):
        scaler.step(Refusing([weight]))


@pytest.mark.parametrize("interfaces", ["", find_loopback_interface()])
def test_options_of_gloo(interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    options = process_group.make_gloo_options(timedelta(seconds=7))
    needs = "gloo_options in brigade/ranks/rank/process_group.py needs "
    assert options._timeout == timedelta(seconds=7) and options._threads == 1, needs + "_timeout and _threads"
    assert len(options._devices) == 1, needs + "_devices, from create_device and create_default_device"
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    assert group.options._threads == 1 and group.options._timeout == timedelta(seconds=7)


def test_node_of_a_gradient():
    """The node accumulates the gradient, even if the parameter's data is a view of another tensor."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    runs = []
    node.register_prehook(lambda gradients: runs.append(gradients[0].tolist()))
    parameter.data = torch.ones(8)[2:5]
    (2 * parameter).sum().backward()
    assert runs == [[2.0] * 3]


def test_stand_in_for_a_backend():
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 2)
    process_group.register(group, "cpu")
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0], "FakeProcessGroup is expected to do nothing"


def test_version_of_a_tensor():
    """It counts writes into this tensor, but not those into the memory that `data` shares with another tensor."""
    whole, parameter = torch.zeros(4), torch.nn.Parameter(torch.zeros(2))
    parameter.data = whole[:2]
    before = parameter._version
    whole.fill_(1.0)
    needs = "FlatShard in solutions/m11_fully_sharded/flat_shard.py needs "
    assert parameter._version == before, needs + "a count of its own for a tensor whose data was set"
    with torch.no_grad():
        parameter.fill_(2.0)
    assert parameter._version > before, needs + "_version"


def test_function_that_autograd_calls_at_the_end_of_a_backward():
    from situations.torch_suite import call_after_backward  # which ranks of this file cannot import

    calls = []
    weight = torch.nn.Parameter(torch.ones(2))
    product = 2 * weight
    product.register_hook(lambda _: call_after_backward(lambda: calls.append(weight.grad.tolist())))
    product.sum().backward()
    assert calls == [[2.0, 2.0]], "refusals.py and tests/situations/torch_suite.py need queue_callback of the engine"


def test_function_of_the_gradient_scaler():
    """GradScaler looks for infinities with one function. Its second argument says what it has found."""
    calls = []

    class Grad(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args, kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs or {})
            calls.append((function.__name__, [float(found) for found in args[1:2]]))
            return result

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("inf")])
    parameter.grad.__class__ = Grad
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], 1.0))
    needs = "ShardGrad in solutions/m01_naive_ddp/refusals.py needs "
    assert ("_amp_foreach_non_finite_check_and_unscale_", [1.0]) in calls, needs + "this function of GradScaler"


def test_names_of_fully_shard():
    """It refuses tensors without memory in one method, and finds the streams of a device in the module of its name."""
    from torch.distributed.device_mesh import _get_device_handle  # here, because ranks import this file
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    needs = "fully_shard_without_memory in brigade/lab/planned_device.py needs "
    refuse = FSDPParamGroup._validate_no_meta_params
    device = PlannedDevice(None)
    with fully_shard_without_memory(device):
        assert FSDPParamGroup._validate_no_meta_params is not refuse, needs + "FSDPParamGroup._validate_no_meta_params"
        assert _get_device_handle("meta") is device, needs + "the attribute of torch with the name of a device"
    assert FSDPParamGroup._validate_no_meta_params is refuse and not hasattr(torch, "meta")
