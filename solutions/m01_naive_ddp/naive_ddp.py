"""Module 1: data parallelism in its plainest form.

Every rank has a full copy of the model and works on its own part of the batch. After backward, each gradient is
averaged over the ranks with one all-reduce, so all copies take the same optimizer step.

Cost per step: one launch per trainable parameter. All launches come after backward, when no computation is left to
overlap with. Each all-reduce carries the bytes of one gradient. No additional memory is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge


def broadcast_module_state(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite all parameters and buffers of `module` with the values that they have on the group's first rank.

    This includes frozen parameters, and buffers of any dtype. Every rank of the group must call this function.
    `process_group=None` means the default group. NCCL takes only contiguous tensors: for a transposed one, broadcast a
    contiguous copy, then copy the result back. Later modules import this function.
    """
    ### BEGIN SOLUTION part (a)
    for tensor in [*module.parameters(), *module.buffers()]:
        whole = tensor.detach().contiguous()  # copies non-contiguous tensors only
        dist.broadcast(whole, group=process_group, group_src=0)
        tensor.detach().copy_(whole)
    ### END SOLUTION


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


SPARSE = "sparse gradients are not supported: make the embedding with sparse=False"
CLEARED = "a gradient was cleared or replaced between backward and finish_grad_sync: call finish_grad_sync first"


class Wrapper(nn.Module):
    """What all wrappers refuse. This class is given, and those of later modules inherit from it.

    `trainable`, which each constructor sets with `find_trainable`, must stay as it is.
    """

    module: nn.Module
    trainable: dict[nn.Parameter, str]

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
            hook(parameter)

        node = get_gradient_edge(parameter).node  # it adds to parameter.grad, then calls the post-accumulate hooks
        node.register_hook(call)
        self.__dict__.setdefault("grad_nodes", []).append(node)  # the parameter does not keep it alive

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


class NaiveDDP(Wrapper):
    """Wrap a model. After backward, average its gradients over the ranks of a group, one by one.

    The constructor makes all replicas equal. In each step, all ranks call `finish_grad_sync` once, after one or more
    backward passes. Afterwards, every `p.grad` is the average over the group: what one process would compute on the
    whole batch, if the loss is a mean and every rank has equally many examples.

    This holds for this wrapper and for those of all later modules:

    - It works at any world size, 1 included, in any group, for any number of steps. Its state is in the wrapper, not in
      global variables, because a process may wrap several models. Others read `.module` and `.process_group`.
    - Frozen parameters and buffers are broadcast, but never reduced. A tied parameter is reduced once.
    - If a parameter has no gradient on this rank, it counts as zeros. If it has none on any rank, its gradient may be
      None or zeros afterwards. With zeros, Adam still moves it by its momentum, and weight decay makes it smaller.
    - Gradients are added before they are divided, so float16 weights are refused. torch DDP divides first.
    - Between backward and the finish, a rank calls no other collective of this group, because another rank may launch
      in its finish what this rank has launched in backward.
    - An evaluation, or a forward whose result is thrown away, may come at any time, and changes nothing.
      Gradients are averaged in eval mode, too.
    - The set of trainable parameters is fixed at construction. If a parameter is frozen, unfrozen or replaced later,
      the next finish raises RuntimeError (`require_same_parameters`).
    - Sparse gradients, `.to()` after wrapping, parameters on the meta device, and wrapping twice are not supported.
      Neither are gradients that are not contiguous, which transposed weights have, in modules 1 and 3.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.trainable = find_trainable(module)
        # Make all replicas start from the same weights.
        ### BEGIN SOLUTION part (b)
        broadcast_module_state(module, process_group)
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        """Average the gradient of each trainable parameter over the group, with one all-reduce per parameter.

        All ranks must call the same collectives in the same order.
        """
        self.require_same_parameters()
        ### BEGIN SOLUTION part (c)
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.process_group)
            parameter.grad /= dist.get_world_size(self.process_group)
        ### END SOLUTION
