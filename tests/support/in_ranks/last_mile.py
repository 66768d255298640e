"""What ranks do in the tests of the capstone's program. They import it as `train.train`."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from brigade.course.checks.tiny_lm import Size, TinyLM
from brigade.course.table.modules import ROOT
from brigade.lab import timed_step

sys.path.append(str(ROOT))
from lessons.capstone import checkpoint

PIECES = 4  # in which a file is written


def program() -> Any:
    return importlib.import_module("train.train")


class Pieces:
    """A file that is written in pieces. `reach` is called before each of them."""

    def __init__(self, file, reach):
        self.file, self.reach = file, reach

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        length = -(-len(data) // PIECES)
        for start in range(0, len(data), length):
            self.reach()
            self.file.write(data[start : start + length])
            self.file.flush()


def train_until(plan: dict, workload: dict, variant: dict, victim: int, moment: int) -> int:
    """Train, and kill rank `victim` at one of its moments. Return how many there are if this one does not come.

    A moment is before a step, a piece of a file, a file's way to the disk, its renaming, or the removal of a file.
    """
    train, count = program(), itertools.count()
    passed = 0

    def reach() -> None:
        nonlocal passed
        passed = next(count) + 1
        if dist.get_rank() == victim and passed == moment + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(call):
        return lambda *args, **options: (reach(), call(*args, **options))[1]

    checkpoint.open = lambda *args: Pieces(open(*args), reach)  # noqa: SIM115
    checkpoint.os.fsync, checkpoint.os.replace = before(os.fsync), before(os.replace)
    checkpoint.Path.unlink = before(Path.unlink)
    train.draw_own_batch = before(train.draw_own_batch)
    train.train(plan, workload, variant)
    return passed


def train_on_a_full_disk(plan: dict, workload: dict, variant: dict) -> str:
    """Train. From the second checkpoint on, rank 1 cannot write more than 1000 bytes. Return what is said."""
    train = program()
    save, numbers = checkpoint.save, itertools.count()

    def limit_and_save(*args) -> None:
        if next(numbers) == 1 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        save(*args)

    checkpoint.save = limit_and_save
    try:
        train.train(plan, workload, variant)
    except train.UserError as error:
        return str(error)
    return ""


def hang(plan: dict, workload: dict, variant: dict, culprit: int, step: int) -> None:
    """Train until `culprit` hangs before a step. The time is up when every other rank waits for it."""
    train, hung = program(), threading.Event()
    draw, dump_trace = train.draw_own_batch, train.student("m13_post_mortem", "dump_trace")
    path = Path(plan["dumps"]) / f"dump_{dist.get_rank()}.json"

    def draw_or_hang(text, workload, number, has_loop):
        if number == step:
            hung.set()
            if dist.get_rank() == culprit:
                threading.Event().wait()
        return draw(text, workload, number, has_loop)

    def is_waiting() -> bool:
        dump_trace(path)
        return any(not entry["retired"] for entry in json.loads(path.read_text())["entries"])

    class Timer:
        """It ends when the rank hangs, instead of after some time."""

        daemon = is_cancelled = False

        def __init__(self, seconds, function):
            self.function = function

        def start(self):
            threading.Thread(target=self.run, daemon=True).start()

        def cancel(self):
            self.is_cancelled = True

        def run(self):
            hung.wait()
            if self.is_cancelled:
                return
            while not (dist.get_rank() == culprit or is_waiting()):
                pause()
            self.function()

    def wait_for_the_others(_) -> None:
        everybody = [path.with_name(f"said_{rank}") for rank in range(dist.get_world_size())]
        everybody[dist.get_rank()].touch()
        while not all(said.exists() for said in everybody):
            pause()

    train.threading.Timer, train.time.sleep, train.draw_own_batch = Timer, wait_for_the_others, draw_or_hang
    train.train(plan, workload, variant)


def pause() -> None:
    """Give way to other processes."""
    threading.Event().wait(0.01)


def train_plainly(snippet: str, workload: dict, first: int, steps: int) -> list[float]:
    """Load a checkpoint with the lines of the reading, and go on in plain torch, on one rank. Return the losses."""
    train = program()
    model = TinyLM(Size(**workload["size"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=workload["learning_rate"], momentum=0.9)
    exec(snippet, {"model": model, "optimizer": optimizer, "torch": torch, "Path": Path, "json": json})
    losses, (_, text) = [], timed_step.make_start(workload)
    for step in range(first, steps):
        tokens, targets = train.draw_own_batch(text, workload, step, True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())  # IGNORED is torch's own value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
