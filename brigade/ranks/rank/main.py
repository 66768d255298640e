"""Run a rank: start the process group, call one function once or several times, and deliver its results.

A rank has two file descriptors. `channel.py` describes its `control` channel. Its standard output and error go to
`output`, and so do its stacks, which it prints when it receives SIGUSR1.

After sending its results, a rank waits to be killed. If it tore down gloo while a peer still used the connection, the
peer could abort.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from brigade.ranks import texts
from brigade.ranks.ipc import wire
from brigade.ranks.ipc.channel import Channel
from brigade.ranks.rank import api, process_group, recording
from brigade.ranks.rank.lockdown import expect_submission
from brigade.ranks.rank.recorder import Recorder
from brigade.ranks.sandbox import enter

MAX_MESSAGE = 4_000  # characters of an exception's message that are sent
SCATTERED = 100  # parameters to allocate; half of them are freed and leave gaps for the model's parameters

# NVIDIA's containers let float32 matrix products round to 10 bits of mantissa by these variables.
TF32_VARIABLES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def main(control_fd: int, output_fd: int, server: int) -> None:
    """Run a rank in a process that the server has just forked. Never return."""
    channel = Channel(control_fd)
    request = channel.receive_request()
    if request["calls"] is None:  # those of a notebook come later
        request["calls"] = channel.receive_calls()
    redirect(output_fd, request["terminal"])
    faulthandler.register(signal.SIGUSR1, file=output_fd, all_threads=True)
    if sys.platform == "linux":  # the server has answered, so no helper of it is this process's parent
        enter.LIBC.prctl(enter.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() not in (server, 0):
            os._exit(1)
    else:
        threading.Thread(target=exit_with_parent, args=(server,), daemon=True).start()

    def report(error: BaseException) -> None:
        channel.send_failure(describe_exception(error, request["packages"]))

    try:
        for result in run(request, channel.add_event, report, channel if request["witness"] else None):
            channel.send_result(wire.encode(result))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: nothing may end a rank silently
        report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        signal.pause()


def redirect(output_fd: int, is_terminal: bool) -> None:
    """Replace the standard streams. The new ones write to `output_fd`, or to the terminal."""
    if not is_terminal:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, standard in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(source, standard)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="replace")


def run(
    request: dict[str, Any],
    sink: Callable[[dict[str, Any]], None],
    report: Callable[[BaseException], None],
    witness: Channel | None = None,
) -> Iterator[Any]:
    """Execute the request in this process and yield the results of its calls. See `perform`."""
    is_timed = find_class(request["group_class"]).is_timed
    if not is_timed and request["backend"] == "gloo" and not witness and hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            # If ranks share cores, gloo's polling threads interrupt each other, and a small collective takes five times
            # as long. If the user has chosen another policy, such as that of idle processes, ranks keep it.
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.update(request["environment"])
    store = dist.HashStore() if witness else dist.FileStore(os.path.abspath("rendezvous"), request["world_size"])
    return perform(request, sink, store, report=report, witness=witness)


def perform(
    request: dict[str, Any],
    sink: Callable[[dict[str, Any]], None],
    store: dist.Store,
    local_rank: int | None = None,
    timeout: timedelta | None = None,
    report: Callable[[BaseException], None] = lambda error: None,
    witness: Channel | None = None,
) -> Iterator[Any]:
    """Become a rank: start the process group over `store`, and yield what the request's function returns in each call.

    `local_rank` is the index of this rank on its machine, which selects its GPU. `timeout` applies to each collective.
    `report` tells the parent of an exception in another thread of a graded run.
    With `witness`, the channel to the witness in the parent, the group communicates through it instead of `backend`.
    """
    rank, world_size, backend = request["rank"], request["world_size"], request["backend"]
    for package, sources in request["packages"].items():
        texts.install(package, sources)
        request["packages"][package] = [path for path, *_ in sources.values()]  # drop texts and compiled code
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise the first step of Adam would initialise CUDA
    torch.set_num_threads(request["threads"])
    # torch.manual_seed is slow
    (torch.manual_seed if backend == "nccl" else torch.default_generator.manual_seed)(request["seed"])
    if backend == "nccl":
        forbid_tf32()
        api.use_gpu((rank if local_rank is None else local_rank) % torch.cuda.device_count())
    recorder = Recorder(sink, request.get("borders", ()), witness)
    recording.install(recorder)
    group_class = find_class(request["group_class"])
    group_class.prepare(os.getcwd(), world_size)
    make_inner: Any = functools.partial(process_group.make_torch_group, backend)
    if witness:
        make_inner = functools.partial(find_class(request["witness"]), witness)
    where = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    process_group.start(group_class, recorder, backend, make_inner, **where)
    function: Any = importlib.import_module(request["module"])
    for name in request["function"].split("."):
        function = getattr(function, name)
    if request.get("graded"):
        expect_submission(recorder, report)
    kept = scatter(request["seed"]) if request["mode"] == "strict" else []
    for number, args in enumerate(request["calls"]):
        if number:
            gc.collect()  # free the models of earlier calls: their memory and hooks could affect the next call
        result = function(*args)
        if backend == "nccl":
            torch.cuda.synchronize()
        yield result
    kept.clear()


def find_class(name: str) -> Any:
    """Return the class with this name, such as "brigade.ranks.rank.strict:StrictGroup"."""
    module, _, its_name = name.partition(":")
    return getattr(importlib.import_module(module), its_name)


def forbid_tf32() -> None:
    """Let this rank compute in full float32, as on the CPU, before it uses CUDA."""
    for name in TF32_VARIABLES:
        os.environ.pop(name, None)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def scatter(seed: int) -> list[torch.nn.Parameter]:
    """Allocate parameters and return half of them. The caller keeps these while it builds a model.

    Otherwise forked ranks would have equal addresses, and results that depend on addresses, such as the order of a set,
    would agree by accident.
    """
    tensor, rng = torch.zeros(0), random.Random(seed)
    parameters = [torch.nn.Parameter(tensor) for _ in range(SCATTERED)]
    rng.shuffle(parameters)
    return parameters[::2]  # the others are freed, and their memory is reused in another order


def describe_exception(error: BaseException, packages: dict[str, list[str]]) -> dict[str, Any]:
    """Return the description of an exception, with its frames in the submission. `packages` contains paths of files.

    If the submission has no frames, include the frames in the other packages that the rank received. If these packages
    have no frames either, include all frames outside the toolkit.
    """
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    toolkit = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
    ours = {path for paths in packages.values() for path in paths}
    own = [frame for frame in frames if frame[0] in packages.get(texts.PACKAGE, ())]
    others = [frame for frame in frames if frame[0] in ours]
    others = others or [frame for frame in frames if not frame[0].startswith(toolkit)]
    return {
        "type": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "frames": own or others,
        "own": bool(own),
    }


def exit_with_parent(server: int) -> None:
    """Kill this process and its children when the server has ended."""
    while os.getppid() == server:
        time.sleep(0.5)
    os.kill(0, signal.SIGKILL)
