"""Situations that come from how a block computes: what it returns, keeps or skips, and who else touches its weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from situations.run import Run, situation

FREED = "whose memory is released"  # module 11's weights, between steps
# With one process and a learning rate of 1, rounding the gradients to bfloat16 changes a weight by 0.4 or 2.4.
UNSTABLE = {"m16": "it rounds gradients, and this training amplifies the rounding"}


class Block(nn.Module):
    """A residual block of (8, 8) weights. It may keep a loss of its own, or skip its computation."""

    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_dropped, self.own_loss = False, torch.zeros(())

    def forward(self, x):
        if self.is_dropped:
            return x
        self.own_loss = self.gate(x).square().mean()
        return x + torch.tanh(self.layer(x)) * self.gate(x)


class Blocks(nn.Module):
    """Three blocks between two linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two, self.three = nn.Linear(6, 8), Block(), Block(), Block()
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for block in (self.one, self.two, self.three):
            x = block(x)
        return self.last(x)


@situation("pytorch #173709", "The loss contains a tensor that a block keeps in an attribute.")
def kept_tensor(run: Run) -> None:
    model = Blocks()
    ddp, optimizer = run.prepare(model)
    for x, y in run.steps(ddp, optimizer):
        loss = F.mse_loss(ddp(x), y)
        (loss + 0.1 * (model.one.own_loss + model.three.own_loss)).backward()


@situation("fairseq2 PR 484", "A block that is dropped returns its input.", not_for={"m03": "it demands equal use"})
def dropped_block(run: Run) -> None:
    model = Blocks()
    ddp, optimizer = run.prepare(model)
    for step, _ in enumerate(run.steps(ddp, optimizer)):
        for rank in run.ranks:
            x, y = run.batch(step, [rank])
            model.two.is_dropped, model.three.is_dropped = step == 1, rank == 1
            (F.mse_loss(ddp(x), y) / len(run.ranks)).backward()


@situation("pytorch #181832", "A view of a block's output changes in place.", not_for=UNSTABLE)
def view_changed_in_place(run: Run) -> None:
    class Shifted(Blocks):
        def forward(self, x):
            x = self.one(self.first(x))
            view = x.view(-1)
            view += 1.0
            return self.last(self.three(self.two(x)))

    run.train(*run.prepare(Shifted()))


@situation("fms-fsdp #15", "Weights are initialized after wrapping.", refused=FREED, not_for=UNSTABLE)
def initialized_late(run: Run) -> None:
    model = Blocks()
    ddp, optimizer = run.prepare(model)
    with torch.no_grad():
        model.last.weight.fill_(0.5)
    run.train(ddp, optimizer)
