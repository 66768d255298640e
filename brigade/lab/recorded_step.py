"""Record what a variant does in one training step, by running its own code with tensors that have no memory.

Ranks import this file. One rank plays rank 0 of `world_size` ranks: its model is on the meta device, and its process
group only records. The model has the parameters and the units of the real one, but its layers compute nothing. In
forward and backward, a layer only notes that its parameters are used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.course.checks.tiny_lm import Block
from brigade.lab.engine import Engine, FullyShardEngine, TorchEngine, find_engine
from brigade.lab.memory_accounting import Bytes, count_kept_bytes, list_tensors_by_kind
from brigade.lab.planned_device import PlannedDevice, fully_shard_without_memory
from brigade.lab.timed_step import COPIES, is_in_submission
from brigade.ranks.rank import process_group, recording
from brigade.ranks.rank.memory import LiveMemory, get_local, list_tensors
from brigade.ranks.rank.recording_group import RecordingGroup

STEPS = 2  # the last one is recorded, because module 9 ends a step with all-gathers; torch DDP needs one step more
DIVISIONS = {"div", "div_", "mul", "mul_", "_foreach_div_", "_foreach_mul_"}
IN_PLACE = {"add_", "copy_", "div_", "fill_", "mul_", "zero_"}  # they need not run, because their outputs are known
IN_PLACE |= {"_foreach_copy_", "_foreach_div_", "_foreach_mul_", "_foreach_zero_"}
UNIT_COPIES = {"chunk_cat", "split_with_sizes_copy"}  # of `fully_shard`: into and out of what is sent
READS = {"_local_scalar_dense", "allclose", "equal"}  # values without memory: they count as 1 and as true
BACKEND = "planned"

# What `record_steps` returns for a step: its instructions, the bytes that the rank keeps after it, by kind, and those
# at the peak of the step, without activations. An instruction is ["forward" or "backward", parameter], ["copy" or
# "step", bytes read and written], ["wait", number of the launch], or ["launch", number, operation, bytes, ranks of the
# group, last rank].
Recorded = tuple[list[list[Any]], Bytes, int]


class Log(TorchDispatchMode):
    """A context manager that lists the instructions of a variant's step."""

    is_graded = False  # for `RecordingGroup`, to which the log is the recorder

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[list[Any]] = []
        self.num_launches = 0
        self.waiting: set[int] = set()  # the numbers of launches for which nobody has waited yet
        self.device = PlannedDevice(self)
        self.begin_step()
        self.is_in_step = False

    def begin_step(self) -> None:
        """Forget all instructions that this step does not wait for."""
        self.instructions = [one for one in self.instructions if self.is_pending(one)]
        # By storage: a tensor in it, and the launch on it that somebody may await through a future.
        self.futures: dict[int, tuple[Tensor, int]] = {}
        self.is_in_step = True

    def note(self, *instruction: Any) -> None:
        """Append an instruction."""
        self.instructions.append([*instruction])

    def wait(self, launch: int) -> None:
        """Append a wait, unless the rank has waited for the launch before."""
        if launch in self.waiting:
            self.waiting.discard(launch)
            self.note("wait", launch)

    def wait_for_futures(self) -> None:
        """Append waits for the launches whose futures may have been awaited, which nobody sees."""
        for _, launch in self.futures.values():
            self.wait(launch)

    def launch(self, **fields: Any) -> int:
        """Append a launch and return its number. `RecordingGroup` calls this."""
        number, ranks = self.num_launches, fields["ranks"]
        self.note("launch", number, fields["op"], fields["nbytes"], len(ranks), max(ranks))
        self.num_launches += 1
        self.waiting.add(number)
        return number

    def is_pending(self, instruction: list[Any]) -> bool:
        """Return whether this is a launch for which nobody has waited: it belongs to the next step."""
        return instruction[0] == "launch" and instruction[1] in self.waiting

    def find_owner(self, tensors: list[Tensor]) -> tuple[None, None]:
        """Return no name: `RecordingGroup` calls this before each launch."""
        return None, None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, has_no_values = describe(function)
        if has_no_values:
            return function(*args, **(kwargs or {}))
        inputs = [tensor for tensor in list_tensors([*args, *(kwargs or {}).values()]) if tensor.is_meta]
        if not inputs:
            return function(*args, **(kwargs or {}))
        if name in READS:
            return True
        written = args[0] if name in IN_PLACE else function(*args, **(kwargs or {}))
        result = None if name in IN_PLACE and name.startswith("_foreach") else written
        if not self.is_in_step:
            return result
        for tensor in inputs if self.futures else ():
            if awaited := self.futures.pop(tensor.untyped_storage()._cdata, None):
                self.wait(awaited[1])
        outputs = [tensor for tensor in list_tensors(written) if tensor.is_meta]
        overwritten = list_tensors((kwargs or {}).get("out"))
        is_copy = name in COPIES | UNIT_COPIES | DIVISIONS or (name == "add_" and is_in_submission(sys._getframe(1)))
        is_copy &= self.device.current is self.device.compute  # others run beside the computation
        # Python assigns a slice to itself at the end of `data[a:b] /= n`.
        if is_copy and not (name == "copy_" and locate(args[0]) == locate(args[1])):
            into = name in ("copy_", "_foreach_copy_")  # the first inputs are only written
            sources = inputs[len(outputs) :] if into else inputs[: len(inputs) - len(overwritten)]
            self.note("copy", sum(tensor.nbytes for tensor in (*sources, *(outputs or overwritten))))
        return result


def locate(tensor: Tensor) -> tuple[Any, ...]:
    """Return the storage of a tensor, and its place and length in it."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


@functools.cache
def describe(function: Any) -> tuple[str, bool]:
    """Return the name of an operation, and whether it neither reads nor writes values: a view or a new tensor."""
    name = function.overloadpacket.__name__
    return name, function.is_view or name.startswith("new_") or name.endswith("_like")


class Work(dist.Work):
    """The handle of a launch."""

    def __init__(self, log: Log, launch: int, outputs: list[Tensor]):
        super().__init__()
        self._log, self._launch, self._outputs = log, launch, outputs

    def wait(self, timeout: Any = None) -> bool:
        self._log.device.current.wait_launches({self._launch})
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        for tensor in self._outputs:
            self._log.futures[tensor.untyped_storage()._cdata] = tensor, self._launch
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class PlannedGroup(RecordingGroup):
    """Rank 0's process group, which performs nothing. Its log plays the recorder."""

    def __init__(self, log: Log, name: str, ranks: list[int]):
        dist.ProcessGroup.__init__(self, 0, len(ranks))
        process_group.register(self, "cpu")  # keeps the group's name, which `fully_shard` needs
        self._recorder: Any = log
        self._name, self._ranks = name, ranks

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work:
        tensors = [tensor for tensor in list_tensors(args) if tensor.is_meta]
        return Work(self._recorder, index, tensors)

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def getBackendName(self) -> str:
        return BACKEND


class Use(torch.autograd.Function):
    """A layer that only notes when it computes. Its input and its output have one element."""

    @staticmethod
    def forward(ctx: Any, log: Log, i: int, activation: Tensor, weight: Tensor) -> Tensor:
        ctx.what = log, i, weight
        log.note("forward", i)
        return torch.empty(1, device=weight.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        log, i, weight = ctx.what
        log.note("backward", i)
        return None, None, gradient, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


class Layer(nn.Module):
    """A layer with one parameter."""

    def __init__(self, log: Log | Notes, i: int, shape: Sequence[int], dtype: torch.dtype, device: str):
        super().__init__()
        self.log, self.i = log, i
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, activation: Tensor) -> Tensor:
        return Use.apply(self.log, self.i, activation, self.weight)


class Unit(Block):
    """Layers that are a unit of module 11."""

    def __init__(self, layers: Sequence[Layer]):
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(layers)

    def forward(self, activation: Tensor) -> Tensor:
        for layer in self.layers:
            activation = layer(activation)
        return activation


def make_model(
    log: Log | Notes, groups: Sequence[tuple[bool, Sequence[Sequence[int]]]], dtype: torch.dtype, device: str = "meta"
) -> nn.Module:
    """Return a model with these groups of parameters. A group consists of whether it is a unit, and of its shapes."""
    parts: list[nn.Module] = []
    i = 0
    for is_unit, shapes in groups:
        layers = [Layer(log, i + place, shape, dtype, device) for place, shape in enumerate(shapes)]
        i += len(layers)
        parts += [Unit(layers)] if is_unit else layers
    return nn.Sequential(*parts)


def make_optimizer(values: int, log: Log) -> type[torch.optim.Optimizer]:
    """Return an optimizer that keeps `values` values per element, and only notes what a step reads and writes."""

    class Planned(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            nbytes = 0
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                if not parameter.is_meta:
                    return super().step(closure)  # of a submission that tries the optimizer on small vectors
                if parameter.grad is not None:
                    nbytes += (2 + 1 + 2 * values) * get_local(parameter).nbytes  # it only reads the gradient
                    if not self.state[parameter]:
                        self.state[parameter] = {f"value {i}": torch.empty_like(parameter) for i in range(values)}
            log.note("step", nbytes)

    return Planned


def record_steps(setting: dict[str, Any], variants: Sequence[dict[str, Any]]) -> str:
    """Return, as JSON, a list with the recorded step of each variant, or a sentence that says why there is none.

    `setting` has the fields of `program.Setting`.
    """
    world_size = setting["world_size"]

    def make_group(options: Any, _: Any) -> PlannedGroup:
        return PlannedGroup(log, options.group_id, options.global_ranks_in_group or [*range(world_size)])

    dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=["cpu", "meta"])
    steps: list[Recorded | str] = []
    for variant in variants:
        log = Log()
        dist.destroy_process_group()  # of the previous variant, or of the rank
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=world_size)
        is_fully_sharded = find_engine(variant) is FullyShardEngine
        try:
            with fully_shard_without_memory(log.device) if is_fully_sharded else contextlib.nullcontext():
                steps.append(record_step(log, variant, setting))
        except NotImplementedError as part:
            steps.append(f"{part} is not written yet")
        except Exception as error:  # whatever a submission raises
            steps.append(f"it raises {type(error).__name__}: {error}")
    return json.dumps(steps)


def record_step(log: Log, variant: dict[str, Any], setting: dict[str, Any]) -> Recorded:
    """Take steps with one variant, and return the last one."""
    is_ddp = find_engine(variant) is TorchEngine
    if is_ddp:
        variant = variant | {"arguments": {"init_sync": False}}  # otherwise it compares what all ranks send
    compute_dtype = setting["compute_dtype"] and getattr(torch, setting["compute_dtype"])
    is_mixed = compute_dtype and "compute_dtype" in variant["takes"]
    model = make_model(log, setting["groups"], torch.float32 if is_mixed else getattr(torch, setting["dtype"]))
    workload = setting | {"learning_rate": 0.1, "optimizer": make_optimizer(setting["state_values"], log)}
    workload["compute_dtype"] = compute_dtype
    with log:
        engine = find_engine(variant)(variant, model, workload)
    for _ in range(STEPS - 1 + is_ddp):
        with log if is_ddp else contextlib.nullcontext():
            take_step(log, engine, setting["micro_batches"])
    with LiveMemory(list_tensors([*list_tensors_by_kind(engine).values()])) as memory, log:
        take_step(log, engine, setting["micro_batches"])
    instructions = [one for one in log.instructions if not log.is_pending(one)]
    return instructions, count_kept_bytes(engine), memory.peak


class Notes:
    """A log of real steps: the rank's own recorder has the launches and the waits, and layers add their uses."""

    is_in_step = False

    def note(self, *instruction: Any) -> None:
        """Record that a layer computes."""
        recording.note("layer", what=[*instruction])

    def begin_step(self) -> None:
        """Record that a step begins."""
        recording.note("step", step=0)

    def wait_for_futures(self) -> None:
        """Do nothing: a course's wrapper waits for handles."""


def take_real_steps(setting: dict[str, Any], variant: dict[str, Any]) -> None:
    """Take the steps that `record_steps` plans with real tensors on real ranks."""
    log = Notes()
    model = make_model(log, setting["groups"], getattr(torch, setting["dtype"]), "cpu")
    engine = find_engine(variant)(variant, model, setting | {"learning_rate": 0.1, "optimizer": "AdamW"})
    for _ in range(STEPS):
        take_step(log, engine, setting["micro_batches"])


def take_step(log: Log | Notes, engine: Engine, micro_batches: int) -> None:
    """Take a training step as `timed_step.take_step` does, with all micro-batches except the last one in `no_sync`."""
    log.begin_step()
    device = next(engine.parameters()).device
    engine.zero_grad()
    for i in range(micro_batches):
        with contextlib.nullcontext() if i == micro_batches - 1 else engine.no_sync():
            engine(torch.empty(1, device=device)).backward()
    log.wait_for_futures()
    engine.finish_grad_sync()
    log.wait_for_futures()
    engine.step()
    log.is_in_step = False
