"""What runs inside a rank: start the process group, call one function, deliver what it returns.

A rank has three file descriptors. Its `control` channel is described in `channel.py`. Its standard output and error are
`output`. On `trace` it prints where it stands when it gets SIGUSR1.

After its result a rank does nothing more, and waits to be killed: tearing down gloo while a peer still
talks to it can abort the peer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from brigade.course import submission
from brigade.rank import api, dynamo_stub, emulated_link, failure, finished_answers, locks, recording, strict
from brigade.rank.channel import Channel
from brigade.runner import wire

MODES = {"record": recording.RecordingGroup, "strict": strict.StrictGroup, "emulate": emulated_link.EmulatedLinkGroup}

SCATTERED = 100  # parameters; half of them leave holes for those of the model


def main(control_fd: int, output_fd: int, trace_fd: int, server: int) -> None:
    """Be a rank. Runs in a process that the server has just forked, and never returns."""
    channel = Channel(control_fd)
    request = channel.receive_request()
    redirect(output_fd, request["terminal"])
    faulthandler.register(signal.SIGUSR1, file=trace_fd, all_threads=True)
    if sys.platform != "linux":
        threading.Thread(target=exit_with_parent, args=(server,), daemon=True).start()
    try:
        channel.send_result(wire.encode(run(request, channel.add_event)))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: nothing may end a rank silently
        channel.send_failure(failure.describe(error, request["packages"]))
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        signal.pause()


def redirect(output_fd: int, is_terminal: bool) -> None:
    """Make new standard streams. They lead to `output_fd`, or stay on the terminal."""
    if not is_terminal:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, standard in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(source, standard)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="replace")


def run(request: dict[str, Any], sink: Callable[[dict[str, Any]], None]) -> Any:
    """Do what the request asks for, in a process of its own, and return the result. `sink` receives the events."""
    if request["mode"] != "emulate" and hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            # Where ranks share cores, gloo's polling threads interrupt each other: a small collective takes five times
            # as long. A paced one must interrupt what computes.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.chdir(request["directory"])
    os.environ.update(request["environment"])
    store = dist.FileStore(os.path.join(request["directory"], "rendezvous"), request["world_size"])
    return perform(request, sink, store)


def perform(
    request: dict[str, Any],
    sink: Callable[[dict[str, Any]], None],
    store: dist.Store,
    local_rank: int | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Become a rank: start the process group over `store`, and return what the request's function returns.

    `local_rank` is this rank's place among those of its machine, which picks its GPU; `timeout` that of a collective.
    """
    rank, world_size, backend = request["rank"], request["world_size"], request["backend"]
    dynamo_stub.import_torch()
    for package, sources in request["packages"].items():
        submission.install(package, sources)
        request["packages"][package] = {
            name: (path, "") for name, (path, *_) in sources.items()
        }  # the rest is not kept
    graded = {submission.PACKAGE, "scenarios"} <= request["packages"].keys()
    if graded:
        finished_answers.forbid()
    torch.set_num_threads(request["threads"])
    seed = request["seed"] + rank  # replicas that are not made equal are not equal
    (torch.manual_seed if backend == "nccl" else torch.default_generator.manual_seed)(seed)  # the former is slow
    if backend == "nccl":
        api.use_gpu((rank if local_rank is None else local_rank) % torch.cuda.device_count())
    recorder = recording.Recorder(sink)
    recording.install(recorder)
    if request["mode"] == "emulate":
        emulated_link.share_launches(request["directory"], world_size)
    recording.start_process_group(MODES[request["mode"]], recorder, backend, store, rank, world_size, timeout)
    function = functools.reduce(getattr, request["function"].split("."), importlib.import_module(request["module"]))
    if graded:
        recording.forbid_other_ways()
        locks.hide_packages({"brigade", *request["packages"]} - {submission.PACKAGE})
    kept = scatter(request["seed"] + rank) if request["mode"] == "strict" else []
    result = function(*request["args"])
    kept.clear()
    if backend == "nccl":
        torch.cuda.synchronize()
    return result


def scatter(seed: int) -> list[torch.nn.Parameter]:
    """Return parameters to keep while a model is built: its own then lie in the holes of memory between them.

    Forked ranks would otherwise have equal addresses. What depends on addresses, such as the order of a set, would then
    agree by accident.
    """
    tensor, rng = torch.zeros(0), random.Random(seed)
    parameters = [torch.nn.Parameter(tensor) for _ in range(SCATTERED)]
    rng.shuffle(parameters)
    return parameters[::2]  # the others are freed in this order, and their memory is given out again in another


def exit_with_parent(server: int) -> None:
    """Kill this process and what it has started once the server has gone."""
    while os.getppid() == server:
        time.sleep(0.5)
    os.kill(0, signal.SIGKILL)
