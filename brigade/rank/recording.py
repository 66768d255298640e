"""A process group that records every collective, and changes nothing else.

In every rank, `RecordingGroup` receives all collective calls and passes them on to gloo or NCCL. The calls come from
the submission (on the default group or on a sub-group that it created) and from torch DDP's C++ reducer.

`brigade/events.py` lists the kinds of events and their fields. The parent uses it to read the events. Scenarios add
their own kinds with `note`.

Student code has access to groups and handles. It could communicate without being recorded, or change the record. In
runs with a switch, the switch therefore does only what the record says (`brigade/switch/switch.py`).
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import perf_counter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from brigade.course.submission import PACKAGE
from brigade.rank import api
from brigade.rank.memory import list_tensors, uncounted
from brigade.switch.switch import draw_halved

BACKEND = "brigade"  # the name under which the recording group is registered with torch
SAMPLE = 16  # entries that a rank reports at a border, or a few more
GLOO_THREADS = 1  # torch's default of 2 can damage the memory of a rank: see docs/gloo_memory.md


class Recorder:
    """Number the launches of a rank, add times and phases to its events, and pass the events to `sink`."""

    def __init__(self, sink: Callable[[dict[str, Any]], None]):
        # One phase for all threads, because on CUDA, hooks run in autograd's threads. "setup" is `events.OUTSIDE`.
        self.phase = "setup"
        self._sink = sink
        self.progress = 0  # events so far, except ends of transfers, which come at any time
        self._launches = 0
        self._lock = threading.RLock()
        self.parameters: dict[str, torch.nn.Parameter] = {}  # whose names are recorded with launches on them
        self._nodes: list[Any] = []  # that accumulate the watched gradients

    def note(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        with self._lock:
            self.progress += kind != "end"
            self._sink({"kind": kind, "time": perf_counter(), "phase": self.phase, **fields})

    def launch(self, **fields: Any) -> int:
        """Record a launch and return its number."""
        with self._lock:
            index = self._launches
            self._launches += 1
            self.note("launch", index=index, **fields)
        return index

    def watch_gradients(self, module: torch.nn.Module) -> None:
        """In the phase "backward", record an event "ready" just before a gradient of the module is added to `.grad`.

        The hook belongs to the node of the autograd graph, because a wrapper may clear a parameter's own hooks. It runs
        after the parameter's tensor hooks and before its post-accumulate hooks.
        """

        def note_ready(name: str, gradients: Sequence[torch.Tensor | None]) -> None:
            if gradients[0] is not None and self.phase == "backward":
                self.note("ready", name=name)

        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._nodes.append(node)  # keeps it alive, which the parameter does not
                node.register_prehook(functools.partial(note_ready, name))

    def find_owner(self, tensors: list[torch.Tensor]) -> tuple[str | None, str | None]:
        """Return the name of the parameter whose memory a launch uses, and "weight" or "gradient".

        Return (None, None) for a copy, or for several tensors.
        """
        if len(tensors) != 1:
            return None, None
        address, numel = tensors[0].data_ptr(), tensors[0].numel()
        for name, parameter in self.parameters.items():
            if parameter.numel() != numel:
                continue
            if parameter.data_ptr() == address:
                return name, "weight"
            if parameter.grad is not None and parameter.grad.data_ptr() == address:
                return name, "gradient"
        return None, None


_recorder = Recorder(lambda event: None)  # outside a rank, nobody listens
_seeds: Sequence[Sequence[int]] = ()  # of borders, by batch; empty if a switch has them
_switch: Any = None


def install(recorder: Recorder, seeds: Sequence[Sequence[int]] = (), switch: Any = None) -> None:
    """Make `recorder` the recorder of the functions below in this process. `switch` is the channel to a switch."""
    global _recorder, _seeds, _switch
    _recorder, _seeds, _switch = recorder, seeds, switch


def ask(batch: int, number: int, x: torch.Tensor) -> torch.Tensor:
    """Return which entries of `x` at a border are halved, and record that the rank knows it from now on.

    The event has some of the entries, as float32 in hexadecimal.
    """
    values = sample(x).numpy().tobytes().hex()
    note("border", batch=batch, number=number, numel=x.numel(), values=values)
    if _seeds:
        return draw_halved(_seeds[batch][number], x.numel())
    return torch.frombuffer(_switch.receive_answer(), dtype=torch.uint8)


def sample(x: torch.Tensor) -> torch.Tensor:
    """Return some entries of a tensor, as float32 on the CPU."""
    return x.flatten()[:: max(1, x.numel() // SAMPLE)].to("cpu", torch.float32)


def note(kind: str, **fields: Any) -> None:
    """Record an event of a scenario's own kind. Outside a rank, this has no effect."""
    _recorder.note(kind, **fields)


def name_parameters(module: torch.nn.Module) -> None:
    """Record later launches on a parameter of `module`, or on its current gradient, with the parameter's name."""
    _recorder.parameters = dict(module.named_parameters())


def watch_gradients(module: torch.nn.Module) -> None:
    """From now on, record when gradients of `module` become ready: see `Recorder.watch_gradients`."""
    _recorder.watch_gradients(module)


def follow_backward(output: torch.Tensor) -> None:
    """Record the phase "backward", with "ready" events, in any backward through `output`."""
    recorder = _recorder

    def note_start(_: Sequence[torch.Tensor | None]) -> None:
        if recorder.phase != "backward":  # a backward may pass several outputs
            before, recorder.phase = recorder.phase, "backward"
            recorder.note("phase")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: setattr(recorder, "phase", before))

    if output.grad_fn is not None:
        output.grad_fn.register_prehook(note_start)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Record events in the block with this phase: "construct", "forward", "backward", "finish" or "step"."""
    recorder = _recorder
    before, recorder.phase = recorder.phase, name
    recorder.note("phase")  # in case the phase hangs before it records another event
    try:
        yield
    finally:
        recorder.phase = before


class RecordedWork(dist.Work):
    """The handle of one launch. It passes all calls on and records waits."""

    def __init__(self, inner: dist.Work, recorder: Recorder, index: int):
        super().__init__()
        self._inner = inner
        self._recorder = recorder
        self._index = index
        self._ends_with_wait = False
        self._follow_end()

    def _follow_end(self) -> None:
        """Record when the launch is complete. Without a future, that is when the first wait ends."""
        try:
            self._inner.get_future().add_done_callback(lambda _: self._recorder.note("end", index=self._index))
        except (RuntimeError, NotImplementedError):  # gloo's reduce_scatter, send and recv have no future
            self._ends_with_wait = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.note("wait", index=self._index)
        self._await(timeout)
        if self._ends_with_wait:
            self._ends_with_wait = False
            self._recorder.note("end", index=self._index)
        self._recorder.note("done", index=self._index)
        return True

    @uncounted()
    def _await(self, timeout: timedelta | None) -> None:
        """Wait until the result is available. On CUDA, make the current stream wait."""
        self._inner.wait(timeout) if timeout else self._inner.wait()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def _source_rank(self) -> int:
        return self._inner._source_rank()  # of a receive from any rank

    def result(self) -> list[torch.Tensor]:
        return self.get_future().wait()

    def get_future(self) -> torch.futures.Future:
        # A future counts as a wait, because its owner may wait on it where we cannot see it, as the reducer does.
        if not _is_graded:
            self._recorder.note("wait", index=self._index)
            self._recorder.note("done", index=self._index)
            return self._inner.get_future()
        self.wait()
        future = self._inner.get_future()
        completed: torch.futures.Future = torch.futures.Future()  # its callbacks run in the caller's thread
        completed.set_result(future.wait())
        return completed


class Finished(dist.Work):
    """The handle of a call for which the inner group returned None.

    Since torch 2.8, NCCL's group returns no handle for a call with async_op=False, which runs on the current stream.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        raise NotImplementedError("a call with async_op=False has no future")


# For each operation: the positions of outputs and inputs in the arguments, and the methods of a process group that
# perform it. A collective whose outputs are its inputs works in place. Torch 2.13 renamed some methods.
OPERATIONS: dict[str, tuple[int | None, int | None, str]] = {
    "all_reduce": (0, 0, "allreduce allreduce_coalesced"),
    "broadcast": (0, 0, "broadcast"),
    "reduce": (0, 0, "reduce"),
    "all_gather": (
        0, 1, "allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced all_gather_single "
        "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        0, 1, "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single "
        "reduce_scatter_single_coalesced",
    ),
    "gather": (0, 1, "gather"),
    "scatter": (0, 1, "scatter"),
    "all_to_all": (0, 1, "alltoall alltoall_base all_to_all_single"),
    "barrier": (None, None, "barrier"),
    "send": (None, 0, "send"),
    "recv": (0, None, "recv recv_anysource"),
}  # fmt: skip
METHODS = {
    method: (op, outputs, inputs) for op, (outputs, inputs, methods) in OPERATIONS.items() for method in methods.split()
}

# These also accept a single tensor. If a submission calls them without options, they use the default ones.
DEFAULTS = {"allreduce": dist.AllreduceOptions, "broadcast": dist.BroadcastOptions, "reduce": dist.ReduceOptions}


class RecordingGroup(dist.ProcessGroup):
    """Record every collective and pass it on to `inner`, a complete process group.

    Subclasses override `call` to handle the tensors in another way, and `check` to refuse some.
    """

    def __init__(self, inner: dist.ProcessGroup, recorder: Recorder, name: str, ranks: list[int]):
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._recorder = recorder
        self._name = name
        self._ranks = ranks

    def check(self, op: str, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        """Raise an exception if these tensors cannot be used. Then the launch is neither recorded nor made."""

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        """Perform launch `index` and return its handle."""
        return RecordedWork(self._perform(method, args, kwargs), self._recorder, index)

    @uncounted()  # gloo's reduce-scatter copies its input
    def _perform(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> dist.Work:
        work = getattr(self._inner, method)(*args, **kwargs)
        return Finished() if work is None else work

    def _launch(self, method: str, *arguments: Any, **kwargs: Any) -> dist.Work | None:
        args = list(arguments)
        op, outputs, inputs = METHODS[method]
        if _is_graded:
            refuse_finished_answers()
        if method in DEFAULTS and isinstance(args[0], torch.Tensor):
            args[0] = [args[0]]
        if len(args) == 1 and method in DEFAULTS and "opts" not in kwargs:
            args.append(DEFAULTS[method]())
        options = find_options(args, kwargs)
        received, sent = ([] if place is None else list_tensors(args[place]) for place in (outputs, inputs))
        self.check(op, received, sent)
        full = received or sent if op in ("all_gather", "gather") else sent or received  # the larger side
        reduce_op = getattr(options, "reduceOp", None)
        name, memory = self._recorder.find_owner(full)
        line, caller = find_callers()
        index = self._recorder.launch(
            group=self._name,
            ranks=self._ranks,
            op=op,
            dtype=str(full[0].dtype).removeprefix("torch.") if full else None,
            numel=sum(t.numel() for t in full),
            nbytes=sum(t.nbytes for t in full),
            parts=len(sent) if "coalesced" in method else 1,
            reduce_op=None if reduce_op is None else str(reduce_op.op).rpartition(".")[2],
            root=getattr(options, "rootRank", None),
            peer=self._ranks[args[1]] if method in ("send", "recv") else None,
            sync=not getattr(options, "asyncOp", True),
            name=name,
            memory=memory,
            line=line,
            caller=caller,
        )
        if not any(tensor.is_cuda for tensor in [*received, *sent]):
            return self.call(method, args, kwargs, index)
        # NCCL connects ranks in the first call of some kinds, such as all_to_all, and blocks the CPU until it has.
        self._recorder.note("call", index=index)
        try:
            return self.call(method, args, kwargs, index)
        finally:
            self._recorder.note("called", index=index)

    def _start_coalescing(self, device: torch.device) -> None:
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._inner._end_coalescing(device)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def supports_splitting(self) -> bool:
        return False


for _method in METHODS:
    setattr(RecordingGroup, _method, functools.partialmethod(RecordingGroup._launch, _method))


def find_callers() -> tuple[str | None, str | None]:
    """Return the innermost line of the submission on the stack, and the name of the submission's outermost function.

    For example: "coalesced.py:59 in all_gather", "full_state_dict". Both are None if the submission is not on the
    stack, for example when torch DDP's reducer launches a collective.
    """
    line = caller = None
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}."):
            caller = frame.f_code.co_name
            line = line or f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {caller}"
        frame = frame.f_back
    return line, caller


def find_options(args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the options object of a collective, such as `AllreduceOptions`, or None."""
    return next((arg for arg in args if hasattr(arg, "timeout")), kwargs.get("opts"))


def is_self_copy(tensors: Sequence[Any]) -> bool:
    """Return whether a copy is from a slice to itself. Python makes such a copy at the end of `data[a:b] /= n`."""
    places = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors if isinstance(t, torch.Tensor)}
    return len(tensors) > 1 and all(isinstance(t, torch.Tensor) for t in tensors[:2]) and len(places) == 1


def start_process_group(
    group_class: type[RecordingGroup],
    recorder: Recorder,
    backend: str,
    make_inner: Callable[[str, list[int], Any], Any],
    **options: Any,
) -> None:
    """Start the default process group of this rank, with these options of `init_process_group`.

    This group and all later ones are a `group_class`. They wrap what `make_inner` returns for a group's name, its
    global ranks and torch's options, after all ranks of the group have called it.
    """

    def create(group_options: Any, _: Any) -> RecordingGroup:
        name = str(group_options.group_id)
        ranks = list(group_options.global_ranks_in_group) or list(range(group_options.group_size))
        recorder.note("connect", group=name, ranks=ranks)
        inner = make_inner(name, ranks, group_options)
        recorder.note("connected")
        group = group_class(inner, recorder, name, ranks)
        for device in ("cpu", "cuda") if backend == "nccl" else ("cpu",):
            register(group, device)
        return group

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    _wrap_group_functions(backend)
    dist.init_process_group(BACKEND, **options)


def make_torch_group(backend: str, name: str, ranks: list[int], options: Any) -> dist.ProcessGroup:
    """Return a group with the backends that `init_process_group` would register, and connect its ranks.

    `backend` is "gloo" or "nccl", which still uses gloo for CPU tensors.
    """
    store, rank, world_size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, make_gloo_options(timeout))
    register(group, "cpu", gloo)
    if backend == "nccl":
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, nccl_options)
        register(group, "cuda", nccl)
        nccl.eager_connect_single_device(api.device())  # otherwise the first collective would connect the ranks
    group._set_group_name(name)  # torch's flight recorders write it, and module 13's `dump_trace` needs it
    return group


def register(group: dist.ProcessGroup, device: str, backend: dist.Backend | None = None) -> None:
    """Register a backend for tensors on a device. Without one, register torch's fake backend, which does nothing.

    The recording group needs a backend only because torch stores the group's name in it.
    """
    types = dist.ProcessGroup.BackendType
    kind = types.GLOO if device == "cpu" else types.NCCL
    fake = torch._C._distributed_c10d.FakeProcessGroup
    group._register_backend(torch.device(device), kind, backend or fake._create_internal(group.rank(), group.size()))
    group._set_default_backend(kind)


def make_gloo_options(timeout: timedelta) -> Any:
    """Return the default options of `ProcessGroupGloo` with this timeout and `GLOO_THREADS` threads."""
    options = dist.ProcessGroupGloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, GLOO_THREADS
    return options


def _wrap_group_functions(backend: str) -> None:
    """Make `new_group(backend="gloo")` return a recording group, and `get_backend()` return the real backend."""
    new_group, get_backend = c10d.new_group, c10d.get_backend

    def new_recorded_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend", None)
        return new_group(*(args[:2] + (None,) + args[3:] if len(args) > 2 else args), **kwargs)

    def get_real_backend(group: Any = None) -> str:
        return backend if get_backend(group) == BACKEND else get_backend(group)

    for module in (c10d, dist):
        module.new_group, module.get_backend = new_recorded_group, get_real_backend


_is_graded = False
THREAD_STARTS = ("start_new_thread", "start_new", "start_joinable_thread")


def expect_submission() -> None:
    """From now on, only the submission itself may call collectives, and only in the main thread.

    Torch's own wrappers are finished answers to the assignments. The modes that count copies and views see one thread.
    """
    global _is_graded
    _is_graded = True
    for module, prefix in ((_thread, ""), (threading, "_")):
        for name in THREAD_STARTS:
            if hasattr(module, prefix + name):
                setattr(module, prefix + name, refuse_thread)


def refuse_thread(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("submissions must not start threads, because only the main thread is recorded")


# Modules of torch that call collectives by themselves. The last one runs backward, and with it C++ code such as DDP's.
ANSWERS = (
    "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed.optim.", "torch.distributed._composable.",
    "torch.distributed.algorithms.", "torch.autograd.graph.",
)  # fmt: skip


def refuse_finished_answers() -> None:
    """Raise RuntimeError if torch's own wrapper has called a collective, and the submission has called the wrapper."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (name := frame.f_globals.get("__name__", "")).startswith(("torch.", "contextlib", __name__)):
        if f"{name}.".startswith(ANSWERS):
            raise RuntimeError(f"{name} is not accepted as an answer; use the collectives of torch.distributed")
        frame = frame.f_back
