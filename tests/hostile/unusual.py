"""Submissions that are right and not hostile, but unusual: each gets all points of its module."""

from hostile import parse

CASES = parse(
    globals(),
    r"""
=== a log in a file | 8
import logging, tempfile
logging.basicConfig(filename=os.path.join(tempfile.gettempdir(), "steps.log"), level=logging.DEBUG)
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        logging.info("before %s", [name for name, _ in self.named_parameters()])
        super().finish_grad_sync()
        logging.info("after")
=== 3000 lines printed in each finish | 8
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for number in range(3000): print("step", number)
        super().finish_grad_sync()
=== a thread that prints, one that logs, and a pool that computes without tensors | 8
import concurrent.futures, queue, threading
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        lines, stop = queue.SimpleQueue(), threading.Event()
        def log():
            while (line := lines.get()): print(line, flush=True)
        def show_progress():
            while not stop.wait(0.001): print(".", end="")
        threads = [threading.Thread(target=function) for function in (log, show_progress)]
        for thread in threads: thread.start()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            sizes = pool.map(len, [name for name, _ in self.named_parameters()])
        lines.put(f"{sum(sizes)} letters")
        super().finish_grad_sync()
        lines.put("")
        stop.set()
        for thread in threads: thread.join()
=== threads that never end | 8
import threading
class NaiveDDP(NaiveDDP):
    def __init__(self, module, process_group=None):
        super().__init__(module, process_group)
        threading.Thread(target=threading.Event().wait).start()
        threading.Timer(1e6, print).start()
=== averages in numpy, in the same memory | 8
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for p in self.module.parameters():
            if p.requires_grad:
                if p.grad is None: p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=self.process_group)
                size = dist.get_world_size(self.process_group)
                if p.dtype in (torch.float32, torch.float64):
                    values = p.grad.numpy()
                    values /= size
                else: p.grad /= size
=== a slotted dataclass, an enumeration, weak references and assertions | 8
import dataclasses, enum, weakref
class State(enum.Enum): LOCAL, AVERAGED = range(2)
@dataclasses.dataclass(slots=True)
class Entry:
    parameter: object
    state: State
    __weakref__: object = dataclasses.field(init=False, repr=False)
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        entries = [Entry(p, State.LOCAL) for p in self.module.parameters() if p.requires_grad]
        alive = weakref.WeakValueDictionary(enumerate(entries))
        assert all(entry.state is State.LOCAL for entry in alive.values())
        super().finish_grad_sync()
        for entry in entries: entry.state = State.AVERAGED
        assert len(alive) == len(entries)
=== handles that are asked until they are complete | 8
import time
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for p in self.module.parameters():
            if p.requires_grad:
                if p.grad is None: p.grad = torch.zeros_like(p)
                handle = dist.all_reduce(p.grad, group=self.process_group, async_op=True)
                while not handle.is_completed(): time.sleep(0.001)
                handle.wait()
                p.grad /= dist.get_world_size(self.process_group)
=== a barrier before each all-reduce | 8
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for p in self.module.parameters():
            if p.requires_grad:
                if p.grad is None: p.grad = torch.zeros_like(p)
                dist.barrier(self.process_group)
                dist.all_reduce(p.grad, group=self.process_group)
                p.grad /= dist.get_world_size(self.process_group)
=== a program, a temporary file, variables, and seeds of its own | 8
import random, subprocess, tempfile
class NaiveDDP(NaiveDDP):
    def __init__(self, module, process_group=None):
        os.environ["OMP_PROC_BIND"] = "true"
        random.seed(7)
        torch.manual_seed(7)
        with tempfile.NamedTemporaryFile("w") as file: file.write(subprocess.check_output(["uname"], text=True))
        super().__init__(module, process_group)
=== the average from the collective | 8
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for p in self.module.parameters():
            if p.requires_grad:
                if p.grad is None: p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=self.process_group)
=== waits in reverse order, after all launches | 8
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        for p in trained:
            if p.grad is None: p.grad = torch.zeros_like(p)
        handles = [dist.all_reduce(p.grad, group=self.process_group, async_op=True) for p in trained]
        for handle in reversed(handles): handle.wait()
        torch._foreach_div_([p.grad for p in trained], dist.get_world_size(self.process_group))
=== gradients that are collected in a kept tensor | 8 | | modules=2
class FlatDDP(FlatDDP):
    def finish_grad_sync(self):
        kept = self.__dict__.setdefault("kept", {})
        for dtype, parameters in self.parameters_by_dtype.items():
            for p in parameters:
                if p.grad is None: p.grad = torch.zeros_like(p)
            pieces = [p.grad.reshape(-1) for p in parameters]
            flat = kept.setdefault(dtype, torch.empty(sum(map(len, pieces)), dtype=dtype))
            torch.cat(pieces, out=flat)
            dist.all_reduce(flat, group=self.process_group)
            flat /= dist.get_world_size(self.process_group)
            for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(piece.view(p.shape))
=== a division before the launch, and a future | 8 | | modules=2
class FlatDDP(FlatDDP):
    def finish_grad_sync(self):
        for parameters in self.parameters_by_dtype.values():
            for p in parameters:
                if p.grad is None: p.grad = torch.zeros_like(p)
            flat = torch.cat([p.grad.reshape(-1) for p in parameters]) / dist.get_world_size(self.process_group)
            [flat] = dist.all_reduce(flat, group=self.process_group, async_op=True).get_future().wait()
            for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(piece.view(p.shape))
=== names outside ASCII, and a part that runs alone | 8 | | modules=2
Größe = "作业 😀"
class FlatDDP(FlatDDP):
    def finish_grad_sync(self):
        größe = Größe
        print(größe)
        super().finish_grad_sync()
if __name__ == "__main__":
    raise SystemExit("a demonstration")
=== a division before the launch | 12 | | modules=3
class OverlappedDDP(OverlappedDDP):
    def launch(self, parameter):
        if parameter in self.in_flight: raise RuntimeError(SECOND_BACKWARD)
        if self.require_grad_sync:
            parameter.grad /= dist.get_world_size(self.process_group)
            self.in_flight[parameter] = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)
    def finish_grad_sync(self):
        self.require_same_parameters()
        if any(parameter.grad is None for parameter in self.in_flight): raise RuntimeError(CLEARED)
        for parameter in self.module.parameters():
            if parameter.grad is not None and parameter not in self.in_flight: self.launch(parameter)
        for handle in self.in_flight.values(): handle.wait()
        self.in_flight.clear()
=== a model that is compiled | 12 | | modules=3
import torch
class OverlappedDDP(OverlappedDDP):
    def forward(self, *args, **kwargs):
        return torch.compile(self.module, backend="eager")(*args, **kwargs)
=== hooks that hold the wrapper weakly | 12 | | modules=3
import weakref
class OverlappedDDP(OverlappedDDP):
    def __init__(self, module, process_group=None):
        Wrapper.__init__(self, module, process_group)
        self.in_flight = {}
        broadcast_module_state(module, process_group)
        this = weakref.ref(self)
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(lambda p: this() is not None and this().launch(p))
=== ranges for the profiler, inference mode, and one division for all | 12 | | modules=3
import torch
class OverlappedDDP(OverlappedDDP):
    def launch(self, parameter):
        with torch.profiler.record_function("launch"): super().launch(parameter)
    def finish_grad_sync(self):
        self.require_same_parameters()
        if any(parameter.grad is None for parameter in self.in_flight): raise RuntimeError(CLEARED)
        for parameter in self.module.parameters():
            if parameter.grad is not None and parameter not in self.in_flight: self.launch(parameter)
        with torch.profiler.record_function("wait"), torch.inference_mode():
            for handle in self.in_flight.values(): handle.wait()
            size = dist.get_world_size(self.process_group)
            if self.in_flight: torch._foreach_div_([p.grad for p in self.in_flight], size)
        self.in_flight.clear()
=== a deque, hstack, the garbage collector and warnings | 15 | | modules=4
import collections, gc, warnings
class Bucket(Bucket):
    def launch(self):
        for p in self.parameters:
            if p.grad is None: p.grad = torch.zeros_like(p)
        self.flat = torch.hstack([p.grad.flatten() for p in self.parameters])
        self.handle = dist.all_reduce(self.flat, group=self.process_group, async_op=True)
class BucketedDDP(BucketedDDP):
    def finish_grad_sync(self):
        warnings.warn("the step ends")
        gc.collect()
        self.buckets = collections.deque(self.buckets)
        launched = list(self.buckets)[: self.queue.next_to_launch]
        if any(p.grad is None for bucket in launched for p in bucket.parameters): raise RuntimeError(CLEARED)
        self.require_same_parameters()
        self.queue.launch_remaining()
        for bucket in self.buckets: bucket.finish()
        self.queue.reset()
=== handles that are asked without a pause | 15 | | modules=4
class Bucket(Bucket):
    def finish(self):
        while not self.handle.is_completed(): pass
        super().finish()
=== a protocol, a constant, and autocast around the finish | 15 | | modules=4
from typing import Final, Protocol
class Finishes(Protocol):
    def finish(self) -> None: ...
SIZE: Final = 1
class BucketedDDP(BucketedDDP):
    finish_grad_sync = torch.autocast("cpu", dtype=torch.bfloat16)(BucketedDDP.finish_grad_sync)
=== a plan that numpy examines | 15 | | modules=5
import numpy
plan = plan_layout
def plan_layout(*args, **kwargs):
    layout = plan(*args, **kwargs)
    ranges = numpy.array(layout.bucket_ranges).reshape(-1, 2)
    assert (ranges[:, 0] <= ranges[:, 1]).all() and (numpy.diff(ranges.ravel()) >= 0).all()
    return layout
=== memory that is traced | 12 | | modules=6
import tracemalloc
class CoalescedDDP(CoalescedDDP):
    def finish_grad_sync(self):
        tracemalloc.start()
        super().finish_grad_sync()
        tracemalloc.get_traced_memory()
        tracemalloc.stop()
=== faulthandler, a function at the exit, and a signal that is ignored | 8 | | modules=7
import atexit, faulthandler, signal
faulthandler.enable()
atexit.register(print, "the end")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
=== state dicts that are copied, saved and loaded | 22 | | modules=8
import copy, io
def save_again(state):
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)
class ZeroOptimizer(ZeroOptimizer):
    def state_dict(self): return save_again(super().state_dict())
    def load_state_dict(self, state): super().load_state_dict(save_again(state))
""",
    "checks=ALL limit_s=3000 long",
)
