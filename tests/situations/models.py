"""Situations that come from the model: its shapes, dtypes, outputs, and what it shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from situations.run import Net, Run, situation

ONCE = ("once per forward", "outside ddp(x)")  # module 11 gathers a unit for one call
SECOND = "a second backward before finish_grad_sync"


@situation("pytorch #20586", "The loss uses one of two outputs.")
def one_of_two_outputs(run: Run) -> None:
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x):
            x = torch.tanh(self.body(x))
            return self.first(x), self.second(x)

    ddp, optimizer = run.prepare(TwoHeads())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        F.mse_loss(ddp(x)[0], y).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("pytorch #47163", "The weight of a 1x1 convolution has ambiguous strides.")
def strides_of_convolution(run: Run) -> None:
    convolution = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)
    run.train(*run.prepare(Net(nn.Unflatten(1, (2, 3, 1)), convolution, nn.Flatten(), nn.Linear(12, 3))))


@situation("pytorch #70222", "The model is in channels_last.")
def channels_last(run: Run) -> None:
    layers = nn.Conv2d(2, 4, (2, 1)), nn.Flatten(), nn.Linear(8, 3)
    model = Net(nn.Unflatten(1, (2, 3, 1)), *layers).to(memory_format=torch.channels_last)
    run.train(*run.prepare(model))


@situation("pytorch #61470", "A layer has weight_norm, as a parametrization.")
def weight_norm(run: Run) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), layer, nn.Linear(8, 3))))


class LastState(nn.Module):
    """A recurrent layer over three steps of two inputs each, of which only the last output is used."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(len(x), 3, 2))[0][:, -1])


@situation("pytorch #32860", "The model has an LSTM, which keeps a list of its weights.")
def lstm(run: Run) -> None:
    run.train(*run.prepare(LastState(nn.LSTM(2, 8, num_layers=2, batch_first=True))))


@situation(
    "pytorch #86457",
    "An LSTM has the older weight_norm, which replaces a weight before each forward.",
    refused="memory is released",
)
def normed_lstm(run: Run) -> None:
    lstm = nn.utils.weight_norm(nn.LSTM(2, 8, batch_first=True), "weight_hh_l0")
    run.train(*run.prepare(LastState(lstm)))


@situation("pytorch #40193", "A layer computes its weight in forward (DropConnect).")
def weight_from_forward(run: Run) -> None:
    class Dropped(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.raw = nn.Parameter(self.weight.detach().clone())
            del self.weight

        def forward(self, x):
            self.weight = self.raw * torch.eye(8).add(torch.ones(8, 8)).lt(2)
            return super().forward(x)

    run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), Dropped(), nn.Linear(8, 3))))


@situation("DeepSpeed #129", "A parameter has no elements, and others have fewer than there are ranks.")
def no_elements(run: Run) -> None:
    model = Net(nn.Linear(6, 1), nn.Linear(1, 3))
    model[0].register_parameter("empty", nn.Parameter(torch.zeros(0)))
    run.train(*run.prepare(model))


@situation("pytorch PR 132934", "A parameter has no dimensions.")
def no_dimensions(run: Run) -> None:
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.factor * x

    run.train(*run.prepare(Net(nn.Linear(6, 8), Scale(), nn.Tanh(), nn.Linear(8, 3))))


@situation("pytorch #158753", "A parameter is complex.", needs="dtypes")
def complex_weight(run: Run) -> None:
    class Rotate(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex128))

        def forward(self, x):
            return (x * self.phase).real + (x * self.phase).imag

    run.train(*run.prepare(Net(nn.Linear(6, 8), Rotate(), nn.Linear(8, 3))))


class Tied(nn.Module):
    """Two layers with one weight, an embedding and a head for example."""

    def __init__(self):
        super().__init__()
        self.inner, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.tie()

    def tie(self) -> None:
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(self.inner(x)))))


@situation("lingua PR 75", "Two layers share a weight.")
def tied_weights(run: Run) -> None:
    run.train(*run.prepare(Tied()))


@dataclass
class Output:
    logits: Tensor


@situation("pytorch #83053", "The model returns a dataclass.")
def dataclass_of_model(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return Output(super().forward(x))

    ddp, optimizer = run.prepare(Model())
    for x, y in run.steps(ddp, optimizer):
        F.mse_loss(ddp(x).logits, y).backward()


@situation("pytorch #77812", "A block returns a dataclass.", refused="dataclass")
def dataclass_of_block(run: Run) -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return Output(torch.tanh(self.linear(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.second(self.first(x).logits).logits)

    run.train(*run.prepare(Model()))


@situation(
    "pytorch #37246",
    "An embedding has max_norm, so forward changes its weight.",
    refused="max_norm",
    not_for=dict.fromkeys(("m08a", "m15"), "there is no wrapper that sees the model"),
)
def max_norm(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.embedding(x.abs().mul(4).long().clamp(max=8)).sum(1))

    run.train(*run.prepare(Model()))


@situation(
    "torchrec #740",
    "A lazy layer has no parameters yet when the model is wrapped.",
    refused=("ninitialized parameter", "initialized"),
)
def lazy_layer(run: Run) -> None:
    run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), nn.LazyLinear(3))))


@situation("DeepSpeed #8224", "A layer is called twice in one forward.", refused=ONCE)
def layer_called_twice(run: Run) -> None:
    layer = nn.Linear(8, 8)
    run.train(*run.prepare(Net(nn.Linear(6, 8), layer, nn.Tanh(), layer, nn.Linear(8, 3))))


@situation("fairscale PR 614", "A frozen layer is between trainable ones.")
def frozen_layer(run: Run) -> None:
    model = Net()
    model[2].requires_grad_(False)
    run.train(*run.prepare(model))


@situation("pytorch PR 2464", "The first layers are frozen.")
def frozen_trunk(run: Run) -> None:
    model = Net()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    run.train(*run.prepare(model))


@situation("pytorch/examples #760", "Ranks start with other seeds, and with other buffers.")
def random_buffer(run: Run) -> None:
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x):
            return x * self.scale

    run.train(*run.prepare(Net(nn.Linear(6, 8), Noise(), nn.Linear(8, 3))))


@situation("ALF PR 1475", "The model contains a target network, which follows the online one.", needs="reads_weights")
def target_network(run: Run) -> None:
    model = Net()
    target = nn.Linear(8, 3).requires_grad_(False)
    model.register_module("target", target)
    model.forward = lambda x: nn.Sequential(*list(model)[:4])(x) @ (model[4].weight - target.weight).T
    ddp, optimizer = run.prepare(model)
    for step in range(3):
        run.train(ddp, optimizer, steps=1, start=step)
        with torch.no_grad():
            target.weight.lerp_(model[4].weight, 0.25)


@situation(
    "apex PR 132",
    "An evaluation and a training forward share one block of autocast.",
    "block of autocast",
    tolerance=1e-5,
)
def autocast_after_evaluation(run: Run) -> None:
    ddp, optimizer = run.prepare(Net().float())
    for step, _ in enumerate(run.steps(ddp, optimizer)):
        for rank in run.ranks:
            x, y = (value.float() for value in run.batch(step, [rank]))
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    ddp(x)
                loss = F.mse_loss(ddp(x), y) / len(run.ranks)
            loss.backward()


@situation("pytorch #8023", "A hook of the user doubles a gradient.")
def hook_on_parameter(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for parameter in ddp.module.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    run.train(ddp, optimizer)


@situation("pytorch #117265", "A hook of the user doubles the gradient of a layer's output.")
def hook_on_layer(run: Run) -> None:
    model = Net()
    ddp, optimizer = run.prepare(model)
    model[2].register_full_backward_pre_hook(lambda layer, gradients: tuple(2 * gradient for gradient in gradients))
    run.train(ddp, optimizer)


class Checkpointed(nn.Module):
    """A model with one block that is computed again in backward, `times` times."""

    def __init__(self, times: int, use_reentrant: bool):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.times, self.options = times, {"use_reentrant": use_reentrant}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, **self.options)
        return self.last(x)


@situation("pytorch #84589", "A block has an activation checkpoint.", imports_compiler=True)
def checkpoint_once(run: Run) -> None:
    run.train(*run.prepare(Checkpointed(1, use_reentrant=False)))


@situation(
    "pytorch PR 69060", "A block has two activation checkpoints in a forward.", refused=ONCE, imports_compiler=True
)
def checkpoint_twice(run: Run) -> None:
    run.train(*run.prepare(Checkpointed(2, use_reentrant=False)))


@situation(
    "ms-swift #3171",
    "Two activation checkpoints of a block are reentrant, so the block has two backward passes.",
    refused=("use_reentrant=True", *ONCE),
    imports_compiler=True,
)
def reentrant_twice(run: Run) -> None:
    run.train(*run.prepare(Checkpointed(2, use_reentrant=True)))


@situation(
    "pytorch #65537", "An activation checkpoint is reentrant.", refused="use_reentrant=True", imports_compiler=True
)
def reentrant_once(run: Run) -> None:
    run.train(*run.prepare(Checkpointed(1, use_reentrant=True)))


@situation("transformers PR 22279", "The model is compiled before it is wrapped.", imports_compiler=True)
def compiled_model(run: Run) -> None:
    model = Net()
    model.forward = torch.compile(model.forward, backend="eager")
    run.train(*run.prepare(model))
