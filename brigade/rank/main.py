"""What runs inside a rank: start the process group, call one function, deliver what it returns.

A rank has three file descriptors. On `control` it receives one request and sends frames, each a letter, an
8-byte length and that many bytes: E events (a JSON list), R the result (`wire.py`), X an exception (JSON). Its standard
output and error are `output`. On `trace` it prints where it stands when it gets SIGUSR1.

After its result a rank does nothing more, and waits to be killed: tearing down gloo while a peer still
talks to it can abort the peer.
"""

from __future__ import annotations

import _socket
import contextlib
import faulthandler
import functools
import importlib
import importlib.abc
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from datetime import timedelta
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
import torch.distributed as dist

from brigade.course import submission
from brigade.rank import api, dynamo_stub, emulated_link, locks, recording, strict
from brigade.runner import wire

MODES = {"record": recording.RecordingGroup, "hold": strict.HoldingGroup, "pace": emulated_link.PacedGroup}
UNSTREAMED_S = 0.5  # how long events are kept when they need not be streamed
MAX_MESSAGE = 4_000  # characters of an exception's message that are passed on

# What the course has students write, and the class that each of torch's own answers makes one of, by module.
# Graded checks do not take it from anybody else.
FINISHED_ANSWERS = {
    "torch.nn.parallel.distributed": ("DistributedDataParallel", "DistributedDataParallel"),
    "torch._C._distributed_c10d": ("Reducer", "Reducer"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel", "FullyShardedDataParallel"),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("fully_shard", "FSDPState"),
    "torch.distributed.optim.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer"),
}

# Functions that a submission replaces in json or socket must not see the record.
encode_events = locks.own_copy("json.encoder").JSONEncoder().encode
send = _socket.socket.sendall

SCATTERED = 400  # parameters; half of them leave holes for those of the model


def main(control_fd: int, output_fd: int, trace_fd: int, server: int) -> None:
    """Never returns. Runs in a process just forked from the server."""
    control = socket.socket(fileno=control_fd)
    request = wire.decode(read_exactly(control, struct.unpack("<Q", read_exactly(control, 8))[0]))
    if not request["terminal"]:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, standard in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(source, standard)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="replace")
    faulthandler.register(signal.SIGUSR1, file=trace_fd, all_threads=True)
    if sys.platform != "linux":
        threading.Thread(target=exit_with_parent, args=(server,), daemon=True).start()
    lock = threading.RLock()
    kept: list[dict[str, Any]] = []  # events that are not sent yet
    sent_at = time.monotonic()

    def deliver(letter: bytes, body: bytes) -> None:
        with lock:
            send(control, letter + struct.pack("<Q", len(body)) + body)

    def send_events() -> None:
        nonlocal sent_at
        with lock:  # gloo's thread may send at the same time: in order, and none twice
            events = kept[:]
            del kept[: len(events)]
            sent_at = time.monotonic()
            if events:
                deliver(b"E", encode_events(events).encode())

    def take(event: dict[str, Any]) -> None:
        kept.append(event)
        if request["stream"] or time.monotonic() > sent_at + UNSTREAMED_S:
            send_events()

    try:
        result = wire.encode(run(request, take))
        send_events()
        deliver(b"R", result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: nothing may end a rank silently
        send_events()
        deliver(b"X", json.dumps(describe(error, request)).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        signal.pause()


def run(request: dict[str, Any], sink: Any) -> Any:
    if request["mode"] != "pace" and hasattr(os, "SCHED_BATCH"):
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
    sink: Any,
    store: dist.Store,
    local_rank: int | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Becomes a rank: starts the process group over `store`, and returns what the request's function does.

    `local_rank` is this rank's place among those of its machine, which picks its GPU; `timeout` that of a collective.
    """
    rank, world_size, backend = request["rank"], request["world_size"], request["backend"]
    dynamo_stub.import_torch()
    for package, sources in request["packages"].items():
        submission.install(package, sources)
        request["packages"][package] = {name: (path, "") for name, (path, _) in sources.items()}  # the rest is not kept
    graded = {submission.PACKAGE, "scenarios"} <= request["packages"].keys()
    if graded:
        forbid_finished_answers()
    torch.set_num_threads(request["threads"])
    seed = request["seed"] + rank  # replicas that are not made equal are not equal
    (torch.manual_seed if backend == "nccl" else torch.default_generator.manual_seed)(seed)  # the former is slow
    if backend == "nccl":
        api.use_gpu((rank if local_rank is None else local_rank) % torch.cuda.device_count())
    recorder = recording.Recorder(sink)
    recording.install(recorder)
    if request["mode"] == "pace":
        emulated_link.share_launches(request["directory"], world_size)
    recording.start_process_group(MODES[request["mode"]], recorder, backend, store, rank, world_size, timeout)
    function = functools.reduce(getattr, request["function"].split("."), importlib.import_module(request["module"]))
    if graded:
        recording.forbid_other_ways()
        locks.hide_packages({"brigade", *request["packages"]} - {submission.PACKAGE})
    kept = scatter(request["seed"] + rank) if request["mode"] == "hold" else []
    result = function(*request["args"])
    kept.clear()
    if backend == "nccl":
        torch.cuda.synchronize()
    return result


def scatter(seed: int) -> list[torch.nn.Parameter]:
    """Parameters with holes between them, to be kept while a model is built: its own lie in memory in a random order.

    Ranks are forked, and would otherwise have equal addresses: what goes by them, such as the order of a set, would
    agree by accident, as it does on no cluster.
    """
    tensor, rng = torch.zeros(0), random.Random(seed)
    parameters = [torch.nn.Parameter(tensor) for _ in range(SCATTERED)]
    rng.shuffle(parameters)
    return parameters[::2]  # the others are freed in this order, and their memory is given out again in another


def forbid_finished_answers() -> None:
    """From now on torch's own wrappers raise RuntimeError in this process."""
    for module in FINISHED_ANSWERS:
        if module in sys.modules:
            refuse(sys.modules[module])
    sys.meta_path.insert(0, Refusing())


def refuse(module: types.ModuleType) -> None:
    name, made = FINISHED_ANSWERS[module.__name__]

    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is not taken for an answer: the collectives of torch.distributed are")

    getattr(module, made).__init__ = refused


class Refusing(importlib.abc.MetaPathFinder):
    """Refuses a finished answer as soon as it is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in FINISHED_ANSWERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_refuse(module: types.ModuleType) -> None:
            execute(module)
            refuse(module)

        spec.loader.exec_module = execute_and_refuse
        return spec


def describe(error: BaseException, request: dict[str, Any]) -> dict[str, Any]:
    """The exception as the parent shows it: its frames in the submission; else in the scenario; else all but ours."""
    frames = traceback.extract_tb(error.__traceback__)
    toolkit = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    files = {path for path, _ in request["packages"].get(submission.PACKAGE, {}).values()}
    own = [frame for frame in frames if frame.filename in files]
    ours = {path for sources in request["packages"].values() for path, _ in sources.values()}
    others = [frame for frame in frames if frame.filename in ours]
    others = others or [frame for frame in frames if not frame.filename.startswith(toolkit)]
    return {
        "type": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in (own or others)],
        "own": bool(own),
    }


def exit_with_parent(server: int) -> None:
    while os.getppid() == server:
        time.sleep(0.5)
    os.kill(0, signal.SIGKILL)


def read_exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), 1 << 20))
        if not piece:
            os._exit(1)
        data += piece
    return bytes(data)
