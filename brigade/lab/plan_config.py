"""What is planned: a model's parameters, their buckets, the optimizer, and how long a rank computes.

Which gradients share a bucket is decided by the solutions' own `plan_buckets` and `plan_layout`, in the student edition
by the student's. Gradients become ready in the reverse order of the parameters' registration, as TinyLM's do.
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
from brigade.course.submission import install, prepare_for_ranks, read
from brigade.lab.ladder import FP32_BYTES

PACKAGE = "planned_solutions"


@dataclass(frozen=True)
class Machine:
    """How long a rank computes, in seconds or bytes of memory traffic per second.

    `backward_s[i]` is the part of backward that ends with the gradient of parameter i, in the order of registration.
    The rest is for emulated links: what the real collective underneath takes of the processor, for each launch and for
    each byte, and `wake_s`, how long after the end of a collective a rank goes on that waits for it. A GPU does that
    beside its computation.
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
    """How many values an optimizer keeps of each element. AdamW's number of the step is not counted."""

    label: str
    values: int


OPTIMIZERS = {"adamw": Optimizer("AdamW", 2), "sgd": Optimizer("SGD with momentum", 1)}


@dataclass(frozen=True)
class Setting:
    """What is trained, and on what. `parameters` may be on the meta device; all have one dtype.

    `bucket_mb` counts MiB. Modules 5 to 8 accumulate and reduce the gradients of 16-bit parameters in fp32, and module
    8 keeps fp32 masters of them; everything else is of the parameters' dtype.
    """

    parameters: Sequence[nn.Parameter]
    world_size: int
    bucket_mb: float
    optimizer: Optimizer
    machine: Machine

    @property
    def itemsize(self) -> int:
        return self.parameters[0].element_size()

    @functools.cached_property
    def numel(self) -> int:
        """Of all parameters together."""
        return sum(parameter.numel() for parameter in self.parameters)

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """Of each parameter."""
        return [parameter.numel() * self.itemsize for parameter in self.parameters]

    @functools.cached_property
    def owned_bytes(self) -> list[int]:
        """Bytes of parameters on each rank, where whole parameters are divided, the largest first, evenly."""
        loads = [(0, rank) for rank in range(self.world_size)]
        for nbytes in sorted(self.nbytes, reverse=True):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + nbytes, rank))
        return [load for load, _ in sorted(loads, key=lambda one: one[1])]

    @functools.cached_property
    def capped_buckets(self) -> Buckets:
        """Module 4's buckets."""
        place = {parameter: i for i, parameter in enumerate(self.parameters)}
        with load_planner("plan_buckets") as plan_buckets:
            planned = plan_buckets(self.parameters, int(self.bucket_mb * 2**20))
            param_indices = [[place[parameter] for parameter in bucket] for bucket in planned]
        return Buckets(param_indices, [sum(self.nbytes[i] for i in bucket) for bucket in param_indices])

    @functools.cached_property
    def layout_buckets(self) -> Buckets:
        """The buckets of modules 5 to 8, padding included, in bytes of the gradients' dtype."""
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
    def torch_buckets(self) -> Buckets:
        """torch DDP's buckets from the second step on, with `bucket_cap_mb` given: each closes once it is full.

        torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size, in the order of readiness.
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
    """Which parameters share a launch, by number and in the order of readiness, and how many bytes it carries."""

    param_indices: list[list[int]]
    nbytes: list[int]


@functools.cache
def import_solution(name: str) -> Callable:
    """A public function of the solutions, imported in this process; in the student edition, of the student's own."""
    entry = find_module(name)
    install(PACKAGE, prepare_for_ranks(read(REFERENCE, entry.number).sources))
    return getattr(importlib.import_module(f"{PACKAGE}.{entry.package}.{entry.name}"), name)


@contextlib.contextmanager
def load_planner(name: str) -> Iterator[Callable]:
    """`solution(name)`. What is not written yet, or does not work in the student edition, becomes a CourseError."""
    try:
        yield import_solution(name)
    except NotImplementedError as part:
        raise CourseError(f"{part} is not written yet") from None
    except Exception as error:
        if HAS_SOLUTIONS or isinstance(error, CourseError):
            raise
        number = find_module(name).number
        raise CourseError(f"your own {name} does not work: `brigade check {number}` says more") from None
