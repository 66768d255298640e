"""Situations that come from the optimizer: its parameter groups, its options, and clipping."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from situations.run import Net, Run, situation

KEEPS_NONE = ("m03",)  # the others leave zeros where no rank has a gradient, as module 1's docstring says
NOT_ITS_PARTS = (
    "the gradients of these parameters are kept in shards: use Zero2Optimizer",
    "the optimizer has weights whose memory is released: make it with the wrapper's shards()",
)


@situation("pytorch #59973", "Two parameter groups have their own learning rates.", needs="groups")
def parameter_groups(run: Run) -> None:
    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2:].parameters()}]

    run.train(*run.prepare(Net(), SGD, groups, lr=1.0, momentum=0.5))


@situation("pytorch #101343", "Weight decay excludes biases.", needs="groups")
def weight_decay_of_weights(run: Run) -> None:
    def groups(model):
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": weights, "weight_decay": 0.5}, {"params": others}]

    run.train(*run.prepare(Net(), AdamW, groups, lr=0.1, weight_decay=0.0))


@situation("pytorch PR 51601", "A scheduler changes the learning rate.", not_for={"m15": "two optimizers"})
def scheduler(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    schedule = CosineAnnealingLR(optimizer, T_max=4)
    for step in range(4):
        run.train(ddp, optimizer, steps=1, start=step)
        schedule.step()


@situation("pytorch PR 46750", "Warm-up begins with a learning rate of zero.", not_for={"m15": "two optimizers"})
def warm_up(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(), AdamW, lr=0.1, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    for step in range(4):
        run.train(ddp, optimizer, steps=1, start=step)
        schedule.step()


@situation("pytorch #72548", "The gradients are clipped by their global norm.", not_for={"m15": "has no clipping"})
def clipped(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer, 0.1):
        F.mse_loss(ddp(x), y).backward()


@situation("torchtitan #766", "The norm that clipping returns is logged.", not_for={"m15": "has no clipping"})
def logged_norm(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()
        run.record("norm", run.clip(ddp, optimizer, 1e9).double())
        optimizer.step()


@situation(
    "pytorch #170862",
    "Only one layer has a gradient when gradients are clipped.",
    not_for={"m15": "has none"},
    refused=("once per forward", "outside ddp(x)"),
)
def clipped_with_unused_layers(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return super().forward(x).detach() + self[4](x.new_ones(8))

    ddp, optimizer = run.prepare(Model())
    for x, y in run.steps(ddp, optimizer, 0.1):
        F.mse_loss(ddp(x), y).backward()


@situation("torchtitan #2318", "Clipping and accumulation come together.", needs="no_sync", not_for={"m15": "has none"})
def clipped_and_accumulated(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer, 0.1):
        with ddp.no_sync():
            F.mse_loss(ddp(-x), y).backward()
        F.mse_loss(ddp(x), y).backward()


@situation("pytorch PR 46750", "The optimizer is AdamW, RMSprop or Adagrad.", needs="elementwise_optimizer")
def other_optimizers(run: Run) -> None:
    for optimizer in (AdamW, RMSprop, Adagrad):
        run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), optimizer, lr=0.01))


@situation(
    "accelerate #3256", "The optimizer is made before the model is wrapped.", refused=NOT_ITS_PARTS, needs="wrapper"
)
def optimizer_first(run: Run) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=1.0)
    run.train(run.wrap(model), optimizer)


@situation("pytorch #28294", "AdamW has momentum for a layer that no rank uses.", needs="elementwise_optimizer")
def unused_with_momentum(run: Run) -> None:
    class Skipping(Net):
        is_skipped = False

        def forward(self, x):
            x = torch.tanh(self[0](x))
            return self[4](x if self.is_skipped else torch.tanh(self[2](x)))

    ddp, optimizer = run.prepare(Skipping(), AdamW, lr=0.1, weight_decay=0.5)
    for step, (x, y) in enumerate(run.batches(4)):
        optimizer.zero_grad()
        ddp.module.is_skipped = step > 1
        F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()
        if run.rank is None and run.kind.name not in KEEPS_NONE:
            for p in ddp.module.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()


@situation(
    "pytorch #72548",
    "The gradients are clipped with torch's own function.",
    refused="use the course's own clip_grad_norm_",
    needs="wrapper",
    not_for={"m10": "its docstring says that it finds no gradients, and clips nothing"},
)
def clipped_by_torch(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()
        parts = ddp.shards() if run.kind.name == "m11" else ddp.parameters()  # module 14 refuses its weights, too
        run.record("norm", torch.nn.utils.clip_grad_norm_(parts, 0.1).double())
        optimizer.step()
