"""Training with ZeroOptimizer survives the death of a rank: it resumes from a checkpoint on fewer or more ranks."""

import os
import signal

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from brigade.course.submission import read
from brigade.rank.api import student
from brigade.runner import ranks

STEPS, KILLED_AT = 12, 7
BATCH = 12  # examples in a step, divided among the ranks
TOLERANCE = 1e-9  # relative, in float64: other sums than on another number of ranks, over 12 steps of AdamW


def examples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(dim=1, keepdim=True)


def train(path: str, victim: int | None) -> dict:
    """Train from the checkpoint in `path`, if it exists, and write a checkpoint after every step.

    The rank `victim` kills itself before step KILLED_AT. Return the losses of all steps, the weights, and the
    first step of this run.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    checkpoint = torch.load(path) if os.path.exists(path) else None
    model = nn.Sequential(nn.Linear(7, 29), nn.Tanh(), nn.Linear(29, 23), nn.Tanh(), nn.Linear(23, 1)).double()
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    ddp = student("m07_cached_shards", "CachedDDP")(model, bucket_numel=200)
    optimizer = student("m08_zero_optimizer", "ZeroOptimizer")(ddp, torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    losses = []
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        losses = checkpoint["losses"]
    first = len(losses)
    for step in range(first, STEPS):
        if step == KILLED_AT and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = (part.chunk(size)[rank] for part in examples(step))
        optimizer.zero_grad()
        loss = ((ddp(x) - y) ** 2).mean()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        losses.append(loss.item())
        save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler}, losses)
    return {"losses": losses, "weights": dict(model.named_parameters()), "first": first}


def save(path: str, parts: dict, losses: list[float]) -> None:
    """Collect the state on all ranks. Rank 0 writes it to a new file, then replaces the old file."""
    state = {name: part.state_dict() for name, part in parts.items()} | {"losses": losses}
    if dist.get_rank() == 0:
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)


def run(world_size: int, path, victim: int | None = None) -> ranks.RankResults:
    packages = {"submission": read("solutions", 8).sources}
    return ranks.run_ranks(train, str(path), victim, world_size=world_size, packages=packages, seed=0)


@pytest.mark.parametrize(("before", "after", "victim"), [(4, 2, 3), (2, 3, 0)])
def test_resumes_on_another_number_of_ranks(before, after, victim, tmp_path):
    whole = run(before, tmp_path / "whole.pt")
    with pytest.raises(ranks.RankFailure) as failed:
        run(before, tmp_path / "checkpoint.pt", victim)
    assert failed.value.kind == "died" and failed.value.rank == victim
    assert "killed by SIGKILL" in str(failed.value)

    resumed = run(after, tmp_path / "checkpoint.pt")
    for result in resumed:
        assert KILLED_AT - 1 <= result["first"] <= KILLED_AT  # rank 0 may have been writing when the run was ended
        assert result["losses"] == pytest.approx(whole[0]["losses"], rel=TOLERANCE, abs=0)
        for name, weight in whole[0]["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=TOLERANCE, atol=TOLERANCE)
    assert psutil.Process(ranks.SERVER._process.pid).children(recursive=True) == []
    assert list(ranks.SERVER.scratch.glob("run-*")) == []
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.pt", "whole.pt"]
