"""The situations: short programs of our own, each with the public number of a user's report.

The README of this folder says how to add one.
"""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from situations.run import Net, Run, situation

CHANGED = "was frozen, unfrozen or replaced"


# ---- models


@situation("pytorch #20586", "the loss uses one of two outputs")
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


@situation("pytorch #47163", "the strides of a 1x1 convolution in channels_last")
def strides_of_convolution(run: Run) -> None:
    convolution = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)
    ddp, optimizer = run.prepare(nn.Sequential(nn.Unflatten(1, (2, 3, 1)), convolution, nn.Flatten(), nn.Linear(12, 3)))
    run.train(ddp, optimizer)


@situation("pytorch #61470", "weight_norm")
def weight_norm(run: Run) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), layer, nn.Linear(8, 3))))


@situation("DeepSpeed #129", "a parameter without elements")
def no_elements(run: Run) -> None:
    model = Net()
    model[0].register_parameter("empty", nn.Parameter(torch.zeros(0)))
    run.train(*run.prepare(model))


@situation("pytorch PR 132934", "a parameter without dimensions")
def no_dimensions(run: Run) -> None:
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.factor * x

    run.train(*run.prepare(Net(nn.Linear(6, 8), Scale(), nn.Tanh(), nn.Linear(8, 3))))


# ---- parameters that change


@situation("pytorch #24005", "a layer is frozen between steps", refused=CHANGED)
def frozen_later(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(), AdamW, weight_decay=0.5, lr=0.1)
    run.train(ddp, optimizer, steps=2)
    optimizer.zero_grad()
    ddp.module[0].requires_grad_(False)
    run.train(ddp, optimizer, steps=2, start=2)


@situation("pytorch #28146", "a layer is unfrozen between steps", refused=CHANGED)
def unfrozen_later(run: Run) -> None:
    model = Net()
    model[0].requires_grad_(False)
    ddp, optimizer = run.prepare(model)
    run.train(ddp, optimizer, steps=2)
    model[0].requires_grad_(True)
    run.train(ddp, optimizer, steps=2, start=2)


@situation("pytorch #12603", "a new head is put on the wrapped model", refused=CHANGED)
def new_head(run: Run) -> None:
    ddp, _ = run.prepare(Net())
    torch.manual_seed(5)
    ddp.module[4] = nn.Linear(8, 3)
    optimizer = SGD(ddp.module.parameters(), lr=1.0)
    run.train(ddp, optimizer)


# ---- loops


@situation("pytorch #22436", "an activation checkpoint", refused="use_reentrant=True", imports_compiler=True)
def reentrant_checkpoint(run: Run) -> None:
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
            return self.last(x)

    run.train(*run.prepare(Twice()))


@situation("pytorch #37814", "the batch is skipped after an exception in backward", refused="finish_grad_sync")
def failed_backward(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=1)
    x, y = run.batch(1)
    hidden = ddp(x)
    hidden.register_hook(lambda grad: 1 / 0)
    try:
        F.mse_loss(hidden, y).backward()
    except ZeroDivisionError:
        optimizer.zero_grad()
    run.train(ddp, optimizer, steps=2, start=2)


@situation("fairscale #180", "torch.amp.GradScaler", refused="GradScaler", not_for={"m16": "the loss is too large"})
def grad_scaler(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x, y in run.batches(3):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(ddp(x), y)).backward()
        ddp.finish_grad_sync()
        scaler.step(optimizer)
        scaler.update()


@situation("pytorch #65766", "an average of the weights, kept in a deep copy of the model", needs="reads_weights")
def average_of_weights(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=1)
    average = copy.deepcopy(ddp.module)
    run.train(ddp, optimizer, steps=2, start=1)
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), ddp.module.parameters()):
            mean.lerp_(weight, 0.5)
    run.wrapped.append((ddp, average))


@situation("pytorch #30461", "a wrapper is saved with torch.save", refused="state_dict")
def saved_wrapper(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=1)
    torch.save(ddp, io.BytesIO())
    run.train(ddp, optimizer, steps=1, start=1)


@situation("pytorch #43201", "a step with gradients that were accumulated inside no_sync only", needs="no_sync")
def only_no_sync(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("trl #7245", "the loss is computed with the module inside of the wrapper", refused="outside ddp(x)")
def loss_of_inner_module(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        F.mse_loss(ddp.module(x), y).backward()
        ddp.finish_grad_sync()
        optimizer.step()
