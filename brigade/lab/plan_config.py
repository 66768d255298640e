"""The inputs of a plan: a model's parameters, their buckets, the optimizer, and the speed of a rank.

The solutions' own `plan_buckets` and `plan_layout` decide which gradients share a bucket; in the student edition, the
student's functions do. A plan assumes that gradients become ready in the reverse order of the parameters' registration,
as in TinyLM.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from brigade.course.modules import HAS_SOLUTIONS, REFERENCE, CourseError, find_module
from brigade.course.submission import install, read
from brigade.lab.ladder import FP32_BYTES

PACKAGE = "planned_solutions"


@dataclass(frozen=True)
class Machine:
    """The speed of a rank, in seconds or in bytes of memory traffic per second.

    `backward_s[i]` is the time of the part of backward that ends with the gradient of parameter i. Parameters are in
    the order of registration. The last three fields describe emulated links. `launch_s` and `launch_s_per_byte` are the
    processor time that the real collective takes, per launch and per byte. `wake_s` is the time from the end of a
    collective until a waiting rank continues. On a GPU, these three are zero, because communication runs concurrently.
    """

    forward_s: float
    backward_s: tuple[float, ...]
    step_bytes_per_s: float
    copy_bytes_per_s: float
    launch_s: float = 0.0
    launch_s_per_byte: float = 0.0
    wake_s: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, and the number of values that it keeps per element, without AdamW's step counter."""

    label: str
    values: int


OPTIMIZERS = {"adamw": Optimizer("AdamW", 2), "sgd": Optimizer("SGD with momentum", 1)}


@dataclass(frozen=True)
class Setting:
    """The training run to plan: the parameters, the ranks, the buckets, the optimizer, the machine and the units.

    `parameters` may be on the meta device; all have the same dtype. `bucket_mb` is in MiB. Modules 5 to 8 accumulate
    and reduce the gradients of 16-bit parameters in fp32, and module 8 keeps fp32 main parameters. Everything else has
    the dtype of the parameters. `units[i]` contains the indices of the parameters of unit i of module 11; unit 0 is the
    root.
    """

    parameters: Sequence[nn.Parameter]
    world_size: int
    bucket_mb: float
    optimizer: Optimizer
    machine: Machine
    units: Sequence[Sequence[int]] = ((),)

    @property
    def itemsize(self) -> int:
        return self.parameters[0].element_size()

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements of all parameters together."""
        return sum(parameter.numel() for parameter in self.parameters)

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """The bytes of each parameter."""
        return [parameter.numel() * self.itemsize for parameter in self.parameters]

    @functools.cached_property
    def owned_bytes(self) -> list[int]:
        """The bytes that each rank owns if whole parameters are assigned to ranks, the largest parameter first."""
        loads = [(0, rank) for rank in range(self.world_size)]
        for nbytes in sorted(self.nbytes, reverse=True):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + nbytes, rank))
        return [load for load, _ in sorted(loads, key=lambda entry: entry[1])]

    @functools.cached_property
    def capped_buckets(self) -> Buckets:
        """The buckets of module 4."""
        index_of = {parameter: i for i, parameter in enumerate(self.parameters)}
        with load_planner("plan_buckets") as plan_buckets:
            planned = plan_buckets(self.parameters, int(self.bucket_mb * 2**20))
            param_indices = [[index_of[parameter] for parameter in bucket] for bucket in planned]
        return Buckets(param_indices, [sum(self.nbytes[i] for i in bucket) for bucket in param_indices])

    @functools.cached_property
    def layout_buckets(self) -> Buckets:
        """The buckets of modules 5 to 8, including padding, in bytes of the gradients' dtype."""
        backwards = range(len(self.parameters))[::-1]
        bucket_numel = max(1, int(self.bucket_mb * 2**20 / FP32_BYTES))
        numels = [self.parameters[i].numel() for i in backwards]
        with load_planner("plan_layout") as plan_layout:
            layout = plan_layout(numels, bucket_numel, self.world_size)
            param_indices: list[list[int]] = [[] for _ in layout.bucket_ranges]
            for i, bucket in zip(backwards, layout.bucket_of):
                param_indices[bucket].append(i)
            return Buckets(param_indices, [(end - start) * FP32_BYTES for start, end in layout.bucket_ranges])

    @functools.cached_property
    def unit_bytes(self) -> list[int]:
        """The bytes of each unit of module 11, including padding."""
        with load_planner("plan_layout") as plan_layout:
            numels = [[self.parameters[i].numel() for i in unit] for unit in self.units]
            return [self.itemsize * plan_layout(unit, None, self.world_size).numel if unit else 0 for unit in numels]

    @functools.cached_property
    def torch_buckets(self) -> Buckets:
        """The buckets of torch DDP from the second step on, with `bucket_cap_mb`: each bucket closes once it is full.

        See compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp. This function receives
        parameters in the order in which their gradients become ready.
        """
        param_indices: list[list[int]] = []
        nbytes = 0
        for i in range(len(self.parameters))[::-1]:
            if not param_indices or nbytes >= int(self.bucket_mb * 2**20):
                param_indices.append([])
                nbytes = 0
            param_indices[-1].append(i)
            nbytes += self.nbytes[i]
        return Buckets(param_indices, [sum(self.nbytes[i] for i in bucket) for bucket in param_indices])


@dataclass(frozen=True)
class Buckets:
    """The parameters of each bucket, by index and in the order of readiness, and the bytes of each bucket's launch."""

    param_indices: list[list[int]]
    nbytes: list[int]

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        return zip(self.param_indices, self.nbytes)


@functools.cache
def import_solution(name: str) -> Callable:
    """Import a public function of the solutions into this process and return it.

    In the student edition, import the student's own function.
    """
    entry = find_module(name)
    install(PACKAGE, read(REFERENCE, entry.number).sources)
    return getattr(importlib.import_module(f"{PACKAGE}.{entry.package}.{entry.name}"), name)


@contextlib.contextmanager
def load_planner(name: str) -> Iterator[Callable]:
    """Yield `import_solution(name)`. In the block, errors of unwritten or broken student code become CourseError."""
    try:
        yield import_solution(name)
    except NotImplementedError as part:
        raise CourseError(f"{part} is not written yet") from None
    except Exception as error:
        if HAS_SOLUTIONS or isinstance(error, CourseError):
            raise
        number = find_module(name).number
        raise CourseError(f"your own {name} does not work: `brigade check {number}` tells you more") from None
