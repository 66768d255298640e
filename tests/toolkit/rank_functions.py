"""Functions that ranks run in the tests of the toolkit. The tests import this file, and `run_ranks` sends its text."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import all_reduce as imported_by_another_name
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

from brigade.rank import emulated_link, recording
from brigade.rank.api import device, student
from brigade.rank.memory import LiveMemory
from brigade.rank.recording import phase

# ---- how a run ends: test_ranks.py


def whoami(*args: Any) -> dict[str, Any]:
    """Return this rank's number, world size, process id, working directory and arguments."""
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "pid": os.getpid(),
        "directory": os.getcwd(),
        "args": list(args),
    }


def search_memory(part: str, length: int, own: str) -> list[str]:
    """Return all strings in this process that have this length and begin with `part`.

    Search objects and callers' locals.
    """
    found = set()
    frame = sys._getframe()
    while frame:
        found |= set(strings_in(list(frame.f_locals.values())))
        frame = frame.f_back
    for container in gc.get_objects():
        if type(container) in (list, tuple, dict):
            found |= set(strings_in(container))
    return sorted(text for text in found if len(text) == length and text.startswith(part))


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in the first two levels of a container."""
    for item in list(value.values()) if type(value) is dict else list(value):
        if type(item) is str:
            yield item
        elif type(item) in (list, tuple, dict):
            yield from (inner for inner in (item.values() if type(item) is dict else item) if type(inner) is str)


def mounts() -> str:
    """Return the mounts that this rank sees."""
    with open("/proc/self/mounts") as file:
        return file.read()


def random_number() -> float:
    return torch.rand(()).item()


def scheduling() -> list[int]:
    """Return the scheduling policy of this process, and the number of gloo's threads for collectives."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [os.sched_getscheduler(0), names.count("pt_gloo_runloop")]


def cut_off() -> None:
    """On all ranks except 0, raise gloo's error for a connection to an ended process. Then kill rank 0."""
    if dist.get_rank():
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused")
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def reduce_once() -> float:
    """Return the sum of rank + 1 over all ranks."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def reduce_often(times: int) -> None:
    x = torch.zeros(2)
    for _ in range(times):
        dist.all_reduce(x)


def spawned(rank: int, world_size: int, file: str) -> None:
    """Call `reduce_once` in a process of torch.multiprocessing.spawn, which starts no process group itself."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    assert reduce_once() == sum(range(1, world_size + 1))
    os._exit(0)  # without it, gloo's threads abort some processes at exit


def write_file(name: str) -> str:
    with open(name, "w") as file:
        file.write("left here")
    return os.path.abspath(name)


def fail(rank: int, message: str) -> None:
    """Raise ValueError on one rank while the others wait for it."""
    print("before the error")
    if dist.get_rank() == rank:
        raise ValueError(message)
    dist.all_reduce(torch.ones(3))


def fail_in_a_collective() -> None:
    dist.all_reduce(torch.ones(3), op="not an operation")


def end(rank: int, how: str) -> None:
    """End the process of one rank without a result while the others wait for it."""
    if dist.get_rank() == rank:
        print("last words", flush=True)
        if how == "os._exit(0)":
            os._exit(0)
        elif how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
        elif how == "sys.exit":
            sys.exit("enough")
    dist.all_reduce(torch.ones(3))


def end_server() -> None:
    """On rank 0, kill the server from which the rank was forked."""
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def spin() -> None:
    """Run an endless loop on rank 1 while rank 0 waits for it."""
    if dist.get_rank() == 1:
        while True:  # HERE IT SPINS
            pass
    dist.all_reduce(torch.ones(3))


def forever() -> None:
    """Record the process id, then run forever."""
    recording.note("pid", pid=os.getpid())
    while True:
        time.sleep(0.01)


def leave_one_out(async_op: bool) -> None:
    """Make two launches on rank 0 and one on rank 1, which then returns without waiting."""
    model = nn.Linear(4, 2)
    recording.name_parameters(model)
    dist.all_reduce(model.bias.detach())
    if dist.get_rank() == 0:
        handle = dist.all_reduce(model.weight.detach(), async_op=async_op)
        if async_op:
            handle.wait()  # HERE IT WAITS


def cross_over() -> None:
    """Use two sub-groups of both ranks. In each, one rank waits for a launch that the other rank makes later."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    first = groups[dist.get_rank()]
    second = groups[1 - dist.get_rank()]
    dist.all_reduce(torch.ones(3), group=first)
    dist.all_reduce(torch.ones(3), group=second)


def create_group_on_rank_0() -> None:
    """Create a process group of both ranks on one rank only."""
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def hang_in_a_new_group() -> None:
    """Create a process group whose backends never connect."""
    recording.register_backends = lambda *_: time.sleep(100)
    dist.new_group([0, 1])


def read_visible_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def mix_devices(place: str, given: torch.Tensor) -> float:
    """Add a tensor on the device to one that, depending on `place`, is not on it: "job", "new", or no such tensor."""
    other = given if place == "job" else torch.ones(2) if place == "new" else given.to(device())
    return (torch.ones(2, device=device()) + other).sum().item()


def send_first() -> None:
    """Send to the next rank before receiving. No send ends, because no rank receives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(3), (rank + 1) % world_size)
    dist.recv(torch.empty(3), (rank - 1) % world_size)


def send_and_reduce() -> float:
    """Send a message from rank 0 to rank 1, while rank 2 does nothing. Then run an all-reduce on all three ranks."""
    rank, total = dist.get_rank(), torch.ones(1)
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        dist.recv(torch.empty(3), 0)
    dist.all_reduce(total)
    return total.item()


def slow_peer(seconds: float) -> float:
    """Delay rank 1 before an all-reduce. A slow rank is not a deadlock."""
    if dist.get_rank() == 1:
        time.sleep(seconds)
    return reduce_once()


def mismatch(how: str) -> None:
    """Call different collectives on ranks 0 and 1."""
    rank = dist.get_rank()
    small, large = torch.ones(3), torch.ones(50_000)
    if how == "size":
        dist.all_reduce([small, large][rank])
    elif how == "order":
        for tensor in [small, large] if rank == 0 else [large, small]:
            dist.all_reduce(tensor)
    elif how == "operation":
        dist.broadcast(small, src=0) if rank == 0 else dist.all_reduce(small)
    elif how == "dtype":
        dist.all_reduce(small if rank == 0 else small.double())
    elif how == "root":
        dist.broadcast(small, src=rank)
    elif how == "reduce op":
        dist.all_reduce(small, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)


def chatter(megabytes: int) -> int:
    """Print more than fits into a pipe, from Python and directly to the file descriptor."""
    for _ in range(megabytes):
        print("x" * 1_000_000)
        os.write(2, b"y" * 1000)
    return megabytes


def give_back(kind: str) -> Any:
    """Return a result on rank 1 that cannot be sent."""
    if dist.get_rank() == 0:
        return 1
    return {"object": object(), "function": give_back, "module": nn.Linear(1, 1)}[kind]


def write_to_channel(data: bytes) -> None:
    """Write directly to the sockets that connect rank 1 with the parent, then call an all-reduce."""
    if dist.get_rank() == 1:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                channel = socket.socket(fileno=os.dup(int(name)))
                if channel.family == socket.AF_UNIX:
                    channel.sendall(data)
    dist.all_reduce(torch.ones(3))


def frame(letter: bytes, body: bytes) -> bytes:
    """Return a message in the format of a rank: see `brigade.rank.channel`."""
    return letter + struct.pack("<Q", len(body)) + body


def start_daemon() -> list[int]:
    """Start processes outside this rank's session and process group. Return their ids."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    grandchild = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, start_new_session=True, check=True
    )
    return [child.pid, int(grandchild.stdout)]


def import_all(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def import_by_name(name: str) -> dict[str, Any]:
    """Import a module of the submission, and return its public strings by name."""
    module = importlib.import_module(name)
    return {key: value for key, value in vars(module).items() if not key.startswith("_") and isinstance(value, str)}


# ---- what is recorded: test_recording.py


def recorded_calls() -> None:
    """Call every kind of collective once, in a phase with its name."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0)
    first, last = 0, world - 1
    with phase("all_reduce"):
        dist.all_reduce(x.clone())
    with phase("all_reduce asynchronously"):
        dist.all_reduce(x.clone(), op=dist.ReduceOp.AVG, async_op=True).wait()
    with phase("all_reduce by another name"):
        imported_by_another_name(x.bfloat16(), op=dist.ReduceOp.MAX)
    with phase("reduce"):
        dist.reduce(x.clone(), dst=last)
    with phase("broadcast"):
        dist.broadcast(x.to(torch.int64), src=last)
    with phase("all_gather"):
        dist.all_gather([torch.empty(4) for _ in range(world)], x)
    with phase("all_gather_into_tensor"):
        dist.all_gather_into_tensor(torch.empty(4 * world), x)
    with phase("reduce_scatter"):
        dist.reduce_scatter(torch.empty(4), [x] * world)
    with phase("reduce_scatter_tensor"):
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * world))
    for name in ("all_gather_single", "reduce_scatter_single"):  # since torch 2.13
        if hasattr(dist, name):
            with phase(name):
                sizes = (4 * world, 4) if name == "all_gather_single" else (4, 4 * world)
                getattr(dist, name)(*(torch.ones(size) for size in sizes))
    with phase("gather"):
        dist.gather(x, [torch.empty(4) for _ in range(world)] if rank == first else None, dst=first)
    with phase("scatter"):
        dist.scatter(torch.empty(4), [x] * world if rank == first else None, src=first)
    with phase("all_to_all_single"):
        dist.all_to_all_single(torch.empty(2 * world), torch.ones(2 * world))
    with phase("barrier"):
        dist.barrier()
    with phase("send and recv"):
        if rank == first:
            dist.send(x, last)
        elif rank == last:
            dist.recv(torch.empty(4), first)
    with phase("recv from anyone"):
        if rank == first:
            dist.send(x, last)
        elif rank == last:
            assert dist.recv(torch.empty(4)) == first
    with phase("coalesced all_reduce"), coalescing_manager():
        for length in (1, 2, 3):
            dist.all_reduce(torch.ones(length))
    with phase("coalesced reduce_scatter"):
        with coalescing_manager(async_ops=True) as manager:
            for length in (1, 2):
                dist.reduce_scatter_tensor(torch.empty(length), torch.ones(world * length))
        manager.wait()
    with phase("coalesced all_gather"):
        with coalescing_manager(async_ops=True) as manager:
            for length in (1, 2):
                dist.all_gather_into_tensor(torch.empty(world * length), torch.ones(length))
        manager.wait()
    with phase("functional all_reduce"):
        functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()
    with phase("functional broadcast"):
        functional.broadcast(x, last, dist.group.WORLD).sum().item()
    with phase("broadcast_object_list"):
        dist.broadcast_object_list(["a", "b"] if rank == first else [None, None], src=first)
    with phase("all_gather_object"):
        found: list[Any] = [None] * world
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": other} for other in range(world)]


def recorded_subgroups() -> dict[str, Any]:
    """Call an all-reduce and a broadcast in groups that are created in several ways. Each phase names the way."""
    from torch.distributed.distributed_c10d import new_group as imported_new_group

    rank = dist.get_rank()
    groups = {
        "plain": dist.new_group([0, 2]),
        "with a backend": dist.new_group([2, 0], backend="gloo"),
        "backend by position": imported_new_group([0, 2], timedelta(seconds=30), "gloo"),
        "alone": dist.new_group([2], backend="gloo"),
    }
    sums = {}
    for name, group in groups.items():
        if rank == 2 or (rank == 0 and name != "alone"):
            x = torch.tensor([rank + 1.0])
            with phase(name):
                dist.all_reduce(x, group=group)
                dist.broadcast(torch.ones(5), src=2, group=group)
            sums[name] = x.item()
    return {"sums": sums, "backends": sorted({dist.get_backend(), dist.get_backend(dist.group.WORLD)})}


def readiness(how: str) -> None:
    """Run two backward passes of a watched model, whose hooks record events. `how` is the preparation of each pass."""
    model = nn.Linear(3, 2)
    recording.watch_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: recording.note("tensor hook", name=name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: recording.note("post hook", name=name))
    buffer = torch.zeros(2, 8)
    for _ in range(2):
        for parameter, memory in zip(model.parameters(), buffer):
            if how == "None":
                parameter.grad = None
            elif how == "views":
                parameter.grad = memory[: parameter.numel()].view(parameter.shape)
            elif how == "moved":
                parameter.data = parameter.data.clone()
        loss = model(torch.ones(1, 3)).sum()
        with recording.record_backward(loss):
            loss.backward()


def meddling(how: str) -> None:
    """Run one backward of a watched model while its hooks are manipulated. The bias may be unused."""
    model = nn.Linear(3, 2)
    recording.watch_gradients(model)
    node = torch.autograd.graph.get_gradient_edge(model.bias).node
    hooks = node.register_prehook(lambda gradients: None).hooks_dict_ref()
    own, *_ = hooks.values()

    def again() -> None:
        model.bias.sum().backward()

    output = model(torch.ones(1, 3)) if how != "unused" else torch.ones(1, 3) @ model.weight.T
    loss = output.sum()
    if how == "cleared":
        hooks.clear()
    if how == "replayed":  # out of the way while the bias is accumulated, and back for a backward of its own
        (identity, own), hooks_then = next(iter(hooks.items())), hooks
        hooks.clear()
        model.weight.register_post_accumulate_grad_hook(lambda _: hooks_then.update({identity: own}))
        model.weight.register_post_accumulate_grad_hook(lambda _: torch.enable_grad()(again)())
    if how == "called at another time":
        model.weight.register_post_accumulate_grad_hook(lambda _: own((torch.ones(2),)))
    if how == "twice":
        model.weight.register_post_accumulate_grad_hook(lambda _: torch.enable_grad()(again)())
    if how == "none in backward":
        with recording.record_backward(loss):
            pass
    with recording.record_backward(loss):
        loss.backward()
    if how == "afterwards":
        model.bias.sum().backward()
        own((torch.ones(2),))


def recorded_names() -> None:
    """Launch collectives on a parameter, a gradient, a copy, and two gradients at once."""
    model = nn.Linear(3, 2)
    recording.name_parameters(model)
    model(torch.ones(1, 3)).sum().backward()
    dist.broadcast(model.weight.detach(), src=0)
    dist.all_reduce(model.bias.grad)
    dist.all_reduce(model.weight.grad.clone())
    dist.all_reduce_coalesced([model.weight.grad, model.bias.grad])


def recorded_handles() -> None:
    """Wait for two launches in reverse order. Then learn the results of other launches in other ways."""
    first = dist.all_reduce(torch.ones(3), async_op=True)
    second = dist.all_reduce(torch.ones(4), async_op=True)
    with phase("finish"):
        second.wait()
        first.wait()
    third = dist.all_reduce(torch.ones(5), async_op=True)
    third.get_future().wait()
    forgotten = dist.all_reduce(torch.ones(6), async_op=True)
    while not forgotten.is_completed():
        time.sleep(0.001)
    assert forgotten.is_success()
    with phase("own"):
        recording.note("mark", text="from the scenario")
    with contextlib.suppress(KeyError), phase("interrupted"):
        raise KeyError
    recording.note("after")


def threads_launch() -> int:
    """Launch from two threads at once, each in its own group. Return the number of launches per thread."""
    groups = [dist.new_group(), dist.new_group()]

    def reduce(group: dist.ProcessGroup) -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(2), group=group)

    threads = [threading.Thread(target=reduce, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 50


def train_ddp() -> dict[str, Tensor]:
    """Take four steps with torch DDP and several buckets (the first one has 1 MiB). Return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 800), nn.BatchNorm1d(800), nn.Tanh(), nn.Linear(800, 400), nn.Linear(400, 9))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        with phase("forward"):
            loss = ddp(torch.randn(8, 30, generator=generator)).square().mean()
        with phase("backward"):
            loss.backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_ddp_twice() -> list[dict[str, Tensor]]:
    """Train with the recording group, then with plain gloo in the same process. Return the weights of both."""
    rank, world = dist.get_rank(), dist.get_world_size()
    recorded = train_ddp()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore("plain", world), rank=rank, world_size=world)
    assert not isinstance(dist.group.WORLD, recording.RecordingGroup)
    return [recorded, train_ddp()]


# ---- who gets a result: test_strict.py


def values(dtype: torch.dtype, *shape: int, rank: int | None = None) -> Tensor:
    """Return numbers between -50 and 50 that depend only on the rank and the shape. The tests compute them too."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 100 - 50).to(dtype)


def collectives(dtype: torch.dtype) -> dict[str, Callable[..., tuple[Any, list[Tensor]]]]:
    """Return functions by name. Each calls one collective, and returns its handle and this rank's outputs.

    Outputs are the tensors that the rank *receives*. The root of a broadcast has none.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def all_reduce(async_op: bool, op: Any = dist.ReduceOp.SUM, group: Any = None) -> tuple[Any, list[Tensor]]:
        x = values(dtype, 3, 5)
        return dist.all_reduce(x, op=op, group=group, async_op=async_op), [x]

    def all_reduce_view(async_op: bool) -> tuple[Any, list[Tensor]]:
        x = values(dtype, 12)
        return dist.all_reduce(x[3:7], async_op=async_op), [x[3:7]]

    def reduce(async_op: bool) -> tuple[Any, list[Tensor]]:
        x = values(dtype, 7)
        return dist.reduce(x, dst=1, async_op=async_op), [x] if rank == 1 else []

    def broadcast(async_op: bool) -> tuple[Any, list[Tensor]]:
        x = values(dtype, 7)
        return dist.broadcast(x, src=1, async_op=async_op), [] if rank == 1 else [x]

    def all_gather(async_op: bool) -> tuple[Any, list[Tensor]]:
        outputs = [torch.zeros(4, dtype=dtype) for _ in range(world)]
        return dist.all_gather(outputs, values(dtype, 4), async_op=async_op), outputs

    def all_gather_into_tensor(async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(world * 4, dtype=dtype)
        return dist.all_gather_into_tensor(output, values(dtype, 4), async_op=async_op), [output]

    def all_gather_in_place(async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(world, 4, dtype=dtype)
        output[rank] = values(dtype, 4)
        return dist.all_gather_into_tensor(output.view(-1), output[rank], async_op=async_op), [output]

    def reduce_scatter(async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(4, dtype=dtype)
        inputs = list(values(dtype, world, 4).unbind())
        return dist.reduce_scatter(output, inputs, async_op=async_op), [output]

    def reduce_scatter_tensor(async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(4, dtype=dtype)
        return dist.reduce_scatter_tensor(output, values(dtype, world * 4), async_op=async_op), [output]

    def reduce_scatter_in_place(async_op: bool) -> tuple[Any, list[Tensor]]:
        full = values(dtype, world, 4)
        return dist.reduce_scatter_tensor(full[rank], full.view(-1), async_op=async_op), [full[rank]]

    def gather(async_op: bool) -> tuple[Any, list[Tensor]]:
        outputs = [torch.zeros(4, dtype=dtype) for _ in range(world)] if rank == 0 else []
        return dist.gather(values(dtype, 4), outputs or None, dst=0, async_op=async_op), outputs

    def scatter(async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(4, dtype=dtype)
        inputs = list(values(dtype, world, 4).unbind()) if rank == 0 else None
        return dist.scatter(output, inputs, src=0, async_op=async_op), [output]

    def all_to_all_single(async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(world * 2, dtype=dtype)
        return dist.all_to_all_single(output, values(dtype, world * 2), async_op=async_op), [output]

    def coalesced(async_op: bool) -> tuple[Any, list[Tensor]]:
        tensors = [values(dtype, length) for length in (1, 2, 3)]
        with coalescing_manager(async_ops=async_op) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        return manager, tensors

    def coalesced_reduce_scatter(async_op: bool) -> tuple[Any, list[Tensor]]:
        outputs = [torch.zeros(length, dtype=dtype) for length in (1, 2)]
        with coalescing_manager(async_ops=async_op) as manager:
            for output in outputs:
                dist.reduce_scatter_tensor(output, values(dtype, world * len(output)))
        return manager, outputs

    def coalesced_all_gather(async_op: bool) -> tuple[Any, list[Tensor]]:
        outputs = [torch.zeros(world * length, dtype=dtype) for length in (1, 2)]
        with coalescing_manager(async_ops=async_op) as manager:
            for output in outputs:
                dist.all_gather_into_tensor(output, values(dtype, len(output) // world))
        return manager, outputs

    subgroup = dist.new_group([0, 1])

    def all_reduce_max(async_op: bool) -> tuple[Any, list[Tensor]]:
        return all_reduce(async_op, op=dist.ReduceOp.MAX)

    def all_reduce_average(async_op: bool) -> tuple[Any, list[Tensor]]:
        return all_reduce(async_op, op=dist.ReduceOp.AVG)

    def all_reduce_in_a_subgroup(async_op: bool) -> tuple[Any, list[Tensor]]:
        return all_reduce(async_op, group=subgroup) if rank < 2 else (None, [])

    every = [
        all_reduce, all_reduce_max, all_reduce_view, all_reduce_in_a_subgroup, reduce, broadcast,
        all_gather, all_gather_into_tensor, all_gather_in_place, reduce_scatter, reduce_scatter_tensor,
        reduce_scatter_in_place, gather, scatter, all_to_all_single, coalesced, coalesced_reduce_scatter,
        coalesced_all_gather,
    ]  # fmt: skip
    if dtype.is_floating_point:
        every.append(all_reduce_average)
    return {function.__name__: function for function in every}


def every_collective(dtype: torch.dtype, async_op: bool) -> dict[str, Any]:
    """Return this rank's outputs of each collective, before and after the wait (if there is a wait)."""
    found = {}
    for name, call in collectives(dtype).items():
        with phase(name):
            handle, outputs = call(async_op)
            before = [output.clone() for output in outputs]
            if async_op and handle is not None:
                handle.wait()
            found[name] = {"before": before, "after": [output.clone() for output in outputs]}
    return found


def deliver(how: str) -> dict[str, Any]:
    """Launch two all-reduces and wait on the second. Then get the result of the first in the given way."""
    first, second = torch.ones(3), torch.ones(2)
    one, two = dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)
    two.wait()
    time.sleep(0.05)  # time does not deliver either
    before = [first.clone(), second.clone()]
    answer = {
        "wait": one.wait,
        "wait with a timeout": lambda: one.wait(timedelta(seconds=5)),
        "result": one.result,
        "is_completed": one.is_completed,
        "get_future": lambda: one.get_future().value(),
        "synchronize": one.synchronize,
    }[how]()
    after = [first.clone(), second.clone()]
    first.fill_(7.0)
    one.wait()  # delivers once: what was written since then stays
    return {"before": before, "after": after, "answer": answer, "later": first}


def poll() -> list[bool]:
    """Ask whether a reduce-scatter is complete: once, and three times after another event. Gloo always says no."""
    handle = dist.reduce_scatter_tensor(torch.empty(1), torch.ones(dist.get_world_size()), async_op=True)
    answers = [handle.is_completed()]
    recording.note("other")
    return answers + [handle.is_completed() for _ in range(3)]


def change(where: str) -> dict[str, Any]:
    """Change or read the tensors of an all-gather or all-reduce between its launch and its wait."""
    x = torch.arange(4.0)
    output = torch.zeros(4 * dist.get_world_size())
    if where in ("input", "output", "reading"):
        handle = dist.all_gather_into_tensor(output, x, async_op=True)
    else:
        handle = dist.all_reduce(x, async_op=True)
    if where == "input":
        x[1] += 1
    elif where == "output":
        output.zero_()
    elif where == "reduced":
        x /= 2
    elif where == "data":
        x.data[0] = 5.0
    elif where == "reading":
        (x.sum() + output.sum()).item()
    handle.wait()
    x += 1  # afterwards it is nobody's business
    handle.wait()
    return {"input": x, "output": output}


def count_around_an_all_gather(numel: int) -> dict[str, int]:
    """Return the bytes alive after the launch of an all-gather, after its wait, and after its output is dropped."""
    shard = torch.ones(numel)
    with LiveMemory([shard]) as memory:
        full = torch.empty(numel * dist.get_world_size())
        handle = dist.all_gather_into_tensor(full, shard, async_op=True)
        launched = memory.total()
        handle.wait()
        waited = memory.total()
        assert torch.equal(handle.result()[0], full)
        del full
        return {"launched": launched, "waited": waited, "dropped": memory.total()}


def free_in_flight(which: str) -> None:
    """Free a tensor of an all-gather before its wait."""
    shard, full = torch.ones(4), torch.empty(4 * dist.get_world_size())
    handle = dist.all_gather_into_tensor(full, shard, async_op=True)
    {"input": shard, "output": full}[which].untyped_storage().resize_(0)
    handle.wait()


def hold(dtype: torch.dtype) -> dict[str, Any]:
    """Broadcast from rank 1. Return the tensor before and after the wait."""
    rank = dist.get_rank()
    x = torch.tensor([rank, 1, 1], dtype=dtype)
    handle = dist.broadcast(x, src=1, async_op=True)
    before = x.clone()
    handle.wait()
    return {"before": before, "after": x}


def reduce_to_first() -> dict[str, Tensor]:
    """Reduce to rank 0. Return this rank's tensor before and after the wait."""
    x = torch.full((3,), dist.get_rank() + 1.0)
    handle = dist.reduce(x, dst=0, async_op=True)
    before = x.clone()
    handle.wait()
    return {"before": before, "after": x}


def in_place_reduce_scatter() -> dict[str, Tensor]:
    """Reduce-scatter a buffer into one of its own shards. Return the whole buffer before and after the wait."""
    rank, world = dist.get_rank(), dist.get_world_size()
    full = values(torch.float64, world, 4)
    given = full.clone()
    handle = dist.reduce_scatter_tensor(full[rank], full.view(-1), async_op=True)
    before = full.clone()
    handle.wait()
    return {"given": given, "before": before, "after": full}


def strides() -> dict[str, Any]:
    """All-reduce a transposed tensor, and a leaf that requires a gradient."""
    given = values(torch.float64, 4, 6)
    transposed = given.clone().T
    dist.all_reduce(transposed)
    parameter = nn.Parameter(values(torch.float64, 5))
    with torch.no_grad():
        dist.all_reduce(parameter)
    return {
        "given": given,
        "transposed": transposed,
        "stride": list(transposed.stride()),
        "parameter": parameter.detach(),
    }


def coalesce_on_a_device() -> None:
    with coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(torch.ones(2))


def send_strided(op: str, kind: str) -> None:
    """Call a collective or a send with a transposed tensor, or with every second column of a tensor."""
    tensor = torch.ones(4, 6).T if kind == "transposed" else torch.ones(4, 6)[:, ::2]
    if op == "all_reduce":
        dist.all_reduce(tensor)
    elif op == "broadcast":
        dist.broadcast(tensor, 0)
    elif op == "all_gather":
        dist.all_gather([torch.empty(tensor.shape) for _ in range(dist.get_world_size())], tensor)
    else:
        dist.send(tensor, 1 - dist.get_rank())


def reduce_channels_last() -> list[float]:
    """All-reduce a batch of images and a batch of videos in a channels-last memory format."""
    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    videos = torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    for tensor in (images, videos):
        assert not tensor.is_contiguous()
        dist.all_reduce(tensor)
    return [images.mean().item(), videos.mean().item()]


# ---- what takes how long: test_emulated_link.py


def on_link(latency_s: float, bytes_per_s: float, name: str, *args: Any) -> Any:
    """Call another function of this file on an emulated link."""
    emulated_link.use(emulated_link.Link(latency_s, bytes_per_s))
    return globals()[name](*args)


def timed(call: Callable[[], Any]) -> float:
    """Return the duration of a call in seconds. All ranks start it together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wait_for_the_link(count: int) -> dict[str, float]:
    """Return durations in seconds: of one collective, of `count` collectives launched at once, and of other cases."""
    x = torch.ones(4)
    processor = time.process_time()
    one = timed(lambda: dist.all_reduce(x))
    processor = time.process_time() - processor

    def launch_all() -> None:
        for handle in [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(count)]:
            handle.wait()

    def launch_and_work() -> None:
        handle = dist.all_reduce(x, async_op=True)
        time.sleep(one)
        handle.wait()

    subgroup = dist.new_group([0, 1])
    return {
        "one": one,
        "processor": processor,
        "all": timed(launch_all),
        "overlapped": timed(launch_and_work),
        "subgroup": timed(lambda: dist.all_reduce(x, group=subgroup)),
        "barrier": timed(dist.barrier),
    }


def ask_for_completion() -> list[bool]:
    """Return whether a launch is complete immediately, and after the wait."""
    handle = dist.all_reduce(torch.ones(4), async_op=True)
    answers = [handle.is_completed()]
    handle.wait()
    return [*answers, handle.is_completed()]


def count_from_own_launch(name: str, *args: Any) -> Any:
    """Call another function of this file on a wrong link: each rank counts the time from its own launch."""
    free_at = 0.0
    ends: dict[int, tuple[float, float]] = {}

    def add(self: emulated_link.LaunchSeries, seconds: float) -> int:
        nonlocal free_at
        start = max(free_at, time.perf_counter())
        free_at = start + seconds
        ends[len(ends)] = start, free_at
        return len(ends) - 1

    emulated_link.LaunchSeries.add = add
    emulated_link.LaunchSeries.get_times = lambda self, number: ends[number]
    return globals()[name](*args)


def train_with_a_late_rank(wrapper: tuple[str, str] | None, late: int, late_s: float, ranks: list[int] | None) -> None:
    """Take three steps with a model of 8 parameters. Rank `late` sleeps before and during each backward.

    `wrapper` is the package and class of a submission's wrapper, or None for torch DDP. If `ranks` is given, only these
    ranks train, in their own group. After each of their steps, all ranks all-reduce a tensor.
    """
    group = dist.new_group(ranks) if ranks else None
    if ranks is None or dist.get_rank() in ranks:
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
        wrapper_class = student(*wrapper) if wrapper else nn.parallel.DistributedDataParallel
        accepted = inspect.signature(wrapper_class).parameters
        sizes = {"bucket_cap_mb": 0.006, "bucket_numel": 1500}
        ddp = wrapper_class(model, **{k: v for k, v in sizes.items() if k in accepted}, process_group=group)
    is_late = dist.get_rank() == late
    for _ in range(3):
        if ranks is None or dist.get_rank() in ranks:
            hidden = ddp(torch.ones(2, 32))
            hidden.register_hook(lambda _: time.sleep(late_s if is_late else 0.0))
            model[1].weight.register_hook(lambda _: time.sleep(late_s / 2 if is_late else 0.0))
            hidden.sum().backward()
            if wrapper:
                ddp.finish_grad_sync()
        if ranks:
            dist.all_reduce(torch.ones(8))


def every_op_with_a_late_rank(late: int, late_s: float) -> None:
    """Run five kinds of collectives. Rank `late` launches each of them late."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, whole = torch.ones(12), torch.ones(12 * size)
    for launch in (
        lambda: dist.broadcast(x, 0),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_gather_into_tensor(whole, x),
        lambda: dist.reduce_scatter_tensor(x, whole),
        lambda: dist.gather(x, list(whole.chunk(size)) if rank == 0 else None, 0),
    ):
        if rank == late:
            time.sleep(late_s)
        launch()


def launch_in_two_groups() -> None:
    """Launch on rank 0 in a group with rank 1, then in a group with rank 2.

    Rank 1 launches after rank 2 has finished.
    """
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    rank = dist.get_rank()
    for _ in range(3):
        if rank == 0:
            first = launch_in(groups[0])
        if rank != 1:
            launch_in(groups[1]).wait()
        dist.barrier()
        if rank == 1:
            first = launch_in(groups[0])
        if rank != 2:
            first.wait()


def launch_in(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(torch.ones(8), group=group, async_op=True)


def read_clock() -> float:
    return time.perf_counter()


def launch_without_rank_1() -> None:
    """Broadcast from rank 0 to a rank that never takes part."""
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(4), 0)
    else:
        time.sleep(60)


def train_ddp_with_a_peer_that_ends() -> None:
    """Train with torch DDP. Rank 1 ends after its first backward."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(3):
        ddp(torch.ones(2, 8)).sum().backward()
        if dist.get_rank() == 1:
            os._exit(0)


# ---- torch without its compiler and its kernels in Python: test_dynamo_stub.py


LEFT_OUT = ("torch._dynamo", "torch._dynamo.", "torch._decomp", "torch._refs", "torch._prims.")


def every_optimizer() -> list[str]:
    """Use each of torch's optimizers for dense gradients, and inspect the stack.

    Return the modules that this imported.
    """
    before = set(sys.modules)
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or name in ("Optimizer", "SparseAdam"):
            continue
        model = nn.Linear(3, 3)
        params = [model.weight] if name == "Muon" else list(model.parameters())
        optimizer = kind(params)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.ones(2, 3)).sum().backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step(lambda: torch.zeros(()))
        scheduler.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    inspect.stack()
    return sorted(name for name in set(sys.modules) - before if name.startswith(LEFT_OUT))


def train_with_torch_ddp() -> list[str]:
    """Run one backward with torch DDP. Return the imported modules of the compiler and the kernels."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    return sorted(name for name in sys.modules if name.startswith(LEFT_OUT[1:]))


def compile_something() -> dict:
    doubled = torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    optimizer.step()
    names = ("torch._dynamo.config", "torch._dynamo.utils")
    return {
        "doubled": doubled,
        "real": "DynamoStub" not in type(torch._dynamo).__name__,
        "submodules": [name for name in names if name in sys.modules],
    }


def import_a_submodule() -> dict:
    config = importlib.import_module("torch._dynamo.config")
    return {
        "same": config is torch._dynamo.config is sys.modules["torch._dynamo.config"],
        "real": "DynamoStub" not in type(sys.modules["torch._dynamo"]).__name__,
    }


def draw_with_a_generator() -> list:
    """Return whether two generators with the same seed agree, and the modules of `LEFT_OUT` that they imported."""
    first, second = (torch.rand(3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    return [torch.equal(first, second), sorted(name for name in sys.modules if name.startswith(LEFT_OUT[1:]))]


def embed_on_the_meta_device(use_kernels: str) -> list[int]:
    """Run `use_kernels`, and return the shape of an embedding, which needs a kernel in Python."""
    exec(use_kernels, {"torch": torch})
    return list(nn.Embedding(5, 3, device="meta")(torch.zeros(2, dtype=torch.long, device="meta")).shape)


def time_messages(nbytes: int) -> dict[str, float]:
    """Return the seconds on an emulated link for one message, two messages to one rank, and one in each direction."""
    emulated_link.use(emulated_link.Link(latency_s=0.05, bytes_per_s=1e6))
    rank, tensor = dist.get_rank(), torch.zeros(nbytes, dtype=torch.uint8)
    seconds = {}

    def measure(name, *calls):
        dist.barrier()
        began = time.perf_counter()
        for work in [call() for call in calls]:
            work.wait()
        seconds[name] = time.perf_counter() - began

    def send(to):
        return lambda: dist.isend(tensor, to)

    def receive(source):
        return lambda: dist.irecv(torch.zeros_like(tensor), source)

    measure("one", *{0: [send(1)], 1: [receive(0)]}.get(rank, []))
    measure("to one rank", *{0: [receive(1), receive(2)]}.get(rank, [send(0)]))
    measure("around", send((rank + 1) % 3), receive((rank - 1) % 3))
    return seconds


# ---- wrong input to module 11's wrapper: test_wrong_input.py


def call_wrongly() -> dict[str, str]:
    """Return the message of the exception that each wrong use of the fully sharded wrapper raises."""
    file = importlib.import_module("submission.m11_fully_sharded.fully_sharded")

    def wrap(unit_types: tuple[type[nn.Module], ...] = (nn.Linear,), **options: Any) -> nn.Module:
        return file.FullyShardedDDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), unit_types, **options)

    def forget_a_name() -> None:
        plan, file.plan_units = file.plan_units, lambda *arguments: plan(*arguments)[:-1]
        try:
            wrap()
        finally:
            file.plan_units = plan

    def run_backwards() -> None:
        ddp = wrap()
        ddp.module.forward = lambda x: ddp.module[0](ddp.module[2](x))
        ddp(torch.ones(2, 4))

    mistakes = {
        "types": lambda: wrap((nn.Conv1d,)),
        "prefetch": lambda: wrap(prefetch=-1),
        "no unit": forget_a_name,
        "outside": lambda: wrap().module[2](torch.ones(2, 4)),
        "order": run_backwards,
        "optimizer": lambda: wrap().make_optimizer(torch.optim.Adafactor, lr=0.1),
        "state_dict": lambda: wrap().state_dict(),
        "load_state_dict": lambda: wrap().load_state_dict({}),
        "other names": lambda: wrap().load_full_state_dict({"0.weight": torch.ones(4, 4)}),
    }
    messages = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            messages[name] = "accepted"
        except (RuntimeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    wrap().make_optimizer(torch.optim.AdamW, lr=0.1)
    return messages


# ---- methods that every rank must call: test_causes.py


def save_on_one_rank(module: int) -> None:
    """Train one step with module 8 or 11, then save a checkpoint on rank 0 only, as in a training script."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if module == 8:
        ddp = student("m07_cached_shards", "CachedDDP")(model)
        optimizer = student("m08_zero_optimizer", "ZeroOptimizer")(ddp, torch.optim.Adam)
        save = optimizer.state_dict
    else:
        ddp = student("m11_fully_sharded", "FullyShardedDDP")(model, (nn.Linear,))
        optimizer, save = torch.optim.Adam(ddp.shards()), ddp.full_state_dict
    for step in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        if step == 0 and dist.get_rank() == 0:
            save()
