"""What the wrappers and optimizers of all modules refuse, each with one sentence. This file is given.

Without these refusals, the modules would train most models in the same way. A few models and loops would be trained
wrong without any message, or ranks would wait for each other forever: here, they get an error. Read this file when one
of its errors stops you. The modules import from it what they need.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

SPARSE = "sparse gradients are not supported: make the embedding with sparse=False"
SECOND_BACKWARD = (
    "a second backward before finish_grad_sync, or an activation checkpoint with use_reentrant=True: call "
    "finish_grad_sync first, or pass use_reentrant=False"
)
PART_ONLY = "this rank has averages of a part only: use the course's own clip_grad_norm_"
CLEARED = "a gradient was cleared or replaced between backward and finish_grad_sync: call finish_grad_sync first"


# ---- models


def find_trainable(module: nn.Module, is_wrapped: bool = False) -> dict[nn.Parameter, str]:
    """Return the trainable parameters of a module with their names. Before it is wrapped, call `require_supported`."""
    if not is_wrapped:
        require_supported(module)
    return {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}


def require_supported(module: nn.Module) -> None:
    """Raise ValueError for a model that the wrappers would not train as one process does.

    An embedding with `max_norm` scales rows of its weight in forward, other ones on each rank. One with `sparse` has
    gradients that no flat tensor can contain. The hooks of two wrappers would both average a model's gradients.
    """
    if any(isinstance(part, Wrapper) for part in module.modules()):
        raise ValueError("a part of the model is in a wrapper already: wrap the whole model once")
    if any(getattr(parameter, "hooked_id", None) == id(parameter) for parameter in module.parameters()):
        raise ValueError(
            "the model was wrapped before, and its parameters have the hooks of that wrapper: load its weights into a "
            "new model, and wrap that one"
        )
    embeddings = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    if any(embedding.max_norm is not None for embedding in embeddings):
        raise ValueError("an embedding with max_norm changes its weight in forward, differently on each rank")
    if any(embedding.sparse for embedding in embeddings):
        raise ValueError(SPARSE)
    require_range(parameter.dtype for parameter in module.parameters() if parameter.requires_grad)


def require_range(dtypes: Iterable[torch.dtype | None]) -> None:
    """Raise ValueError for float16: a sum of gradients above 65,504 is infinite in it, even if their average is not."""
    if torch.float16 in dtypes:
        raise ValueError(
            "gradients are added before they are divided, and in float16 the sum may overflow: use bfloat16 or float32"
        )


def require_own_memory(params: Iterable[Tensor]) -> None:
    """Raise ValueError if two parameters share memory, as after `b.data = a.data`: moving them would separate them."""
    spans = []
    for p in (p for p in params if p.numel() and not p.is_meta):
        numel = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride()))
        spans.append((p.data_ptr(), p.data_ptr() + numel * p.element_size()))
    if any(end > start for (_, end), (start, _) in itertools.pairwise(sorted(spans))):
        raise ValueError("two parameters share memory: use one parameter in both places, as b.weight = a.weight does")


# ---- wrappers


class Wrapper(nn.Module):
    """What all wrappers have: the model, its group, and the parameters that were trainable at construction.

    The wrappers of modules 1 to 5 and 11 inherit from it. `trainable` must stay as it is.

    This holds for the wrappers of all modules:

    - It works at any world size, 1 included, in any group, for any number of steps. Its state is in the wrapper, not in
      global variables, because a process may wrap several models. Others read `.module` and `.process_group`.
    - Frozen parameters and buffers are broadcast, but never reduced. A tied parameter is reduced once.
    - If a parameter has no gradient on this rank, it counts as zeros. If it has none on any rank, its gradient may be
      None or zeros afterwards. With zeros, Adam still moves it by its momentum, and weight decay makes it smaller.
    - Gradients are added before they are divided, so float16 weights are refused. torch DDP divides first.
    - A rank without a backward calls no other collective of this group before its finish, because the other ranks may
      have launched theirs in backward.
    - An evaluation, or a forward whose result is thrown away, may come at any time, and changes nothing.
      Gradients are averaged in eval mode, too.
    - The set of trainable parameters is fixed at construction. If a parameter is frozen, unfrozen or replaced later,
      the next finish raises RuntimeError (`require_same_parameters`).
    - Sparse gradients, `.to()` after wrapping, parameters on the meta device, and wrapping twice are not supported.
      Neither are gradients that are not contiguous, which transposed weights have, in modules 1 and 3.
    """

    module: nn.Module
    trainable: dict[nn.Parameter, str]
    queue: Any  # the launch queue of module 4, in the wrappers that have one

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.trainable = find_trainable(module)
        self.in_backward: set[nn.Parameter] = set()  # those with a gradient so far, if they have a hook
        self.in_last_backward: set[nn.Parameter] = set()  # the same of the last backward

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def mark_parameters(self) -> None:
        """Let `find_trainable` refuse the model from now on, because its parameters have hooks of this wrapper."""
        for parameter in self.trainable:
            parameter.hooked_id = id(parameter)  # a copy of the parameter has no hooks, so its mark must not hold

    def register_grad_hook(self, parameter: nn.Parameter, hook: Callable[..., None]) -> None:
        """Let backward call `hook(parameter)` after the post-accumulate hooks of users, even those registered later.

        Otherwise, these would change a gradient in flight. torch DDP hooks the same node. If a user's hook has cleared
        the gradient, as after a step of its own, backward raises RuntimeError.
        """

        def call(_: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> None:
            if grads[0] is None:  # nothing was accumulated
                return
            if parameter.grad is None:
                raise RuntimeError(CLEARED)
            self.in_backward.add(parameter)
            hook(parameter)

        node = get_gradient_edge(parameter).node  # it adds to parameter.grad, then calls the post-accumulate hooks
        node.register_hook(call)
        self.__dict__.setdefault("grad_nodes", []).append(node)  # the parameter does not keep it alive

    def launch_all_in_backward(self) -> None:
        """Let a backward that skips parameters launch all units of `queue` at its end, as it does on other ranks.

        Otherwise, this rank would launch the last units in its finish. A collective that users call before the finish
        would meet one of these units on another rank.
        """

        def launch() -> None:
            is_skipped = len(self.in_backward) < len(self.__dict__.get("grad_nodes", ()))
            self.in_last_backward, self.in_backward = self.in_backward, set()
            if is_skipped and self.queue.num_pending != self.queue.num_grads:
                self.queue.launch_remaining()
                self.queue.num_pending = [0] * len(self.queue.num_pending)  # so that a second backward is refused

        def watch(_: nn.Module, args: tuple, output: Any) -> None:
            self.in_backward.clear()  # an exception may have ended the last backward
            call_in_backward(find_tensors(output), functools.partial(queue_callback, launch))

        self.register_forward_hook(watch)

    def require_same_parameters(self) -> None:
        """Raise RuntimeError if a parameter was frozen, unfrozen or replaced after construction.

        Most wrappers plan buckets and hooks for these parameters only. They would not average a later one, and would
        give zeros, which weight decay moves, to one that is frozen.
        """
        now = find_trainable(self.module, is_wrapped=True)
        if now.keys() != self.trainable.keys():
            both = self.trainable | now
            name = min(both[parameter] for parameter in now.keys() ^ self.trainable.keys())
            raise RuntimeError(
                f"{name} was frozen, unfrozen or replaced after wrapping (to_empty() replaces all that are on the meta "
                "device). To go on with other parameters, load the weights into a new model, and wrap it"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "a wrapper cannot be copied or pickled, because its hooks belong to its own model: copy ddp.module, or "
            "save ddp.module.state_dict()"
        )


# ---- backward

PLAIN = (type(None), int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)  # these contain no tensors


def queue_callback(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def call_in_backward(tensors: list[Tensor], function: Callable[[], None]) -> None:
    """Call a function once per backward, when the gradient of the first of these tensors is complete."""
    if tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: function(), mode="any")


def find_tensors(values: Any, is_strict: bool = False) -> list[Tensor]:
    """Return the tensors with a history in nested dicts, lists, tuples and dataclasses.

    An object of another type may contain such tensors, too. If `is_strict`, raise TypeError for it.
    """
    nested: Iterable[Any] = ()
    if isinstance(values, Tensor):
        return [values] if values.grad_fn is not None else []
    if isinstance(values, Mapping):
        nested = values.values()
    elif isinstance(values, (list, tuple)):
        nested = values
    elif dataclasses.is_dataclass(values):
        nested = [getattr(values, field.name, None) for field in dataclasses.fields(values)]
    elif is_strict and not isinstance(values, PLAIN):
        raise TypeError(f"a unit returned a {type(values).__name__}: return tensors, dicts, lists, tuples, dataclasses")
    return [tensor for value in nested for tensor in find_tensors(value, is_strict)]


# ---- optimizers


class UnscaledOptimizer(Optimizer):
    """An optimizer whose step communicates. `torch.amp.GradScaler` decides on each rank alone whether to step.

    So ranks would wait for each other forever: the scaler's `step` raises RuntimeError. Without overflows, as in
    bfloat16, a loop needs no scaler.
    """

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:  # GradScaler's step asks for it, before it decides
        raise RuntimeError(
            "torch.amp.GradScaler decides on each rank alone whether to step, but a step here needs all of them: train "
            "without it, for example in bfloat16"
        )


# ---- weights in shards, in module 11

VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}  # the properties of a tensor that lead to its values
WITHOUT_VALUES = {"data_ptr", "dim", "element_size", "numel", "size", "storage_offset", "stride", "untyped_storage"}
WITHOUT_VALUES |= {"is_complex", "is_contiguous", "is_floating_point", "requires_grad_"}
WITHOUT_VALUES |= {"empty_like", "new_empty", "new_zeros", "zeros_like"}
WITHOUT_VALUES |= {"register_hook", "register_post_accumulate_grad_hook"}


class FreedWeight(nn.Parameter):
    """The class of a parameter while its memory is released: it has a shape and a gradient, but no values.

    Reading released memory can crash the process, so functions that use values raise RuntimeError. torch has such a
    class, too, for parameters that have no shape yet (`torch.nn.parameter.UninitializedParameter`).
    """

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        name = getattr(function, "__name__", "")
        is_property, is_set = name in ("__get__", "__set__", "__delete__"), name == "__set__"
        if is_property:
            name = function.__self__.__name__
        is_refused = name in VIEWS if is_property else name not in WITHOUT_VALUES
        if is_set and name == "data":  # another view of the same memory is no harm
            is_refused = args[0].untyped_storage()._cdata != args[1].untyped_storage()._cdata
        if name == "grad" and sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            raise RuntimeError(PART_ONLY)  # otherwise, torch would find no gradients, and clip nothing
        if name == "backward":
            raise RuntimeError("backward(inputs=...) finds weights whose memory is released: call it without inputs")
        if is_refused:
            weight = next((f" of shape {list(value.shape)}" for value in args if isinstance(value, cls)), "")
            raise RuntimeError(
                f"{'a new ' * is_set}{name} needs the values of a weight{weight}, whose memory is released: use "
                "full_state_dict() or load_full_state_dict(state)"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


@functools.cache
def make_freed_class(own: type[nn.Parameter]) -> type[FreedWeight]:
    """Return the class of a parameter of the class `own` while its memory is released."""
    return FreedWeight if own is nn.Parameter else type(f"Freed{own.__name__}", (FreedWeight, own), {})


def require_memory(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Refuse a step on released weights. They have no gradients, so the step would leave all weights as they are."""
    if any(isinstance(p, FreedWeight) for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError("the optimizer has weights whose memory is released: make it with the wrapper's shards()")


class PartGrad(Tensor):
    """A gradient of which this rank's part has averages. Ranks that clip by its norm, as torch does, would diverge."""

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        # torch's clip_grad_norm_ takes the norms in the dtype of the gradients. A loop that adds up the squares of all
        # ranks, such as that of module 12, names another one.
        if function is torch.linalg.vector_norm and "dtype" not in (kwargs or {}):
            raise RuntimeError(PART_ONLY)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


class ShardGrad(PartGrad):
    """The gradient of a shard. If `torch.amp.GradScaler` looks for infinities in it, all ranks get the same answer.

    The scaler skips a step where it finds one, on each rank alone. Ranks that decide differently would diverge.
    """

    process_group: dist.ProcessGroup | None = None

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        if function.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            grads, is_found, _ = args
            dist.all_reduce(is_found, dist.ReduceOp.MAX, group=grads[0].process_group)
        return result
