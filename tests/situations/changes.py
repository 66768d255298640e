"""Situations in which the model, the wrapper or the optimizer changes between two steps, or is copied or saved."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.optim import SGD, AdamW

from situations.models import Tied
from situations.run import Net, Run, situation

CHANGED = "was frozen, unfrozen or replaced"
FREED = "whose memory is released"  # module 11's weights, between steps


@situation("fairscale #368", "A layer is frozen between two steps, under weight decay.", refused=CHANGED)
def frozen_later(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(), AdamW, lr=0.1, weight_decay=0.5)
    run.train(ddp, optimizer, steps=2)
    optimizer.zero_grad()
    ddp.module[0].requires_grad_(False)
    run.train(ddp, optimizer, steps=2, start=2)


@situation("apex PR 46", "A layer is frozen while its gradient waits for the step.", refused=CHANGED)
def frozen_before_step(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step in range(2):
        run.train(ddp, optimizer, steps=1, start=step)
        ddp.module[0].requires_grad_(False)


@situation("detectron2 #2486", "A layer is unfrozen between two steps.", refused=CHANGED)
def unfrozen_later(run: Run) -> None:
    model = Net()
    model[0].requires_grad_(False)
    ddp, optimizer = run.prepare(model)
    run.train(ddp, optimizer, steps=2)
    model[0].requires_grad_(True)
    run.train(ddp, optimizer, steps=2, start=2)


@situation("pytorch #12603", "A new head is put on the wrapped model.", refused=CHANGED, needs="wrapper")
def new_head(run: Run) -> None:
    ddp, _ = run.prepare(Net())
    ddp.module[4] = nn.Linear(8, 3)
    optimizer = SGD(ddp.module.parameters(), lr=1.0)
    run.train(ddp, optimizer)


@situation("Lightning #1289", "weight_norm comes after wrapping.", refused=(CHANGED, FREED), needs="wrapper")
def weight_norm_later(run: Run) -> None:
    model = Net()
    ddp = run.wrap(model)
    nn.utils.parametrizations.weight_norm(model[2])
    run.train(ddp, SGD(model.parameters(), lr=1.0))


@situation("Automodel PR 2213", "Weights are tied after wrapping.", refused=(CHANGED, FREED), needs="wrapper")
def tied_later(run: Run) -> None:
    model = Tied()
    model.second = nn.Linear(8, 8)
    ddp, optimizer = run.prepare(model)
    model.tie()
    run.train(ddp, optimizer)


@situation("yolov5 #279", "An average of the weights is kept in a deep copy of the model.", needs="reads_weights")
def average_of_weights(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=1)
    average = copy.deepcopy(ddp.module)
    run.train(ddp, optimizer, steps=2, start=1)
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), ddp.module.parameters(), strict=True):
            mean.lerp_(weight, 0.5)
    run.wrapped.append((ddp, average))


@situation("pytorch #76927", "The wrapper is copied with copy.deepcopy.", refused=("copied", "copy"), needs="wrapper")
def copied_wrapper(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=1)
    ddp = copy.deepcopy(ddp)
    run.wrapped[0] = ddp, ddp.module
    run.train(ddp, SGD(ddp.module.parameters(), lr=1.0), steps=1, start=1)


@situation("pytorch #73825", "The wrapper is saved with torch.save.", refused="state_dict")
def saved_wrapper(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=1)
    if run.rank is not None:
        torch.save(ddp, io.BytesIO())
    run.train(ddp, optimizer, steps=1, start=1)


@situation("accelerate #285", "Training goes on from a checkpoint, in a new wrapper.", needs="states")
def resumed(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(), AdamW, lr=0.1)
    run.train(ddp, optimizer, steps=2)
    states = ddp.state_dict(), optimizer.state_dict()
    ddp, optimizer = run.prepare(Net(), AdamW, lr=0.1)
    ddp.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    run.train(ddp, optimizer, steps=2, start=2)


@situation("fairscale #601", "The checkpoint has two parameter groups.", needs="states groups reads_weights")
def resumed_groups(run: Run) -> None:
    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2:].parameters()}]

    ddp, optimizer = run.prepare(Net(), AdamW, groups, lr=0.1)
    run.train(ddp, optimizer, steps=2)
    states = ddp.module.state_dict(), optimizer.state_dict()
    ddp, optimizer = run.prepare(Net(), AdamW, groups, lr=0.3)
    ddp.module.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    run.train(ddp, optimizer, steps=2, start=2)


@situation("axolotl PR 400", "Weights are loaded into the wrapped model between two steps.", needs="reads_weights")
def loaded_between_steps(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    start = {name: 0.5 * weight.clone() for name, weight in ddp.module.state_dict().items()}
    run.train(ddp, optimizer, steps=2)
    ddp.module.load_state_dict(start)
    run.train(ddp, optimizer, steps=2, start=2)
