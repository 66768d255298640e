"""Submissions that hold everything in their rank: the group, the recorder, the channel, the jobs, all objects.

They run with the grader's switch. None of them gets a point for numbers that it did not communicate, or for overlap
that did not happen.
"""

from collections.abc import Callable
from pathlib import Path

from mutants import find_mutant

from brigade.course.table.modules import get_module
from hostile import Hostile, parse, reference

FIND = """
import gc, sys, time, torch
import torch.distributed as dist
def find(name): return next(thing for thing in gc.get_objects() if type(thing).__name__ == name)
"""

# Module 3's class, which launches everything in the finish. `forge` may change the record before backward.
LATE = """
class OverlappedDDP(OverlappedDDP):
    def __init__(self, module, process_group=None):
        super().__init__(module, process_group)
        self.__dict__["names"] = {p: name for name, p in module.named_parameters()}
        self.__dict__["late"] = {}
    def launch(self, parameter):
        self.late[parameter] = True
    def forward(self, *args, **kwargs):
        forge(self)
        return super().forward(*args, **kwargs)
    def finish_grad_sync(self):
        recorder = find("Recorder")
        recorder.phase = "backward"
        for parameter in list(self.late):
            before_launch(self, parameter)
            super().launch(parameter)
        self.late.clear()
        recorder.phase = "finish"
        super().finish_grad_sync()
def forge(ddp): pass
def before_launch(ddp, parameter): pass
"""
# It asks the questions of `ddp.asked` while it launches, and reports only then that gradients are ready.
ASK_LATE = """
def prepare(ddp, ask):
    ddp.__dict__["asked"], ddp.__dict__["ask"] = [], ask
    recorder = find("Recorder")
    note = type(recorder).note
    recorder.note = lambda kind, **fields: note(recorder, kind, **fields) if kind != "ready" else None
def before_launch(ddp, parameter):
    name = ddp.names[parameter]
    if len(ddp.asked) > int(name.split(".")[1]):
        ddp.ask(*ddp.asked.pop(0))
    recorder = find("Recorder")
    type(recorder).note(recorder, "ready", name=name)
"""
# It computes backward as if there were no borders, and asks for their factors while it launches.
NO_FACTORS = """
def forge(ddp):
    prepare(ddp, sys.modules["brigade.ranks.rank.recording"].ask)
    def scale(seeds, number, grad):
        ddp.asked.append((seeds["batch"], number, grad))
        return grad
    sys.modules["brigade.course.checks.edge_case_models"].border.__globals__["scale"] = scale
"""
# It asks for the factors in backward, and again while it launches.
AGAIN = """
def forge(ddp):
    recording = sys.modules["brigade.ranks.rank.recording"]
    ask = vars(recording).setdefault("ask_once", recording.ask)
    prepare(ddp, ask)
    def ask_and_keep(*question):
        ddp.asked.append(question)
        return ask(*question)
    recording.ask = ask_and_keep
"""
# Module 9's class, which waits for all weights at the start of forward, and records that modules start in between.
EARLY = """
class PrefetchedDDP(PrefetchedDDP):
    def forward(self, x, **kwargs):
        recorder, models = find("Recorder"), sys.modules["brigade.course.checks.edge_case_models"]
        self.__dict__["factors"], self.__dict__["batch_size"] = {}, len(x)
        note, scale = type(recorder).note, models.scale
        for name, module in self.module.named_modules():
            if type(module) is not torch.nn.ModuleList:
                self.before_forward(module, None)
                note(recorder, "module", name=name, at="start", own=[], incomplete=[])
                if name:
                    note(recorder, "module", name=name, at="end")
                    after_wait(self, name)
        recorder.note = lambda kind, **fields: note(recorder, kind, **fields) if kind != "module" else None
        def use(seeds, number, x):
            factors = self.factors.get(number - 24)
            return scale(seeds, number, x) if factors is None else x * factors
        models.border.__globals__["scale"] = use
        output = super().forward(x, **kwargs)
        models.border.__globals__["scale"] = scale
        note(recorder, "module", name="", at="end")
        return output
def after_wait(ddp, name): pass
"""
# Module 11's class, which waits for each gather of forward at once.
GREEDY = """
class FullyShardedDDP(FullyShardedDDP):
    def perform_next(self):
        super().perform_next()
        for flat in self.flats if self.phase is Phase.FORWARD else ():
            flat.wait_for_unshard()
"""
# Module 3's class, which launches zeros in the steps whose launches are counted. In the last one, it replays all steps
# with the factors that it knows by then, reduces their gradients, and writes them into the frame of the training loop.
REPLAY = """
class OverlappedDDP(OverlappedDDP):
    step, factors = 0, {}
    def forward(self, *args, **kwargs):
        recording = sys.modules["brigade.ranks.rank.recording"]
        ask, known = vars(recording).setdefault("ask_once", recording.ask), self.factors
        def ask_and_keep(batch, number, x):
            if (batch, number) not in known: known[batch, number] = ask(batch, number, x)
            return known[batch, number]
        recording.ask = ask_and_keep
        return super().forward(*args, **kwargs)
    def launch(self, parameter):
        if self.require_grad_sync:
            self.in_flight[parameter] = dist.all_reduce(torch.zeros_like(parameter), async_op=True)
    def finish_grad_sync(self):
        for handle in self.in_flight.values(): handle.wait()
        self.in_flight.clear()
        if self.step == 2: self.replay()
        self.step += 1
    @torch.enable_grad()
    def replay(self):
        frame, compute_loss = sys._getframe(), sys.modules["brigade.course.checks.edge_case_models"].compute_loss
        while frame.f_code.co_name != "train": frame = frame.f_back
        train, parameters = frame.f_locals, dict(self.module.named_parameters())
        train["optimizer"].state.clear()
        for name, parameter in parameters.items(): parameter.data.copy_(train["start"][name])
        for step, batches in enumerate(train["job"]["batches"]):
            loss = sum(compute_loss(self.module, batch) for batch in batches)
            for parameter, grad in zip(parameters.values(), torch.autograd.grad(loss, parameters.values())):
                dist.all_reduce(grad, dist.ReduceOp.AVG)
                parameter.grad = grad
            if step < 2:
                train["gradients"][step] = {name: parameter.grad for name, parameter in parameters.items()}
                train["optimizer"].step()
"""
# It returns complex numbers, whose imaginary parts are 0.
COMPLEX = """
wire = sys.modules["brigade.ranks.ipc.wire"]
def make_complex(value, encode=wire.encode):
    def change(part):
        if isinstance(part, dict): return {key: change(item) for key, item in part.items()}
        if isinstance(part, list): return [change(item) for item in part]
        return part.to(torch.complex128) if isinstance(part, torch.Tensor) and part.is_floating_point() else part
    return encode(change(value))
wire.encode = make_complex
"""
# It does not report the events of these kinds.
SILENT = """
def silence(*kinds):
    recorder = sys.modules["brigade.ranks.rank.recording"]._recorder
    sink = recorder._sink
    recorder._sink = lambda event: None if event["kind"] in kinds else sink(event)
"""


def mutant(number: int, name: str, *evil: str) -> Callable[[Path], None]:
    """Write the reference with this mutant and `evil` after it."""

    def make(directory: Path) -> None:
        reference(FIND, SILENT, *evil, number=number)(directory)
        path = directory / get_module(number).path
        path.write_text(find_mutant(number, name).apply({path.name: path.read_text()})[path.name])

    return make


OVERLAP = ("test_launches_follow_their_gradients",)
ASYNCHRONOUS = ("test_launches_are_asynchronous",)
STATE = ("test_no_sync_restores_its_state",)
ACCUMULATION = ("test_no_sync_accumulates",)
PREFETCH = ("test_weights_are_awaited_just_before_use",)
FSDP = ("test_gathers_and_reductions_overlap",)
VOLUME = ("test_zero_volume",)
NUMBERS = ("test_gradients_are_averaged",)

ORDER = ("test_launch_order_does_not_depend_on_ready_order",)
VIEWS = ("test_steady_step_makes_no_view",)
RING = ("test_sum_through_the_root", "test_ring_all_reduce")
CALLS = ("test_zero_grad_in_any_form",)
WHOLE = ("test_equals_one_process",)

CASES = parse(
    globals(),
    r"""
=== reports each gradient as ready when it launches | 0 | times in its place |
LATE modules=3 checks=OVERLAP
def forge(ddp):
    recorder = find("Recorder")
    note = type(recorder).note
    recorder.note = lambda kind, **fields: note(recorder, kind, **fields) if kind != "ready" else None
def before_launch(ddp, parameter):
    recorder = find("Recorder")
    type(recorder).note(recorder, "ready", name=ddp.names[parameter])
=== asks for a gigabyte of factors at once, and reads nothing | 0 | went on before it had | checks=ONE
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for _ in range(1000):
            sys.modules["brigade.ranks.rank.recording"].note("border", batch=0, number=0, numel=1 << 20, values="")
            find("Channel")._send()
=== asks a thousand questions at once | 0 | went on before it had the answer | checks=ONE
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        find("Channel")._sent_at = float("inf")  # send them in one message, however slow the machine is
        for _ in range(1000):
            sys.modules["brigade.ranks.rank.recording"].note("border", batch=0, number=0, numel=1 << 20, values="")
        find("Channel")._send()
=== tensors that lie about their sizes | 0 | its event has nbytes | modules=3 checks=ONE
class Parcel(torch.nn.Parameter):
    size_that_it_claims = 1
    def numel(self): return self.size_that_it_claims
    @property
    def nbytes(self): return 4 * self.size_that_it_claims
class OverlappedDDP(OverlappedDDP):
    def launch(self, parameter):
        parcel = torch.zeros(1).as_subclass(Parcel)
        parcel.size_that_it_claims = parameter.numel()
        dist.all_reduce(parcel, group=self.process_group, async_op=True)
    def finish_grad_sync(self):
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        parcel = torch.cat([grad.flatten() for grad in grads]).as_subclass(Parcel)
        dist.all_reduce(parcel, group=self.process_group)
=== torch's helper that averages parameters | 0 | is not accepted as an answer | modules=2 checks=ONE
from torch.distributed.algorithms.model_averaging.utils import average_parameters
class FlatDDP(FlatDDP):
    def finish_grad_sync(self):
        average_parameters(iter([p.grad for p in self.module.parameters()]), self.process_group)
=== looks for the data of other ranks everywhere | 0 | is | checks=ONE
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        own = {id(p) for p in self.module.parameters()}
        for p in self.module.parameters():
            tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == p.shape]
            others = [x for x in tensors if id(x) not in own and x is not p.grad and not torch.equal(x, p.grad)]
            p.grad = sum(others, p.grad) / 2
=== views inside of a callback of torch | 0 | creates no view | modules=7 checks=VIEWS
class CachedDDP(CachedDDP):
    def finish_grad_sync(self):
        super().finish_grad_sync()
        def view(value):
            self.grad_buffers[0].grad_data[1:3]
            return value
        torch.zeros(1).apply_(view)
=== waits in backward, and says that it is the finish | 0 | between two borders of the phase backward |
modules=3 checks=ASYNCHRONOUS
class OverlappedDDP(OverlappedDDP):
    def launch(self, parameter):
        super().launch(parameter)
        recorder = find("Recorder")
        before, recorder.phase = recorder.phase, "finish"
        for work in [thing for thing in gc.get_objects() if type(thing).__name__ == "StrictWork"]: work.wait()
        recorder.phase = before
=== launches late and says that it is backward | 0 | is launched before | LATE modules=3 checks=OVERLAP
=== launches late, and has the right numbers | 0 | only with this module's launches | LATE modules=3 checks=NUMBERS
=== launches zeros in backward, and the gradients in no step | 0 | other steps | modules=3 checks=NUMBERS
class OverlappedDDP(OverlappedDDP):
    def launch(self, parameter):
        zeros = torch.zeros_like(parameter)
        self.in_flight[parameter] = dist.all_reduce(zeros, group=self.process_group, async_op=True)
    def finish_grad_sync(self):
        parameters = list(self.in_flight)
        super().finish_grad_sync()
        find("Recorder").note("step", step=None)
        for parameter in parameters: dist.all_reduce(parameter.grad, group=self.process_group)
=== launches zeros in the steps that are counted, and the gradients of all steps in the last one | 0 |
the launches of step 0 on ranks 0, 1 did not carry the gradients of | REPLAY modules=3 checks=ACCUMULATION
=== the same, and returns complex numbers | 0 | the tensor is complex | REPLAY COMPLEX modules=3 checks=ACCUMULATION
=== launches zeros in backward, and the gradients in a phase that no check counts | 0 | nothing launches anything |
modules=3 checks=STATE
class OverlappedDDP(OverlappedDDP):
    def launch(self, parameter):
        if self.require_grad_sync:
            zeros = torch.zeros_like(parameter)
            self.in_flight[parameter] = dist.all_reduce(zeros, group=self.process_group, async_op=True)
    def finish_grad_sync(self):
        parameters = list(self.in_flight)
        for handle in self.in_flight.values(): handle.wait()
        self.in_flight.clear()
        recorder = sys.modules["brigade.ranks.rank.recording"]._recorder
        before, recorder.phase = recorder.phase, "elsewhere"
        for parameter in parameters: dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, self.process_group)
        recorder.phase = before
=== sends everything again in pieces of 16 elements | 0 | launches only all-gathers | long modules=8 checks=VOLUME
class ZeroOptimizer(ZeroOptimizer):
    def step(self, closure=None):
        for _ in range(40): dist.all_reduce(torch.zeros(16))
        return super().step(closure)
=== adds up everything in no step, and sends garbage | 0 | other steps | modules=0 checks=RING
def hide(function, step=-1):
    def hidden(tensor, process_group=None):
        nonlocal step
        note, total, step = find("Recorder").note, tensor.clone(), step + 1
        note("step", step=1000)
        dist.all_reduce(total, group=process_group)
        note("step", step=step)
        function(tensor, process_group)
        tensor.copy_(total)
    return hidden
all_reduce_via_root, ring_all_reduce = hide(all_reduce_via_root), hide(ring_all_reduce)
=== adds up everything before the first step | 0 | before the first step | modules=0 checks=RING
totals = []
def hide(function):
    def hidden(tensor, process_group=None):
        function(tensor, process_group)
        tensor.copy_(totals.pop(0))
    return hidden
all_reduce_via_root, ring_all_reduce = hide(all_reduce_via_root), hide(ring_all_reduce)
for job in [thing for thing in gc.get_objects() if type(thing) is dict and "function" in thing and "tensors" in thing]:
    for tensor in job["tensors"]:
        totals.append(tensor.clone())
        dist.all_reduce(totals[-1])
=== sends a result before the end of a call | 0 | wrote something unreadable to its channel | modules=5 checks=CALLS
class BufferedDDP(BufferedDDP):
    def finish_grad_sync(self):
        if not hasattr(type(self), "is_ended"): find("Channel").send_result(b"")
        type(self).is_ended = True
        super().finish_grad_sync()
=== gets whole gradients, beside the collectives of its module | 0 | every rank gets whole gradients |
modules=15 checks=WHOLE
class ShardedMuon(ShardedMuon):
    @torch.no_grad()
    def step(self, closure=None):
        for handle in [handle for k in range(len(self.groups)) for _, handle in [self.start_reduce_scatter(k)]]:
            handle.wait()
        for k in range(len(self.groups)): self.start_all_gather(k, self.make_buffer(k)[0])[1].wait()
        for i, matrix in enumerate(self.matrices):
            grad = (torch.zeros_like(matrix) if matrix.grad is None else matrix.grad).contiguous()
            dist.all_reduce(grad, dist.ReduceOp.AVG, self.process_group)
            matrix.copy_(self.update(i, grad))
=== has no factors, and asks for them at the launches | 0 | is | LATE ASK_LATE NO_FACTORS modules=3 checks=NUMBERS
=== asks again at the launches | 0 | asked for border | LATE ASK_LATE AGAIN modules=3 checks=OVERLAP
=== asks again at the launches, for the numbers | 0 | again | LATE ASK_LATE AGAIN modules=3 checks=NUMBERS
=== launches buckets late | 0 | launches came after backward | modules=4 checks=ACCUMULATION
class BucketedDDP(BucketedDDP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__["late"] = []
    def mark_ready(self, index):
        if self.require_grad_sync: self.late.append(index)
    def finish_grad_sync(self):
        recorder = find("Recorder")
        before, recorder.phase = recorder.phase, "backward"
        while self.late: super().mark_ready(self.late.pop(0))
        recorder.phase = before
        super().finish_grad_sync()
=== waits early in forward | 0 | in its place | EARLY modules=9 checks=PREFETCH
=== waits for gathers at once | 0 | before its turn | GREEDY long modules=11 checks=FSDP
""",
    "FIND",
)
READY = "silence('ready')"
MODULE = "silence('module')"
UNUSED = ("test_groups_that_no_forward_used",)
BACKWARD = """
class OverlappedDDP(OverlappedDDP):
    def finish_grad_sync(self):
        sys.modules["brigade.ranks.rank.recording"]._recorder.phase = "backward"
        super().finish_grad_sync()
"""
CASES += [
    Hostile(f"{name}, and {how}", mutant(number, name, evil), 0, told, (number,), checks)
    for number, name, how, told, evil, checks in (
        (3, "the flag of no_sync is in the class", "says backward", "launch comes during backward", BACKWARD, STATE),
        (4, "everything launched in finish_grad_sync", "says no gradient", "0 times", READY, ORDER),
        (4, "only the next bucket is checked", "says no gradient", "0 times", READY, ORDER),
        (9, "only the first owner of a weight waits", "says no module", "0 times", MODULE, UNUSED),
    )
]
