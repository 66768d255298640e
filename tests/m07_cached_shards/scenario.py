"""Functions that the ranks run in the checks of module 7, apart from plain training."""

import contextlib
import gc
import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from brigade.course.checks.edge_case_models import compute_loss, copy_gradients
from brigade.course.checks.forms import ListOf, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.memory import list_tensors
from helpers.training import build, like_gradients, like_weights, list_steps, move_to_device, wrap

# These return the whole tensor under another name. They do not slice it, and code needs them to write without autograd.
WHOLE = ("data", "detach", "_base")
CALLING = ("apply_", "map_", "map2_")  # these call a function in which no view is seen, and no answer needs them
VIEW_TEXTS = ("call", "phase", "module", "file", "in", "text")  # of a view
COLLECTIVES = {  # their code when this file was imported, which is before the submission
    code
    for function in vars(distributed_c10d).values()
    if type(function) is FunctionType
    and (code := inspect.unwrap(function).__code__).co_filename == distributed_c10d.__file__
}


class ViewCounter(TorchFunctionMode):
    """Record every view that the submission makes in `during` or `backward`.

    A view is a new tensor that a function or an attribute of torch returns, and that shares memory with an argument.
    This rule needs no list of function names. All Python code that runs there is the submission's, or torch's on its
    behalf, unless `is_ours` says otherwise.
    """

    def __init__(self):
        super().__init__()
        self.views: list[dict] = []
        self.phase = ""  # of the rank, not of a thread: on CUDA, hooks run on autograd's own thread
        self.control = 0  # views made by the hook `make_view`, which prove that the counter sees hooks

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        count = count_new_views(function, [*args, *(kwargs or {}).values()], result)
        if count:
            caller = sys._getframe(1)
            self.control += caller.f_code is make_view.__code__
            if not is_ours(caller):
                numels = [tensor.numel() for tensor in list_tensors(result)]
                view = {"count": count, "numels": numels, "call": get_name(function), "phase": self.phase}
                self.views.append(view | locate(caller))
        return result

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the views that the block creates, and record the block as a phase of this name."""
        with recording.phase(name), self.counting(name):
            yield

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        self.phase = name
        with self:
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, and count the views that its hooks create.

        The methods of a tensor run with the mode switched off, so start the engine from an edge of the graph. The
        engine's threads inherit the modes of the thread that starts them.
        """
        edge = torch.autograd.graph.get_gradient_edge(loss)
        before = self.control
        with recording.phase("backward"), self.counting("backward"):
            torch.autograd.backward(edge)
        if self.control == before:
            raise RuntimeError("the counter of views does not see hooks with this version of torch")


def get_name(function) -> str:
    """Return the name of a function, or of the attribute whose getter it is."""
    name = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name


def count_new_views(function, arguments: list, result) -> int:
    """Return how many of the tensors in `result` are new views of those in `arguments`."""
    name = get_name(function)
    if name == "__setitem__":  # data[start:end] = ... slices too, but data[:] = ... does not
        is_whole = arguments[1] is Ellipsis or isinstance(arguments[1], slice) and arguments[1] == slice(None)
        return int(not is_whole)
    if name in CALLING:
        return 1
    if name in WHOLE:
        return 0
    inputs = list_tensors(arguments)
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    return sum(
        tensor.untyped_storage()._cdata in memory and all(tensor is not other for other in inputs)
        for tensor in list_tensors(result)
    )


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of this file, of the toolkit, or of torch.distributed's collectives."""
    toolkit = [vars(module) for name, module in sys.modules.items() if name.startswith("brigade.")]
    is_named = any(frame.f_globals is namespace for namespace in (globals(), *toolkit))
    return is_named or frame.f_code in COLLECTIVES


def locate(maker: FrameType) -> dict:
    """Return where a view was made: the submission's module without its package, the line and the function.

    Frames of torch and of the standard library may be between the submission's frame and the frame that made the view.
    """
    modules = {
        getattr(module, "__file__", ""): name for name, module in sys.modules.items() if name.startswith("submission.")
    }
    frame = maker
    while frame.f_back and frame.f_code.co_filename not in modules:
        frame = frame.f_back
    if frame.f_code.co_filename not in modules:
        frame = maker  # the submission's code, but not in one of its files
    path, line = frame.f_code.co_filename, frame.f_lineno
    outer = frame
    while outer.f_code.co_name.startswith("<") and outer.f_back and outer.f_back.f_code.co_filename == path:
        outer = outer.f_back  # leave a comprehension; on autograd's thread, no function encloses a hook
    return {
        "module": modules.get(path, f"submission.{os.path.basename(path)}").partition(".")[2],
        "file": os.path.basename(path),
        "line": line,
        "in": outer.f_code.co_name,
        "text": linecache.getline(path, line).strip(),
    }


def make_views_in_hooks(model: nn.Module) -> None:
    """Register `make_view` on the nodes that accumulate the model's gradients; the recorder keeps the nodes alive."""
    for parameter in model.parameters():
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(make_view)


def make_view(gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Make a view in a hook of the autograd graph: see `ViewCounter.control`."""
    for gradient in gradients:
        if gradient is not None:
            gradient.unsqueeze(0)


def form_steps(job: dict) -> dict:
    """Return the form of what `run_steps` returns."""
    gradients, count = like_gradients(job), [int] * len(job["moves"])
    weights = {name: form for name, form in like_weights(job).items() if name in gradients}
    view = {"count": int, "numels": ListOf(int), "line": int} | dict.fromkeys(VIEW_TEXTS, str)
    views = {step: ListOf(view) for step in job["steady"]}
    tensors = [gradients if job["gather_grads"] else weights] * len(job["moves"])
    return {"tensors": tensors, "num_alive": count, "num_views": count, "views": views}


@returns(form_steps, list_steps)
def run_steps(job: dict) -> dict:
    """Take a step for each batch, with the same weights. Before step i, move the buffers job["moves"][i] times.

    With job["gather_grads"], return the gradients of each step as its "tensors". Otherwise, copy this rank's
    gradient shards into its parameter shards, gather the parameters, return them, and restore the weights. Also return
    how many views each step makes, the views of the steps job["steady"], which must make none, and, as "num_alive", how
    many old flat tensors something keeps alive after each step.
    param_data counts only if it is gathered. In step job["moves_late"], the buffers also move before that gather.
    """
    model = build(job)
    ddp = wrap(job, model)
    if not job["gather_grads"]:
        ddp.gather_grads = False
    weights = [buffer.param_data.clone() for buffer in ddp.grad_buffers]
    make_views_in_hooks(model)
    outcomes, num_alive, views, old = [], [], [], []
    for step, ([batch], times) in enumerate(zip(job["batches"], job["moves"], strict=True)):
        recording.note("step", step=step)
        for buffer in ddp.grad_buffers * times:
            flat = [buffer.grad_data, *([] if job["gather_grads"] else [buffer.param_data])]
            old += [StorageWeakRef(tensor.untyped_storage()) for tensor in flat]
            del flat
            buffer.reallocate()
        model.zero_grad()
        with recording.phase("forward"):
            loss = compute_loss(ddp, move_to_device(batch))
        counter = ViewCounter()
        views.append(counter.views)
        counter.backward(loss)
        with counter.during("finish_grad_sync"):
            ddp.finish_grad_sync()
        if job["gather_grads"]:
            outcomes.append(copy_gradients(model))
            num_alive.append(count_alive(old))
            continue
        for buffer in ddp.grad_buffers:
            for start, end in list_own_shards(buffer):
                buffer.param_data[start:end] = buffer.grad_data[start:end]
            if step == job.get("moves_late"):
                old.append(StorageWeakRef(buffer.param_data.untyped_storage()))
                buffer.reallocate()
        with counter.during("start_param_sync"):
            ddp.start_param_sync()
        with counter.during("finish_param_sync"):
            ddp.finish_param_sync()
        num_alive.append(count_alive(old))
        outcomes.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        for buffer, weight in zip(ddp.grad_buffers, weights, strict=True):
            buffer.param_data.copy_(weight)
    num_views = [sum(view["count"] for view in own) for own in views]
    steady = {step: views[step] for step in job["steady"]}
    return {"tensors": outcomes, "num_alive": num_alive, "num_views": num_views, "views": steady}


def count_alive(references: list[StorageWeakRef]) -> int:
    """Return how many of these storages something keeps alive."""
    gc.collect()
    return sum(not reference.expired() for reference in references)


def list_own_shards(buffer) -> list[tuple[int, int]]:
    """Return this rank's range of elements in each bucket."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [(start, (end - start) // size) for start, end in buffer.layout.bucket_ranges]
    return [(start + rank * length, start + (rank + 1) * length) for start, length in lengths]
