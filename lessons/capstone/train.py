"""Train TinyLM on real text with an engine that you have written, and save checkpoints that any other engine can load.

    python lessons/capstone/train.py --engine 8 --save out/run
    torchrun --standalone --nproc-per-node 2 lessons/capstone/train.py --engine 11 --resume out/run --steps 400

The first command starts two ranks on this machine. At the end, the same ranks measure the engine beside torch's.
"""

import argparse
import functools
import io
import json
import math
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy

from brigade.course.checks.tiny_lm import SIZES
from brigade.course.cli.console import console
from brigade.course.cli.errors import run_safely
from brigade.course.cli.options import ABOVE_ZERO, AT_LEAST_ONE, add, add_target, resolve_results_file
from brigade.course.table.listing import find_unwritten_parts
from brigade.course.table.modules import MODULES, ROOT, find_module, get_module
from brigade.course.table.submission import Snapshot
from brigade.lab import bench, corpus, timed_step, torchrun
from brigade.lab.cli.lab import choose_ranks
from brigade.lab.engine import find_engine
from brigade.lab.experiment import show_progress
from brigade.lab.ladder import TORCH_DDP, TORCH_FSDP, Workload, fit_batch, get_variant, run_benchmark
from brigade.lab.plots import make_training_table
from brigade.ranks.errors import UserError
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import student
from brigade.ranks.runner.ranks import RankFailure, run_ranks

sys.path.append(str(ROOT))  # for a script, and for ranks, which import this file from its text

from lessons.capstone import checkpoint

LOCKSTEP, DUMPS = find_module("LockstepLoop"), find_module("diagnose")
LOOP, POST_MORTEM = LOCKSTEP.package, DUMPS.package
IGNORED = -100  # the target of a token that is not learnt, as in module 12
NEWLINE = 10
STOP = "stop"  # a file in the directory of --save, after which a run saves and ends, as before the end of a job's time
WARMUP = 2  # steps of the comparison that are not timed
MONTH_S = 30 * 86400.0  # `watch_for_hangs` stops a run much earlier

# ---- data: every rank draws the whole batch of a step, which depends only on the step's number, and keeps its own part


def draw_own_batch(text, workload, step, has_loop):
    """Return this rank's tokens and targets, (sequences, time). A sequence ends with its last whole line of text."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = corpus.draw_batch(text, workload["batch_size"], workload["time"], generator)
    ends = [(row == NEWLINE).nonzero().flatten().tolist() for row in targets]
    lengths = [end[-1] + 1 if end else len(row) for end, row in zip(ends, targets)]
    for row, length in zip(targets, lengths):
        row[length:] = IGNORED
    rank, size = dist.get_rank(), dist.get_world_size()
    own = student(LOOP, "assign_sequences")(lengths, size)[rank] if has_loop else [*range(rank, len(lengths), size)]
    if not own:  # this rank takes part in the collectives all the same
        own, targets = [0], torch.full_like(targets, IGNORED)
    return [part[own].to(timed_step.device()) for part in (tokens, targets)]


# ---- the loop: module 12's, with any engine, or a plain one


class PlainLoop:
    """Take steps without module 12: each token of all ranks counts once, but an infinite value is not skipped."""

    def __init__(self, engine):
        self.engine = engine

    def step(self, micro_batches):
        """Train on one micro-batch. Return an object with the mean `loss` of all ranks' tokens."""
        [(tokens, targets)] = micro_batches
        num_tokens = (targets != IGNORED).sum()
        dist.all_reduce(num_tokens)
        self.engine.zero_grad()
        outputs = self.engine(tokens).flatten(0, -2)  # (tokens, vocabulary)
        loss = cross_entropy(outputs, targets.flatten(), ignore_index=IGNORED, reduction="sum") / num_tokens
        (loss * dist.get_world_size()).backward()  # the wrapper divides by the number of ranks
        self.engine.finish_grad_sync()
        self.engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        return SimpleNamespace(loss=total.item())


def make_loop(engine, has_loop):
    """Return a loop for this engine: that of module 12, if it is written."""
    if not has_loop:
        return PlainLoop(engine)
    loop_class = student(LOOP, "LockstepLoop")

    class Loop(loop_class):
        def __init__(self):
            self.ddp, self.optimizer, self.max_norm = engine, engine, None

        def decide(self, loss_sum, num_tokens):
            """Let all ranks decide together, because with modules 11, 14 and 15, each has only a part of the sums."""
            norms = [vector_norm(p.grad, dtype=torch.float64) for p in self.ddp.parameters() if p.grad is not None]
            square = sum(float(norm) ** 2 for norm in norms)
            loss_sum, square = self.sum_over_ranks([loss_sum, square], torch.float64)
            return not (math.isfinite(loss_sum) and math.isfinite(square)), loss_sum / num_tokens

    try:
        return loop_class(engine.wrapper, engine.optimizer)
    except ValueError:  # this is no wrapper of modules 4 to 7
        return Loop()


def train(plan, workload, variant):
    """Train a variant. Return the loss of every step, in nats per token, and those of the steps before a resume."""
    torch.manual_seed(dist.get_rank())  # ranks start from different weights, and the engine takes those of rank 0
    start, text = timed_step.make_start(workload)
    about = {"step": 0, "losses": [], "model": workload["size"], "tokens": plan["tokens"]}
    if plan["resume"]:
        folder = Path(plan["resume"])
        about, (weights, state) = checkpoint.read_manifest(folder, workload["size"]), checkpoint.load(folder)
        start.load_state_dict(weights)
    engine = find_engine(variant)(variant, timed_step.copy_model(start, variant), workload)
    if plan["resume"]:
        engine.load_state([weight.detach() for weight in start.parameters()], state)
    loop = make_loop(engine, plan["has_loop"])
    with watch_for_hangs(plan) as made_progress:
        for step in range(about["step"], plan["steps"]):
            about["losses"].append(loop.step([draw_own_batch(text, workload, step, plan["has_loop"])]).loss)
            about["step"] = step + 1
            recording.note("trained", step=step)
            stops = about["step"] < plan["steps"] and is_asked_to_stop(plan)
            if plan["save"] and (about["step"] % plan["every"] == 0 or about["step"] == plan["steps"] or stops):
                checkpoint.save(Path(plan["save"]), *engine.state_dict(), about)
            if stops:
                steps = f"{about['step']} of {plan['steps']} steps"
                raise UserError(f"stopped after {steps}, because of the file {STOP}; --resume goes on")
            made_progress()
    timed_step.remove_gradient_hooks(engine.module)
    timed_step.release_memory()
    return about["losses"]


def is_asked_to_stop(plan):
    """Return whether any rank sees the file STOP. The ranks agree, because each machine may see it at another time."""
    if not plan["save"]:
        return False
    seen = torch.tensor(int((Path(plan["save"]) / STOP).exists())).to(timed_step.device())
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen.item())


@contextmanager
def watch_for_hangs(plan):
    """Yield a function to call after each step. If this takes too long, end the process, with a dump of module 13."""
    dump_trace, timer = student(POST_MORTEM, "dump_trace") if plan["dumps"] else None, None

    def dump():
        sentence = f"rank {dist.get_rank()} has taken no step for {plan['deadline']:g} s"
        if dump_trace:
            dump_trace(Path(plan["dumps"]) / f"dump_{dist.get_rank()}.json")
            sentence += f": `brigade post-mortem {plan['dumps']}` says who waits for whom"
        print(sentence, file=sys.stderr, flush=True)
        time.sleep(torchrun.OTHERS_FIRST_S)  # torchrun stops the other ranks when the first one ends
        os._exit(1)

    def restart():
        nonlocal timer
        if timer:
            timer.cancel()
        timer = threading.Timer(plan["deadline"], dump)
        timer.daemon = True
        timer.start()

    restart()
    try:
        yield restart
    finally:
        timer.cancel()


# ---- the program


def work(plan, workload, variants):
    """Train on a rank, then measure all variants together. Return what `timed_step.train` returns, and the curves."""
    batches = workload | {"batch_size": plan["batch_size"]}
    curves = {variants[0]["label"]: train(plan, batches, variants[0])}
    if plan["compares_curves"]:
        curves[TORCH_DDP.label] = train(plan | {"resume": "", "save": ""}, batches, variants[1])
    return timed_step.train(workload, variants) | {"curves": curves}


def run(arguments):
    """Train and compare. Return the exit status 0."""
    options = make_parser().parse_args(arguments)
    world_size, backend = choose_ranks(options)
    variant = get_variant(get_module(options.engine))
    sources, size = bench.read_engine(options.target, variant), SIZES[options.size]
    (has_loop, loop), (has_dumps, _) = (sources[f"{one.package}.{one.name}"] for one in (LOCKSTEP, DUMPS))
    has_loop = bool(has_loop) and not find_unwritten_parts(loop)
    folder, resumed = (path and Path(path).resolve() for path in (options.save, options.resume))
    about = checkpoint.read_manifest(resumed, asdict(size)) if resumed else {"step": 0, "tokens": 1024}
    if about["step"] >= options.steps:
        console.print(f"{resumed} has {about['step']} steps already: choose more with --steps")
        return 0
    if folder and folder != resumed and (folder / checkpoint.MANIFEST).exists():
        raise UserError(f"{folder} has a checkpoint already: add --resume {folder}, or choose another directory")
    picture = resolve_results_file(options.png)
    dumps = folder or ROOT / "out" / "dumps"  # dump_trace is given, so the file of module 13 is enough
    dumps.mkdir(parents=True, exist_ok=True)
    for old in dumps.glob("dump_*.json"):
        old.unlink(missing_ok=True)
    tokens, sequence = options.tokens or about["tokens"], min(128, size.context)
    node_size = torchrun.read_rank_variables()[3] if torchrun.is_torchrun() else world_size
    workload = Workload(
        size=size,
        batch_size=max(1, tokens // sequence),
        time=sequence,
        rounds=options.rounds + WARMUP,
        warmup=WARMUP,
        learning_rate=0.05 if options.size == "tiny" else 0.005,
        node_size=None if world_size % node_size else node_size,
    )
    plan = {"steps": options.steps, "every": options.every, "deadline": options.deadline, "has_loop": has_loop}
    plan |= {"dumps": str(dumps) if has_dumps else ""}
    plan |= {"save": str(folder or ""), "resume": str(resumed or ""), "tokens": tokens}
    plan |= {"batch_size": workload.batch_size, "compares_curves": bool(picture)}
    variants = [replace(one, dtype=options.dtype) for one in (variant, TORCH_DDP, TORCH_FSDP)]
    curves = {}
    total = (options.steps - about["step"] + options.steps * bool(picture)) + workload.rounds * (len(variants) + 1)
    with show_progress("training steps", total) as advance:

        def follow(rank, event):
            if rank == 0 and (event["kind"] == "trained" or (event["kind"] == "step" and event["step"] is not None)):
                advance()

        def run_work(_, *args, **how):
            start = torchrun.run_on_torchrun if torchrun.is_torchrun() else run_ranks
            results = start(work, plan, *args, **how | {"on_event": follow})
            curves.update(results[0]["curves"])
            return results

        # Under torchrun, the deadline is that of each collective. Otherwise it is that of the whole run.
        deadline = options.deadline + 60 if torchrun.is_torchrun() else MONTH_S
        how = {"world_size": world_size, "backend": backend, "share_gpu": options.share_gpu}
        how |= {"deadline": deadline, "checks_losses": False}
        try:
            ladder = run_benchmark(fit_batch(workload, world_size), variants, sources, run=run_work, **how)
        except RankFailure as failure:
            if failure.error == "UserError":
                raise UserError(failure.message) from None
            raise
    losses = curves[variant.label]
    for step in sorted({*range(0, len(losses), max(1, len(losses) // 10)), len(losses) - 1}):
        console.print(f"step {step:6d}  loss {losses[step]:.4f}")
    if not has_loop:
        console.print("Each rank had equally many sequences, because module 12 is not written yet.")
    console.print(make_training_table(ladder))
    if picture:
        from brigade.lab.notebook_plots import draw_lines

        points = {name: (range(len(curve)), curve) for name, curve in curves.items()}
        labels = {"xlabel": "step", "ylabel": "loss (nats per byte)", "title": "Loss on Python's standard library"}
        draw_lines(points, **labels, from_zero=False).savefig(picture)
    return 0


def make_parser():
    parser = argparse.ArgumentParser(
        description="Train TinyLM on the source of Python's standard library with an engine of the course, and save "
        "checkpoints that load with any other engine on any number of ranks.",
        epilog="Example: python lessons/capstone/train.py --engine 8 --save out/run",
    )
    add(parser, "--engine N", "the module whose wrapper and optimizer train (default: 8)", default="8")
    add_target(parser)
    add(parser, "--size", "the size of the model (default: tiny)", choices=[*SIZES], default="tiny")
    add(parser, "--tokens N", "tokens of a step on all ranks together (default: 1024)", AT_LEAST_ONE)
    add(parser, "--dtype", "of the weights (default: float32)", choices=("float32", "bfloat16"), default="float32")
    add(parser, "--steps N", "steps, including those before a resume (default: 200)", AT_LEAST_ONE, default=200)
    add(parser, "--save DIR", "write checkpoints to this directory, which all machines must share")
    add(parser, "--every N", "steps between two checkpoints (default: 50)", AT_LEAST_ONE, default=50)
    add(parser, "--resume DIR", "go on from the checkpoint in this directory, of any engine and number of ranks")
    stop = "stop if a rank takes no step for this long, and write what each rank recorded (default: 120)"
    add(parser, "--deadline SECONDS", stop, ABOVE_ZERO, default=120.0)
    add(parser, "--ranks N", "the number of ranks without torchrun (default: 2)", AT_LEAST_ONE)
    add(parser, "--backend", "default: nccl if there is a GPU for every rank", choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU; the times are then meaningless")
    add(parser, "--rounds N", "steps of the comparison with torch (default: 10)", AT_LEAST_ONE, default=10)
    add(parser, "--png FILE", "also train with torch DDP, and draw both loss curves")
    return parser


if __name__ == "__main__":
    sys.exit(run_safely(functools.partial(torchrun.report_rank_failures(run), sys.argv[1:]), "train"))
