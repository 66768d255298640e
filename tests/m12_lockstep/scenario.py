"""Functions that the ranks run in the checks of module 12. The expected values use the same classifier."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from brigade.course.checks import edge_case_models
from brigade.course.checks.forms import ListOf, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import student
from brigade.ranks.rank.recording import phase
from helpers.training import build, like_weights, list_steps, move_to_device, wrap
from m08_zero_optimizer.scenario import replace_last_entry

PACKAGE = "m12_lockstep"
IGNORED = -100
FIELDS = ("loss", "num_tokens", "is_skipped")  # of a result


class Classifier(nn.Module):
    """A model of the checks. In forward, it finds the batch of its inputs, for the batch's borders."""

    def __init__(self, model: nn.Module, batches: list[dict[str, Any]]):
        super().__init__()
        self.model = model
        self.batches = batches

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., classes). In a "masked" batch, the right classes are impossible, so the loss is infinite."""
        batch = next(one for one in self.batches if one["x"].shape == inputs.shape and torch.equal(one["x"], inputs))
        outputs = batch["scale"] * edge_case_models.compute_output(self.model, batch)
        if batch.get("masked"):
            right = batch["y"].clamp(min=0)[..., None] == torch.arange(outputs.shape[-1], device=outputs.device)
            outputs = outputs.masked_fill(right, -torch.inf)
        outputs = outputs.view_as(outputs)  # so that the phase begins before the last border is passed
        recording.follow_backward(outputs)
        return outputs


class Feed:
    """One pass over batches, which counts them. Batch `fails_at` raises `error`; so does the iterator if that is -1."""

    def __init__(self, batches: list[dict[str, Any]], error: Exception | None = None, fails_at: int | None = None):
        self.batches, self.error, self.fails_at = batches, error, fails_at
        self.num_taken, self.is_used = 0, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.fails_at == -1:
            raise self.error
        if self.is_used:
            raise AssertionError("call iter(batches) only once: a second iterator begins with the first batch again")
        self.is_used = True
        return self.take()

    def take(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(self.batches):
            if number == self.fails_at:
                raise self.error
            self.num_taken += 1
            yield batch["x"], batch["y"]
        if self.fails_at == len(self.batches):
            raise self.error


@returns(lambda job: [ListOf(ListOf(int))] * len(job["problems"]))
def assign(job: dict) -> list[list[list[int]]]:
    """Return the submission's assignment for each pair (lengths, number of ranks)."""
    function = student(PACKAGE, "assign_sequences")
    return [[[int(i) for i in part] for part in function(list(lengths), n)] for lengths, n in job["problems"]]


def make_loop(job: dict) -> tuple[list[list[dict]], nn.Module, torch.optim.Optimizer, Any]:
    """Return the batches on this rank's device, the model, the optimizer, and the submission's loop."""
    model = build(job)
    batches = [[move_to_device(batch) for batch in step] for step in job["batches"]]
    ddp = wrap(job, Classifier(model, sum(batches, [])))
    optimizer = make_optimizer(job, ddp)
    with phase("construct"):
        loop = student(PACKAGE, "LockstepLoop")(ddp, optimizer, **job.get("options", {}))
    return batches, model, optimizer, loop


def make_optimizer(job: dict, ddp: nn.Module) -> torch.optim.Optimizer:
    """Return a torch optimizer, or the submission's `ZeroOptimizer` of that class."""
    optimizer_cls, options = getattr(torch.optim, job["optimizer"]), job["optimizer_options"]
    if job["is_zero"]:
        optimizer = student("m08_zero_optimizer", "ZeroOptimizer")(ddp, optimizer_cls, **options)
        clip = optimizer.clip_grad_norm_
        optimizer.clip_grad_norm_ = lambda max_norm: (recording.note("clip"), clip(max_norm))[1]
        return optimizer
    return optimizer_cls([p for p in ddp.parameters() if p.requires_grad], **options)


def describe(result: Any) -> tuple[float, float, bool]:
    """Return the loss, the number of tokens and whether the step was skipped, as Python numbers."""
    return float(result.loss), float(result.num_tokens), bool(result.is_skipped)  # the order of FIELDS


def form_training(job: dict) -> dict:
    """Return the form of what `train` returns."""
    steps = len(job["batches"])
    answer = {"results": [(float, float, bool)] * steps, "weights": [like_weights(job)] * (steps + 1)}
    return answer | (dict.fromkeys(("changed", "left"), [str] * steps) if job.get("watches") else {})


@returns(form_training, list_steps)
def train(job: dict) -> dict:
    """Take a step with each of job["batches"]. Return the results, and the weights before and after each step.

    In step job["poisoned_step"], the last entry of a gradient of one rank changes: job["poison"] is the number of the
    parameter and the value. If job["watches"], return as text the names of the optimizer's tensors that each step
    has "changed", and of the parameters whose gradients it has "left".
    """
    steps, model, optimizer, loop = make_loop(job)
    current = {"step": -1}
    if job.get("poisoned_rank") == dist.get_rank():
        number, value = job["poison"]
        parameter, at = list(model.parameters())[number], job["poisoned_step"]
        parameter.register_hook(lambda grad: replace_last_entry(grad, value) if current["step"] == at else grad)
    results, weights, state, changed, left = [], [copy_weights(model)], copy_state(optimizer), [], []
    for step, batches in enumerate(steps):
        # The steps' work differs: their launches cannot be compared.
        recording.note("step", step=step, unsynced=True, num_batches=len(batches), fails=None, is_step=True)
        current["step"] = step
        results.append(describe(loop.step([(batch["x"], batch["y"]) for batch in batches])))
        weights.append(copy_weights(model))
        before, state = state, copy_state(optimizer)
        names = sorted(before.keys() | state.keys())
        both = state.keys() & before.keys()
        different = [name for name in names if name not in both or not torch.equal(before[name], state[name])]
        changed.append(", ".join(different[:8]))
        with_grad = [name for name, p in model.named_parameters() if p.grad is not None and bool((p.grad != 0).any())]
        left.append(", ".join(with_grad[:8]))
    answer = {"results": results, "weights": weights}
    return answer | ({"changed": changed, "left": left} if job.get("watches") else {})


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of all tensors in the state of an optimizer, or of the inner optimizer of a ZeroOptimizer."""
    state = getattr(optimizer, "optim", optimizer).state_dict()["state"]
    tensors = {f"{i}.{key}": value for i, entry in state.items() for key, value in entry.items()}
    return {name: value.detach().clone() for name, value in tensors.items() if isinstance(value, Tensor)}


@returns(lambda job: None, list_steps)
def step_with_loop(job: dict) -> None:
    """Do the same as `train`, for a check that needs only the record."""
    train(job)


@returns(lambda job: None, list_steps)
def step_without_loop(job: dict) -> None:
    """Take a step with the only batch of job["batches"], without a loop. Clip in the phase "clip"."""
    [[batch]] = [[move_to_device(batch) for batch in step] for step in job["batches"]]
    ddp = wrap(job, Classifier(build(job), [batch]))
    optimizer = make_optimizer(job, ddp)
    recording.note("step", step=0, unsynced=True)
    ddp(batch["x"]).logsumexp(-1).sum().backward()
    ddp.finish_grad_sync()
    if job["is_zero"]:
        with phase("clip"):
            optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def form_runs(job: dict) -> list[dict]:
    """Return the form of what `run` returns."""
    own = {"num_steps": int} if "fails" in job else {"totals": ListOf(float), "reads": ListOf(int)}
    return [{"raised": str, "weights": like_weights(job)} | own] * len(job["batches"])


@returns(form_runs, lambda job: [number for call in range(len(job["batches"])) for number in (call, None)])
def run(job: dict) -> list[dict]:
    """Call `run` once for each entry of job["batches"]. Return the outcomes, and the weights after each call.

    "totals" contains the number of tokens of each result, and "reads" how many batches were taken before each step of
    the optimizer. job["fails"] has the rank whose iterable raises, the number of the batch, and the type of the
    exception. Then return the number of steps instead.
    """
    calls, model, optimizer, loop = make_loop(job)
    fails, answers = job.get("fails", {"rank": None}), []
    for call, batches in enumerate(calls):
        recording.note("step", step=call, unsynced=True, num_batches=len(batches), fails=fails["rank"], is_step=False)
        error = getattr(builtins, fails.get("kind", "ValueError"))("gone")
        feed = Feed(batches, error, fails["at"] if fails["rank"] == dist.get_rank() else None)
        reads: list[int] = []
        handle = optimizer.register_step_pre_hook(lambda *_, feed=feed, reads=reads: reads.append(feed.num_taken))
        raised, totals = "", []
        try:
            arguments = [job["micro_batches"]] if job["micro_batches"] > 1 else []
            totals = [float(result.num_tokens) for result in loop.run(feed, *arguments)]
        except NotImplementedError:
            raise  # the skeleton's
        except Exception as exception:
            if exception is not error and not isinstance(exception, RuntimeError):
                raise
            raised = "the exception itself" if exception is error else "RuntimeError"
        handle.remove()
        recording.note("step", step=None)
        own = {"num_steps": len(reads)} if "fails" in job else {"totals": totals, "reads": reads}
        answers.append({"raised": raised, "weights": copy_weights(model)} | own)
    return answers
