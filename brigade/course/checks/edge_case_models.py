"""Small models with edge cases that break typical data-parallel code. Inputs are (batch, features).

They register their parameters in order of use (except that Buffers registers its norm last). The checks draw `sizes` at
random: the number of input features, the widths of the hidden layers, and the number of output features.

Between the layers are borders. In backward, a border multiplies each entry of the gradient by 1 or 1/2, as a seed of
the batch says. A rank must ask for these factors, so the order of its questions and its launches shows which gradients
it can have known at each launch. A batch with more seeds has borders in forward and inside of blocks, too. With each
question, a rank reports some of the entries, which it cannot know before it has asked the earlier questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brigade.ranks.borders import draw_halved
from brigade.ranks.rank import recording

Gradients = dict[str, "Tensor | None"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}

BORDERS = 8  # between layers: no model has more
ALL_BORDERS = 3 * BORDERS  # with those inside of blocks; the numbers of borders in forward follow
_seeds: ContextVar[Any] = ContextVar("seeds", default=None)  # of the batch whose forward is running


def border(x: Tensor, number: int) -> Tensor:
    """Return `x`, multiplied by factors if the batch has seeds for forward. In backward, multiply the gradient too."""
    seeds = _seeds.get()
    count = 0 if seeds is None else len(seeds) if isinstance(seeds, list) else seeds["count"]
    if number >= count:
        return x
    if count > ALL_BORDERS:
        x = scale(seeds, ALL_BORDERS + number, x)
    if x.requires_grad:
        x.register_hook(partial(scale, seeds, number))
    return x


def scale(seeds: Any, number: int, x: Tensor) -> Tensor:
    """Multiply a tensor by factors. The parent has the seeds of the factors; a rank must ask for the factors."""
    is_parent = isinstance(seeds, list)
    halved = draw_halved(seeds[number], x.numel()) if is_parent else recording.ask(seeds["batch"], number, x.detach())
    if isinstance(seeds, NotedSeeds):
        seeds.note(number, x.detach())
    return x * (1 - 0.5 * halved.to(x).reshape(x.shape))


class NotedSeeds(list):
    """The seeds of a batch. `note` is called for each border that is passed."""

    def __init__(self, seeds: Sequence[int], note: Callable[[int, Tensor], None]):
        super().__init__(seeds)
        self.note = note


class Plain(nn.Module):
    """A multilayer perceptron with biases and no edge cases."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        for number, layer in enumerate(self.layers[:-1]):
            x = border(torch.tanh(layer(x)), number)
        return self.layers[-1](x)


class Tied(Plain):
    """The first and the last layer share a weight, whose gradient is the sum over both uses.

    Forward reads the first layer's parameters, but does not call the layer.
    """

    def __init__(self, sizes: Sequence[int]):
        super().__init__([*sizes[:-1], sizes[1], sizes[0]])
        self.layers[-1].weight = nn.Parameter(self.layers[0].weight.detach().T.contiguous())
        self.layers[0].weight = self.layers[-1].weight

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = border(torch.tanh(F.linear(x, self.layers[0].weight.T, self.layers[0].bias)), 0)
        for number, layer in enumerate(self.layers[1:-1], 1):
            x = border(torch.tanh(layer(x)), number)
        return self.layers[-1](x)


class Branches(Plain):
    """For each batch, `branch` selects one of two layers (-1: neither). A third layer is never used."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__(sizes)
        self.left = nn.Linear(sizes[-1], sizes[-1])
        self.right = nn.Linear(sizes[-1], sizes[-1])
        self.unused = nn.Linear(sizes[-1], 3)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = border(super().forward(x), len(self.layers) - 1)
        layer = {0: self.left, 1: self.right}.get(branch)
        return layer(x) if layer else x


class ListedLayer(nn.Module):
    """A layer that owns a weight, and has others in a ParameterList, which has no forward of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.weights = nn.ParameterList(torch.eye(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Buffers(Plain):
    """The buffers are a BatchNorm's float statistics and int64 count, a boolean mask, and a float vector."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__(sizes)
        self.norm = nn.BatchNorm1d(sizes[1], eps=0.1)  # limits rounding errors if the examples are similar
        self.register_buffer("mask", torch.rand(sizes[1]) < 0.7)
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = border(torch.tanh(self.layers[0](x)), 0)  # without tanh, the bias would have a zero gradient
        x = self.norm(x) * self.mask
        for number, layer in enumerate(self.layers[1:], 1):
            x = layer(border(torch.tanh(x), number))
        return x + self.scratch.sum()


class MixedDtypes(Plain):
    """The layers cycle through float32, bfloat16 and float64. The output is float32."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__(sizes)
        for number, layer in enumerate(self.layers):
            layer.to((torch.float32, torch.bfloat16, torch.float64)[number % 3])

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(border(x.to(layer.weight.dtype), number)))
        return x.float()


class Reordered(Plain):
    """Four parallel layers of different widths.

    `branch` sets the order in which they run, and thus the order in which their gradients become ready.
    """

    def __init__(self, sizes: Sequence[int]):
        super().__init__(sizes)
        self.parallel = nn.ModuleList(nn.Linear(sizes[-1], width) for width in (31, 32, 33, 34))

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = border(super().forward(x), len(self.layers) - 1)
        order = list(itertools.permutations(range(4)))[5 * branch]
        outputs = {i: torch.tanh(self.parallel[i](x)).mean(dim=1, keepdim=True) for i in order}
        return outputs[0] + outputs[1] + outputs[2] + outputs[3]


class Block(nn.Module):
    """A residual block with a norm and two linear layers. Its borders inside have numbers after those of others."""

    def __init__(self, width: int, hidden: int, number: int):
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(border(self.norm(x), BORDERS + self.number))))
        return border(x, 2 * BORDERS + self.number).view_as(x)  # hooks on the output run before the border


class Blocks(nn.Module):
    """Blocks of different sizes between two layers. `branch` is a set of blocks to skip: bit k stands for block k."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.first = nn.Linear(sizes[0], sizes[1])
        self.blocks = nn.ModuleList(Block(sizes[1], 4 * size, n) for n, size in enumerate(sizes[2:-1], 1))
        self.last = nn.Linear(sizes[1], sizes[-1])

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = border(self.first(x), 0)
        for number, block in enumerate(self.blocks):
            if not branch >> number & 1:
                x = border(block(x), number + 1)
        return self.last(x)


def freeze(model: nn.Module, *names: str) -> nn.Module:
    """Freeze the parameters whose names begin with one of `names`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


def tie(model: nn.Module, name: str, other: str) -> nn.Module:
    """Let the layer `name` use the weight of the layer `other`."""
    model.get_submodule(name).weight = model.get_submodule(other).weight
    return model


def insert_listed_layer(model: Plain) -> Plain:
    model.layers.insert(1, ListedLayer(model.layers[0].out_features))
    return model


def transpose(model: Plain) -> Plain:
    """Store the weights transposed, so that parameters and gradients are not contiguous."""
    for layer in model.layers:
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    return model


MODELS: dict[str, Callable[[Sequence[int]], nn.Module]] = (
    {model.__name__: model for model in (Plain, Tied, Branches, Buffers, MixedDtypes, Reordered, Blocks)}
    | {
        "Frozen": lambda sizes: freeze(Plain(sizes), "layers.1", "layers.0.bias"),
        "TiedBranches": lambda sizes: tie(Branches(sizes), "right", "left"),  # `named_parameters` has only left.weight
        "Listed": lambda sizes: insert_listed_layer(Plain(sizes)),
        "Transposed": lambda sizes: transpose(Plain(sizes)),
        "TiedBlocks": lambda sizes: tie(
            Blocks([*sizes[:-1], sizes[2], sizes[-1]]), f"blocks.{len(sizes) - 3}.up", "blocks.0.up"
        ),
        "FrozenBlocks": lambda sizes: freeze(  # the middle block, and parts of two others
            Blocks(sizes), f"blocks.{(len(sizes) - 3) // 2}.", "blocks.0.norm", "last.bias"
        ),
    }
)


def build(name: str, sizes: Sequence[int], state: dict[str, Tensor], dtype: torch.dtype | None = None) -> nn.Module:
    """Build the named model with these weights and buffers, including the buffers outside its `state_dict`."""
    model = MODELS[name](sizes)
    if dtype:
        model.to(dtype)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    with torch.no_grad():
        for key, value in state.items():
            tensors[key].copy_(value)
    return model


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and buffers by name, including buffers outside the `state_dict`. Tied parameters appear once."""
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def compute_output(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the model's output for a batch, whose seeds determine the factors of the model's borders."""
    before = _seeds.set(batch.get("borders"))
    try:
        return model(batch["x"], branch=batch["branch"])
    finally:
        _seeds.reset(before)


def compute_loss(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the mean squared error of a batch. Ranks also call this."""
    return ((compute_output(model, batch) - batch["y"]) ** 2).mean()


def copy_gradients(model: torch.nn.Module) -> Gradients:
    """Copy the gradient of each trainable parameter, by name; None if it has no gradient."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
