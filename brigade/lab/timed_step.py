"""What the ranks of the lab do: build a variant, take its training steps, and measure them.

`ladder.py` starts these ranks. This file needs only torch.
"""

from __future__ import annotations

import gc
import random
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.course.checks.tiny_lm import Size, TinyLM, language_loss
from brigade.lab import corpus, emulated_link
from brigade.lab.emulated_link import Link, Pace, read_link
from brigade.lab.engine import Engine, find_engine
from brigade.lab.memory_accounting import PeakMemory, count_kept_bytes
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device
from brigade.ranks.rank.memory import LiveMemory, is_self_copy, list_tensors

STEP_BEFORE = "the step before"  # the phase of launches that replace those of the previous step
BYTES_PER_WEIGHT = 16  # of a variant in fp32: the weight, its gradient, its momentum, and its part of a flat gradient
SPARE = 0.1  # the part of a GPU's free memory that no variant may need
CALIBRATION = 9  # the median backward of this many rounds sets the link, because a busy machine's speed changes
HELD_OUT = 16  # sequences on which the final loss is computed
COPIES = {"_foreach_copy_", "_to_copy", "cat", "clone", "copy_", "stack"}


def train(workload: dict, variants: list[dict]) -> dict:
    """Take all steps of all variants. Return, by label, what `measure_variant` returns afterwards, as "variants".

    Also return "cpu_shares", this rank's part of `Ladder.cpu_shares`, and the fields "link", "backward_s", "real_s",
    "model_bytes" and "device" of `ladder.Ladder`.

    The variants alternate, unless the GPU has too little memory for all of them. Then they run one after the other.
    Variants without a wrapper and an optimizer, such as the computation alone, run again beside each of the others.
    The result of these others then has the marks of the computation beside it as "computation_marks". All other results
    are those of the first run.
    """
    if dist.get_world_size() == 1:
        torch.set_num_threads(1)  # this run is not timed, and a second thread slows it down on a busy machine
    start, text = make_start(workload)
    indices = range(len(variants))
    computations = [index for index in indices if not variants[index]["wrapper"] and not variants[index]["optimizer"]]
    others = [index for index in indices if index not in computations]
    if len(others) < 2 or can_alternate(workload, variants, start, text):
        return run_alternately(workload, variants, indices, start, text)
    results = [run_alternately(workload, variants, [index, *computations], start, text) for index in others]
    measured: dict[str, Any] = {}
    for result in results:
        own, *alone = result["variants"].values()
        own["computation_marks"] = alone[0]["marks"] if alone else None
        measured = result["variants"] | measured
    return results[0] | {"variants": measured}


def can_alternate(workload: dict, variants: Sequence[dict], start: TinyLM, text: bytes) -> bool:
    """Return whether the memory of every rank has room for all variants at once. The ranks agree."""
    free_bytes = measure_free_bytes()
    if free_bytes is None:
        return True
    step_bytes = explain_full_gpu(
        "one step of the model", lambda: measure_step_bytes(workload, copy_model(start, variants[0]), text)
    )
    release_memory()
    numel = sum(parameter.numel() for parameter in start.parameters())
    has_room = torch.tensor(int(fits_in_memory(free_bytes, step_bytes, numel, len(variants)))).to(device())
    dist.all_reduce(has_room, dist.ReduceOp.MIN)
    return bool(has_room.item())


def measure_step_bytes(workload: dict, model: TinyLM, text: bytes) -> int:
    """Return the bytes of a forward and a backward of the model at the peak, weights and gradients included."""
    tokens, targets = take_own_part(make_draw_batch(workload, text)(workload["batch_size"]))
    with LiveMemory(model.parameters()) as memory:
        language_loss(model(tokens), targets).backward()
    return memory.peak


def fits_in_memory(free_bytes: int, step_bytes: int, numel: int, num_variants: int) -> bool:
    """Return whether this many variants of a model with `numel` weights fit into the free memory, with some to spare.

    `step_bytes` is what `measure_step_bytes` returns.
    """
    return step_bytes + BYTES_PER_WEIGHT * numel * num_variants <= (1 - SPARE) * free_bytes


def measure_free_bytes() -> int | None:
    """Return this rank's share of the memory that is free on its GPU, or None on a CPU. All ranks call this together.

    Ranks that share a GPU share its memory equally.
    """
    if device().type == "cpu":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device())
    return free_bytes // count_ranks_with(f"{socket.gethostname()} {torch.cuda.get_device_properties(device()).uuid}")


def count_ranks_with(name: str) -> int:
    """Return how many ranks, including this one, call this function with this name. All ranks call it together."""
    names = torch.zeros(dist.get_world_size(), dtype=torch.int64)  # a number for the name of each rank
    names[dist.get_rank()] = zlib.crc32(name.encode())
    names = names.to(device())
    dist.all_reduce(names)
    return int((names == names[dist.get_rank()]).sum())


def explain_full_gpu(what: str, call: Callable[[], Any]) -> Any:
    """Return what `call` returns. If the GPU has too little memory for it, raise MemoryError, which names `what`."""
    try:
        return call()
    except torch.OutOfMemoryError:
        sentence = f"the GPU has too little free memory for {what}: choose a smaller size or batch"
        raise MemoryError(sentence) from None


def remove_gradient_hooks(model: nn.Module) -> None:
    """Remove the hooks that a wrapper has registered on parameters.

    Python's garbage collector does not see torch's own reference to these hooks. If a hook refers to the parameter, for
    example because it is a method of the wrapper, the model and all that the wrapper owns would remain in memory.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_leaf:
            for register in (parameter.register_post_accumulate_grad_hook, parameter.register_hook):
                register(lambda _: None).hooks_dict_ref().clear()  # the hooks that were registered before, too


def release_memory() -> None:
    """Return the memory of objects that are no longer used to the GPU, if there is one."""
    gc.collect()  # wrappers and their hooks refer to each other
    if device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run_alternately(workload: dict, variants: list[dict], indices: Sequence[int], start: TinyLM, text: bytes) -> dict:
    """Take all steps of the variants with these indices, which alternate. Return the results as `train` does.

    `start` and `text` are what `make_start` returns. On a GPU, no memory of the variants remains in use.
    """
    labels = [variants[index]["label"] for index in indices]
    results = explain_full_gpu(", ".join(labels), lambda: take_all_steps(workload, variants, indices, start, text))
    release_memory()
    return results


def take_all_steps(workload: dict, variants: list[dict], indices: Sequence[int], start: TinyLM, text: bytes) -> dict:
    """Do what `run_alternately` describes, except that memory remains in use."""
    engines, draw_batch = prepare_training(workload, [variants[index] for index in indices], start, text)
    calibration = Calibration(copy_model(start, variants[indices[0]]), workload["link"])
    for turn in range(workload["rounds"]):
        batch = take_own_part(draw_batch(workload["batch_size"]))
        for _ in range(CALIBRATION if turn == 0 else 1):
            calibration.measure(*batch)
        if workload["limit_s"] and calibration.elapsed_s > workload["limit_s"] and turn > workload["warmup"]:
            break
        for place in random.Random(turn).sample(range(len(engines)), len(engines)):
            engine = engines[place]
            dist.barrier()
            recording.note("step", step=turn * len(variants) + indices[place], variant=engine.label)
            repeat_step_before(engine)
            if workload["named"]:
                recording.name_parameters(engine.module)
            engine.marks.append(take_step(engine, *batch))
            engine.finish_param_sync()
    recording.note("step", step=None)  # the evaluation may communicate
    emulated_link.use(None)
    held_out = [tensor.to(device()) for tensor in draw_batch(HELD_OUT)]
    measured = {engine.label: measure_variant(engine, *held_out) for engine in engines}
    for engine in engines:
        remove_gradient_hooks(engine.module)
    name = torch.cuda.get_device_name() if device().type == "cuda" else "the CPU"
    return {"variants": measured, "device": name, **calibration.get_results(workload["warmup"])}


def make_start(workload: dict) -> tuple[TinyLM, bytes]:
    """Return the model from which this rank's variants start, on the CPU and in fp32, and the text to train on."""
    # Seeds differ between ranks, so only a wrapper that broadcasts starts from rank 0's weights, as one process does.
    start = TinyLM(Size(**workload["size"]))
    texts = [corpus.read_text()]
    dist.broadcast_object_list(texts, device=device())  # another machine may have a different Python
    return start, texts[0]


def prepare_training(
    workload: dict, variants: Sequence[dict], start: TinyLM, text: bytes
) -> tuple[list[Engine], Callable[[int], tuple[Tensor, Tensor]]]:
    """Return a engine of each variant with the weights of `start`, and a function that draws a batch of N sequences.

    The function returns the tokens and the targets of all ranks, on the CPU.
    """
    with recording.phase("construct"):
        models = [copy_model(start, variant) for variant in variants]
        engines = [find_engine(row)(row, model, workload) for row, model in zip(variants, models, strict=True)]
    return engines, make_draw_batch(workload, text)


def copy_model(start: TinyLM, variant: dict) -> TinyLM:
    """Return a copy of a TinyLM on the rank's device, in the variant's dtype.

    This needs no second copy in fp32 on the CPU, which would take longer than everything else for a large model.
    """
    with torch.device("meta"):
        model = TinyLM(start.size)
    model = model.to(getattr(torch, variant["dtype"])).to_empty(device=device())
    model.load_state_dict(start.state_dict())
    return model


def make_draw_batch(workload: dict, text: bytes) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return the function that `prepare_training` describes. Every such function draws the same batches."""
    generator = torch.Generator().manual_seed(workload["seed"])
    return lambda size: corpus.draw_batch(text, size, workload["time"], generator)


def take_own_part(batch: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of a batch, on the rank's device."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()].to(device()) for tensor in batch]


def repeat_step_before(engine: Engine) -> None:
    """Launch the all-gathers that the previous step would have launched if no other variant had run since."""
    with recording.phase(STEP_BEFORE):
        engine.start_param_sync()


def measure_variant(engine: Engine, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return the marks of a variant that has been trained, its loss on this text, and its bytes by kind.

    One more step, which is not timed, measures the bytes at the peak and counts the submission's `Operations`.
    """
    kept_bytes = count_kept_bytes(engine)  # before a forward gathers weights again
    with torch.no_grad():
        loss = language_loss(engine(tokens), targets).item()
    with PeakMemory(engine) as memory, Operations() as counted:
        take_step(engine, tokens[:1, :1], targets[:1, :1])
    engine.finish_param_sync()
    operations = {name: getattr(counted, name) for name in ("copied_bytes", "allocated_bytes", "new_views")}
    memory_bytes = {"kept_bytes": kept_bytes, "peak_bytes": memory.at_peak}
    return {"marks": engine.marks, "loss": loss, "operations": operations, **memory_bytes}


class Operations(TorchDispatchMode):
    """A context manager that counts what the submission does: bytes copied, bytes of new memory, and new views."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = self.allocated_bytes = self.new_views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_in_submission(sys._getframe(1)):
            inputs, outputs = list_tensors([*args, *(kwargs or {}).values()]), list_tensors(result)
            if function.overloadpacket.__name__ in COPIES and not is_self_copy(args):
                self.copied_bytes += sum(tensor.nbytes for tensor in outputs or list_tensors(args[0]))
            storages = {tensor.untyped_storage()._cdata for tensor in inputs}
            new = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in storages]
            self.allocated_bytes += sum(tensor.nbytes for tensor in new)
            self.new_views += len(outputs) if function.is_view else 0
        return result


def is_in_submission(frame: FrameType | None) -> bool:
    """Return whether a line of the submission called torch here, directly or through one of torch's helpers."""
    while frame and (name := frame.f_globals.get("__name__", "")).startswith("torch."):
        if name.startswith(("torch.distributed.", "torch.optim.")):
            return False
        frame = frame.f_back
    return bool(frame) and name.startswith("submission.")


class Calibration:
    """The measurement of backward alone in every round, which determines the emulated link.

    `wanted` is a workload's `link`, as a dict. The link is in use from the first `measure` on.
    """

    def __init__(self, model: nn.Module, wanted: dict | None):
        self.model = model
        self.wanted = Pace(**wanted) if wanted and "comm_ratio" in wanted else read_link(wanted)
        self.model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.times: list[list[float]] = []  # of each round: backward alone, and a real all-reduce of all gradients
        self.cpu_shares: list[float] = []  # of each round, on a CPU: the part of backward in which this rank had a core
        self.began, self.elapsed_s = time.perf_counter(), 0.0  # until the last measurement, the same on all ranks

    def measure(self, tokens: Tensor, targets: Tensor) -> None:
        """Time backward alone and one real all-reduce of all gradients; append the means over the ranks."""
        if dist.get_world_size() == 1:
            return
        emulated_link.use(None)
        recording.note("step", step=None)  # the following events belong to no step
        loss = language_loss(self.model(tokens), targets)
        backward_s, cpu_s = time_together(loss.backward)
        if device().type == "cpu":  # with a GPU, this thread only waits
            self.cpu_shares.append(cpu_s / backward_s)
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        self.model.zero_grad()
        real_s, _ = time_together(lambda: dist.all_reduce(flat))
        times = torch.tensor([backward_s, real_s, time.perf_counter() - self.began], dtype=torch.float64).to(device())
        dist.all_reduce(times)
        *means, self.elapsed_s = (times / dist.get_world_size()).tolist()
        self.times.append(means)
        emulated_link.use(self.make_link(self.times[-CALIBRATION:]))

    def make_link(self, times: list[list[float]]) -> Link | None:
        """Return the requested link for a backward that takes the median of `times`, or None if none is wanted."""
        if isinstance(self.wanted, Pace) and times:
            backward_s = median(backward_s for backward_s, _ in times)
            return self.wanted.link(backward_s, self.model_bytes, dist.get_world_size())
        return None if isinstance(self.wanted, Pace) else self.wanted

    def get_results(self, warmup: int) -> dict[str, Any]:
        """Return fields of `Ladder`: the medians "backward_s" and "real_s", the resulting "link", and "model_bytes".

        Also return "cpu_shares" of the rounds after the first `warmup`.
        """
        link = self.make_link(self.times)
        backward_s, real_s = map(median, zip(*self.times or [[0.0, 0.0]], strict=True))
        times = {"backward_s": backward_s, "real_s": real_s, "cpu_shares": self.cpu_shares[CALIBRATION - 1 + warmup :]}
        return {"link": link and asdict(link), "model_bytes": self.model_bytes, **times}


def time_together(call: Callable[[], Any]) -> tuple[float, float]:
    """Return how many seconds a call takes that all ranks begin together, and for how many this thread had a core."""
    synchronize()
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.thread_time()
    call()
    synchronize()
    return time.perf_counter() - start, time.thread_time() - start_cpu


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished all queued work."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def take_step(
    engine: Engine, tokens: Tensor, targets: Tensor, *, mark: Callable[[], Any] = time.perf_counter
) -> list[Any]:
    """Take one training step, in the loop that all variants share.

    Return what `mark` returns (by default, the time in seconds) at the start and after each of `ladder.PHASES`.
    """
    marks = [mark()]
    with recording.phase("forward"):
        engine.zero_grad()
        loss = language_loss(engine(tokens), targets)
    marks.append(mark())
    with recording.phase("backward"):
        loss.backward()
    marks.append(mark())
    with recording.phase("finish"):
        engine.finish_grad_sync()
    marks.append(mark())
    with recording.phase("step"):
        engine.step()
        if device().type == "cuda":
            # The step includes all communication that it needs: a wait makes this stream wait, and so does a collective
            # with async_op=False. Collectives that the next step waits for, such as module 9's all-gathers, may still
            # run, as on the CPU. `torch.cuda.synchronize` would wait for them, too.
            torch.cuda.current_stream().synchronize()
    return [*marks, mark()]
