"""Situations that come from the training loop: when forward, backward, the finish and the step are called."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS

from situations.models import SECOND
from situations.run import Net, Run, situation

FIRST = "call finish_grad_sync first"
ONE_FORWARD = "belongs to an earlier or to a second forward"
EQUAL_USE = "its reading says that every rank must use every parameter"


@situation("allennlp #3574", "Each rank uses another branch of the model.", not_for={"m03": EQUAL_USE})
def branch_by_rank(run: Run) -> None:
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x, rank):
            return (self.right if rank else self.left)(self.body(x))

    ddp, optimizer = run.prepare(Branches())
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.ranks:
            x, y = run.batch(step, [rank])
            (F.mse_loss(ddp(x, rank), y) / len(run.ranks)).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("pytorch #23425", "A rank has no loss in one step.", not_for={"m03": EQUAL_USE})
def no_loss_on_a_rank(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.ranks:
            x, y = run.batch(step, [rank])
            loss = F.mse_loss(ddp(x), y) / len(run.ranks)
            if (rank, step) != (1, 1):
                loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("BMTrain #108", "All ranks skip a batch after its forward.")
def skipped_batch(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step, (x, y) in enumerate(run.batches(4)):
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(x), y)
        if step == 1:
            continue
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()


class Fragile(nn.Module):
    """A layer whose forward or backward raises MemoryError when it is told to."""

    where: str | None = None

    def forward(self, x):
        if self.where == "backward":
            x.register_hook(self.fail)
        return self.fail(x) if self.where == "forward" else torch.tanh(x)

    def fail(self, _):
        raise MemoryError


def make_fragile() -> Net:
    return Net(nn.Linear(6, 8), Fragile(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train_past_failure(run: Run, where: str) -> None:
    """Train, and skip the second batch, for which there is no memory. After a backward, skip it with a finish."""
    ddp, optimizer = run.prepare(make_fragile())
    for step, (x, y) in enumerate(run.batches(4)):
        optimizer.zero_grad()
        ddp.module[1].where = where if step == 1 else None
        try:
            F.mse_loss(ddp(x), y).backward()
        except MemoryError:
            if where == "backward":
                ddp.finish_grad_sync()
                optimizer.zero_grad()
            continue
        ddp.finish_grad_sync()
        optimizer.step()


@situation("fairseq #869", "Forward runs out of memory, and all ranks skip the batch.", refused=FIRST)
def failed_forward(run: Run) -> None:
    train_past_failure(run, "forward")


@situation("icefall PR 8", "Backward runs out of memory halfway, and all ranks skip the batch.", refused=FIRST)
def failed_backward(run: Run) -> None:
    ddp, optimizer = run.prepare(make_fragile())
    for step, (x, y) in enumerate(run.batches(4)):
        optimizer.zero_grad()
        ddp.module[1].where = "backward" if step == 1 else None
        try:
            F.mse_loss(ddp(x), y).backward()
        except MemoryError:
            optimizer.zero_grad()
            continue
        ddp.finish_grad_sync()
        optimizer.step()


@situation("fairseq PR 689", "The same, but the handler calls the finish before zero_grad.")
def failed_and_finished(run: Run) -> None:
    train_past_failure(run, "backward")


@situation("fairscale #180", "torch.amp.GradScaler scales the loss.", refused="GradScaler")
def grad_scaler(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x, y in run.batches(3):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(ddp(x), y)).backward()
        ddp.finish_grad_sync()
        scaler.step(optimizer)
        scaler.update()


@situation("Lightning PR 5359", "One rank's loss overflows under torch.amp.GradScaler.", refused="GradScaler")
def overflow_on_a_rank(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.ranks:
            x, y = run.batch(step, [rank])
            factor = float("inf") if (rank, step) == (1, 1) else 1.0
            scaler.scale(factor * F.mse_loss(ddp(x), y) / len(run.ranks)).backward()
        ddp.finish_grad_sync()
        scaler.step(optimizer)
        scaler.update()


@situation("pytorch #53443", "All backward passes of a step are inside no_sync.", needs="no_sync")
def only_no_sync(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        with ddp.no_sync():
            F.mse_loss(ddp(x), y).backward()


@situation("nanochat PR 33", "All micro-batches except the last are inside no_sync.", needs="no_sync")
def accumulated(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        with ddp.no_sync():
            (F.mse_loss(ddp(-x), y) / 2).backward()
        (F.mse_loss(ddp(x), y) / 2).backward()


@situation(
    "accelerate #1299",
    "The gradients of a micro-batch are thrown away.",
    needs="no_sync",
    not_for={"m05w": "only a finish makes main_grad start from zero, as its docstring says"},
)
def given_up(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        with ddp.no_sync():
            F.mse_loss(ddp(-x), y).backward()
        ddp.zero_grad()
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()


@situation("stylegan2-ada #233", "Forward is inside no_sync, and backward is outside.", needs="no_sync")
def forward_in_no_sync(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        with ddp.no_sync():
            loss = F.mse_loss(ddp(x), y)
        loss.backward()


@situation("build-nanogpt #30", "Backward is inside no_sync, and forward is outside.", needs="no_sync")
def backward_in_no_sync(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step in range(0, 6, 2):
        optimizer.zero_grad()
        x, y = run.batch(step)
        loss = F.mse_loss(ddp(x), y)
        with ddp.no_sync():
            loss.backward()
        x, y = run.batch(step + 1)
        F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("DeepSpeed #7718", "Micro-batches are accumulated without no_sync.", refused=SECOND)
def accumulated_without_no_sync(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step in range(0, 4, 2):
        optimizer.zero_grad()
        for x, y in (run.batch(step), run.batch(step + 1)):
            F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("DeepSpeed PR 8135", "One forward has two losses with a backward each.", refused=(SECOND, ONE_FORWARD))
def two_losses(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        output = ddp(x)
        F.mse_loss(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("pytorch #47260", "Several forwards come before their backwards.", refused=(SECOND, ONE_FORWARD))
def forwards_first(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        losses = F.mse_loss(ddp(x), y), F.mse_loss(ddp(-x), y)
        for loss in losses:
            loss.backward()


@situation(
    "pytorch PR 58110", "A loss inside no_sync keeps the graph for a second one.", refused=ONE_FORWARD, needs="no_sync"
)
def graph_kept_in_no_sync(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        output = ddp(x)
        with ddp.no_sync():
            F.mse_loss(output, y).backward(retain_graph=True)
        output.square().mean().backward()


@situation("pytorch #22095", "A model with a buffer is called twice before backward.", refused=ONE_FORWARD)
def buffer_used_twice(run: Run) -> None:
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.linspace(0, 1, 8))

        def forward(self, x):
            return x * self.scale

    ddp, optimizer = run.prepare(Net(nn.Linear(6, 8), Scale(), nn.Linear(8, 3)))
    for x, y in run.steps(ddp, optimizer):
        (F.mse_loss(ddp(x), y) + ddp(-x).square().mean()).backward()


@situation("pytorch #175024", "A discriminator with BatchNorm judges two batches in a step.", refused=ONE_FORWARD)
def discriminator_called_twice(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    for step, _ in enumerate(run.steps(ddp, optimizer)):
        for rank in run.ranks:
            real, fake = run.batch(step, [rank])[0], run.batch(step + 9, [rank])[0]
            ((ddp(fake).tanh().mean() - ddp(real).tanh().mean()) / len(run.ranks)).backward()


@situation("Lightning PR 2019", "A generator and a discriminator take turns.", refused=(SECOND, ONE_FORWARD))
def generator_and_discriminator(run: Run) -> None:
    generator, optimizer_g = run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    judge, optimizer_d = run.prepare(Net(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    for z, real in run.steps(generator, optimizer_g):
        fake = generator(z)
        optimizer_d.zero_grad()
        scores_fake, scores_real = judge(torch.cat([fake.detach(), real])).tanh().chunk(2)
        (scores_fake - scores_real).mean().backward()
        judge.finish_grad_sync()
        optimizer_d.step()
        optimizer_g.zero_grad()
        judge.module.requires_grad_(False)
        judge(fake).tanh().mean().neg().backward()
        judge.module.requires_grad_(True)


@situation("pytorch #47562", "The loss contains a gradient penalty.", refused="backward")
def gradient_penalty(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        x.requires_grad_()
        output = ddp(x)
        [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
        (F.mse_loss(output, y) + slope.square().mean()).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("trl #7245", "The loss is computed with the module inside the wrapper.", refused="outside ddp(x)")
def loss_of_inner_module(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.batches(3):
        optimizer.zero_grad()
        F.mse_loss(ddp.module(x), y).backward()
        ddp.finish_grad_sync()
        optimizer.step()


@situation("pytorch #53979", "Evaluations come between backward and the finish, and between steps.")
def evaluations(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        with torch.no_grad():
            ddp(x)
        F.mse_loss(ddp(x), y).backward()
        with torch.inference_mode():
            ddp.eval()(x)
        ddp.train()


@situation(
    "train-llm-from-scratch PR 32",
    "Only rank 0 runs an evaluation.",
    not_for=dict.fromkeys(("m11", "m14"), "all ranks gather the weights, as its docstring says"),
)
def evaluation_on_a_rank(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step in range(3):
        run.train(ddp, optimizer, steps=1, start=step)
        if 0 in run.ranks:
            with torch.no_grad():
                ddp.eval()(run.batch(step)[0])
            ddp.train()


@situation(
    "pytorch #76464",
    "Hooks step while backward is running.",
    refused=FIRST,
    needs="reads_grads",
    not_for={
        **dict.fromkeys(("m01", "m02"), "nothing is in flight, so it is a step without the finish"),
        "m05w": "the gradients are in main_grad until the finish",
    },
)
def step_in_backward(run: Run) -> None:
    model = Net()
    ddp = run.wrap(model)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1.0) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in run.batches(3):
        F.mse_loss(ddp(x), y).backward()
        ddp.finish_grad_sync()


def step_with_closures(run: Run, ddp: nn.Module, optimizer: Any) -> None:
    for x, y in run.batches(3):

        def compute_loss(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(ddp(x), y)
            loss.backward()
            ddp.finish_grad_sync()
            return loss

        optimizer.step(compute_loss)


@situation("Lightning #4188", "The optimizer's step calls a closure.")
def closure(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    step_with_closures(run, ddp, optimizer)


@situation("pytorch #30439", "The optimizer is LBFGS.", refused=("LBFGS", "elementwise"), needs="any_optimizer")
def lbfgs(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(), LBFGS, lr=0.1, max_iter=1)
    step_with_closures(run, ddp, optimizer)


@situation("Lightning #19045", "The loss is averaged over the ranks between backward and the finish.")
def loss_averaged_before_finish(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        mean = loss.detach().clone()
        if run.rank is not None:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        run.record("loss", mean.double())


@situation(
    "pytorch PR 100773",
    "A rank that skips a layer averages a metric between backward and the finish.",
    not_for={"m03": EQUAL_USE},
)
def metric_before_finish(run: Run) -> None:
    class Shorter(Net):
        def forward(self, x, rank):
            return nn.Sequential(*self[: 2 if rank else 4], self[4])(x)

    ddp, optimizer = run.prepare(Shorter())
    for step, _ in enumerate(run.steps(ddp, optimizer)):
        metric = torch.zeros(128)  # as many elements as a padded bucket
        for rank in run.ranks:
            x, y = run.batch(step, [rank])
            loss = F.mse_loss(ddp(x, rank), y)
            (loss / len(run.ranks)).backward()
            metric += loss.detach() / len(run.ranks)
        if run.rank is not None:
            dist.all_reduce(metric, dist.ReduceOp.AVG)
        run.record("metric", metric.double())
