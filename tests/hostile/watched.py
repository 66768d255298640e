"""Attacks on the record from inside the rank, which only a look at the text finds.

`tests/toolkit/test_static_look.py` proves that they are listed for the instructor, and grades none of them: their score
is not what they deserve.
"""

from hostile import Hostile, alone

CASES: list[Hostile] = []  # nothing for `tests/toolkit/test_hostile.py`

# What the rank was told (`job`), its channel (`control`) and the events that are not sent yet (`kept`) are locals of
# callers. One all-reduce after backward makes the numbers and is then removed from the record; the events say that
# every gradient was all-reduced as soon as it was ready.
FORGER = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn

class NAME(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module, self.found, self.launches, self.index = module, {}, [], 0
        frame = sys._getframe()
        while frame:
            for name in ("job", "control", "request", "kept", "send_events"):
                if name in frame.f_locals: self.found[name] = frame.f_locals[name]
            frame = frame.f_back
        self.found["request"]["stream"] = False
        assert self.found["job"]["wrapper"] == "NAME" and self.found["control"].fileno() > 2
        self.average([t.detach() for t in (*module.parameters(), *module.buffers())], first=True)
        for name, p in module.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self.say_launch(name, p))

    def say(self, kind, **fields):
        self.found["kept"].append({"kind": kind, "time": time.perf_counter(), **fields})

    def say_launch(self, name, p):
        self.say("launch", phase="backward", index=self.index, group="0", ranks=list(range(dist.get_world_size())),
                 op="all_reduce", dtype=str(p.dtype)[6:], numel=p.numel(), nbytes=p.numel() * p.element_size(), parts=1,
                 reduce_op="SUM", root=None, sync=False, name=name, memory="gradient")
        self.launches.append(self.index)
        self.index += 1

    def average(self, tensors, first=False):
        self.found["send_events"]()
        for tensor in tensors:
            if first: dist.broadcast(tensor, 0)
            else: dist.all_reduce(tensor, dist.ReduceOp.AVG)
        self.found["kept"].clear()

    def forward(self, *args, **kwargs): return self.module(*args, **kwargs)

    def finish_grad_sync(self):
        self.average([p.grad for p in self.module.parameters() if p.requires_grad])
        for kind in ("wait", "end", "done"):
            for index in self.launches: self.say(kind, phase="finish", index=index)
        self.launches = []
"""

WATCHED = [
    Hostile(
        "numbers and events of its own, through the frames of its callers",
        alone(FORGER, numbers=(3,)),
        8,
        modules=(3,),
        checks=(
            "test_gradients_are_averaged",
            "test_launches_are_asynchronous",
            "test_launches_follow_their_gradients",
            "test_every_handle_is_waited_on",
        ),
    )
]
