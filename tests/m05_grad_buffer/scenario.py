"""Functions that the ranks run in the checks of module 5, apart from plain training."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.course.checks.edge_case_models import OPTIMIZERS, compute_loss
from brigade.course.checks.forms import Among, DictOf, Like, ListOf, Maybe, OneOf, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.memory import is_self_copy, list_tensors
from brigade.ranks.rank.recording import phase
from helpers.training import (
    Dots,
    build,
    create_group,
    forward_backward,
    like_weights,
    list_steps,
    make_meta_model,
    move_to_device,
    wrap,
)

COPIES = ("copy_", "clone", "cat", "stack", "_to_copy", "_foreach_copy_")


RANGES = ListOf([int, int])
LAYOUT = {"param_ranges": RANGES, "bucket_of": ListOf(int), "bucket_ranges": RANGES, "numel": int}


@returns(lambda cases: [LAYOUT] * len(cases))
def plan_layouts(cases: list[dict]) -> list[dict]:
    """Return the fields of the layout that plan_layout returns for each case."""
    layouts = [student("m05_grad_buffer", "plan_layout")(*case["arguments"], **case["keywords"]) for case in cases]
    return [
        {
            "param_ranges": [list(map(int, pair)) for pair in layout.param_ranges],
            "bucket_of": [int(bucket) for bucket in layout.bucket_of],
            "bucket_ranges": [list(map(int, pair)) for pair in layout.bucket_ranges],
            "numel": int(layout.numel),
        }
        for layout in layouts
    ]


@returns(lambda: bool)
def is_frozen() -> bool:
    """Return whether a layout rejects changes."""
    layout = student("m05_grad_buffer", "plan_layout")([10, 20], 15, 2)
    try:
        layout.numel = 0
    except AttributeError:
        return True
    return False


def form_moved_buffer(job: dict) -> dict:
    """Return the form of what `move_buffer` returns."""
    count, dtype, name = len(job["values"]), job["values"][0].dtype, "main_grad" if job["grad_dtype"] else "grad"
    tensors = {"data": [(Maybe(int), Like(dtype))] * count, name: [Maybe((Maybe(int), Like()))] * count}
    moment = {"starts": [int] * count, **tensors}
    return {"after construction": moment, "after reallocate()": Maybe(moment), "is_unset": bool}


@returns(form_moved_buffer)
def move_buffer(job: dict) -> dict:
    """Make a GradBuffer with parameters, fill each gradient with a number, and move the buffer.

    Return, by moment, the offset in elements and the values of each p.data in param_data and p.main_grad in grad_data.
    The offset of a tensor outside its flat tensor is None. With job["grad_dtype"] None, the gradients are in p.grad.
    A buffer does not move if there is no gradient. "is_unset" says whether a gradient of None stays None.
    """
    params = [nn.Parameter(value.to(device())) for value in job["values"]]
    name = "main_grad" if job["grad_dtype"] else "grad"
    for i, parameter in enumerate([] if job["grad_dtype"] else params):
        parameter.grad = torch.full_like(parameter, i + 1)
    buffer = student("m05_grad_buffer", "GradBuffer")(
        params, job["bucket_numel"], 1, grad_dtype=job["grad_dtype"], with_params=True
    )

    def list_gradients() -> list:
        return [getattr(p, name, None) for p in params]

    def describe() -> dict:
        return {
            "starts": [int(start) for start, _ in buffer.layout.param_ranges],
            "data": [(find_offset(p.data, buffer.param_data), clone(p.data)) for p in params],
            name: [g if g is None else (find_offset(g, buffer.grad_data), clone(g)) for g in list_gradients()],
        }

    unset = nn.Parameter(torch.ones(2, device=device()))
    student("m05_grad_buffer", "GradBuffer")([unset], None, 1)
    states = {"after construction": describe(), "after reallocate()": None, "is_unset": unset.grad is None}
    if any(grad is None for grad in list_gradients()):
        return states
    for i, grad in enumerate(list_gradients()):
        grad.fill_(i + 1)
    old = buffer.grad_data, buffer.param_data  # kept alive, so that the new tensors get other memory
    buffer.reallocate()
    states["after reallocate()"] = describe()
    del old
    return states


def find_offset(tensor: torch.Tensor | None, data: torch.Tensor) -> int | None:
    """Return where a contiguous tensor begins in a flat tensor, in elements; None if it is not inside."""
    if tensor is None:
        return None
    nbytes = tensor.data_ptr() - data.data_ptr()
    inside = 0 <= nbytes <= data.nbytes - tensor.nbytes and tensor.dtype == data.dtype and tensor.is_contiguous()
    return nbytes // data.element_size() if inside else None


BUFFERS = ListOf(  # the form of what `describe_buffers` returns; checks expect each parameter in one buffer
    {
        "dtype": torch.dtype,
        "numel": int,
        "offsets": DictOf(OneOf(int, Among("absent", "outside", "replaced"))),
        "padding": float,
    }
)


def describe_buffers(ddp: nn.Module, model: nn.Module) -> list[dict]:
    """Return, for each grad buffer, its dtype, its length and the offset in elements of each parameter's gradient.

    Instead of the offset, there is "absent" for a gradient that is None, and "outside" for one outside the buffer.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    descriptions = []
    for buffer in ddp.grad_buffers:
        data, offsets = buffer.grad_data, {}
        for parameter in buffer.params:
            grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
            offset = find_offset(grad, data)
            offsets[names[id(parameter)]] = "absent" if grad is None else "outside" if offset is None else offset
        padding = torch.ones(data.numel(), dtype=torch.bool, device=data.device)
        for start, end in buffer.layout.param_ranges:
            padding[start:end] = False
        descriptions.append(
            {
                "dtype": data.dtype,
                "numel": data.numel(),
                "offsets": offsets,
                "padding": data[padding].float().nan_to_num(nan=1.0).abs().sum().item(),
            }
        )
    return descriptions


def zero_gradients(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Zero the gradients with one of the calls that users make, such as "optimizer, to None"."""
    owner, value = form.split(", to ")
    (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=value == "None")


def form_training(job: dict) -> dict:
    """Return the form of what `train` returns."""
    return {"weights": like_weights(job), "buffers": [BUFFERS] * len(job["batches"])}


@returns(form_training, list_steps)
def train(job: dict) -> dict:
    """Train, and zero gradients in the form job["zero"] before forward, or after forward if job["late"] is set.

    In the descriptions of the buffers, the offset of a gradient that finish_grad_sync moves out of the buffer is
    "replaced".
    """
    model = build(job)
    ddp = wrap(job, model)
    optimizer = OPTIMIZERS[job["optimizer"]]([p for p in model.parameters() if p.requires_grad])
    buffers = []
    for step, [batch] in enumerate(job["batches"]):
        recording.note("step", step=step)
        if not job["late"]:
            zero_gradients(job["zero"], model, optimizer)
        with phase("forward"):
            loss = compute_loss(ddp, move_to_device(batch))
        if job["late"]:
            zero_gradients(job["zero"], model, optimizer)
        with phase("backward"):
            loss.backward()
        before = [buffer["offsets"] for buffer in describe_buffers(ddp, model)]
        with phase("finish"):
            ddp.finish_grad_sync()
        buffers.append(describe_buffers(ddp, model))
        for buffer, offsets in zip(buffers[-1], before, strict=True):
            replaced = [n for n, offset in buffer["offsets"].items() if offset == "outside" and type(offsets[n]) is int]
            buffer["offsets"].update(dict.fromkeys(replaced, "replaced"))
        with phase("step"):
            optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"weights": weights, "buffers": buffers}


train.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry
train.reports = ("ready",)  # brigade/course/checks/borders.py demands them


class Ledger(TorchDispatchMode):
    """Count the elements that copying operations write, and the bytes of new memory, in the block."""

    def __init__(self):
        super().__init__()
        self.copied: list[int] = []
        self.allocated = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._overloadpacket.__name__ in COPIES and not is_self_copy(args):
            self.copied += [tensor.numel() for tensor in list_tensors(result)]
        known = {tensor.untyped_storage().data_ptr() for tensor in list_tensors(list(args))}
        for tensor in list_tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.allocated += tensor.untyped_storage().nbytes()
        return result


def form_measured_step(job: dict) -> dict:
    """Return the form of what `measure_steady_step` returns."""
    num_copies = [int] * len(list(make_meta_model(job).parameters()))
    return dict.fromkeys(("bare", "ddp"), {"copied": int, "num_copies": num_copies, "allocated": int})


@returns(form_measured_step)
def measure_steady_step(job: dict) -> dict:
    """Return what a third training step copies and allocates, for the bare model and for the wrapped one.

    "copied" is the number of elements in copies that are not smaller than the smallest parameter, and "num_copies" the
    number of copies that are as large as each parameter.
    """
    bare = build(job)
    numels = [parameter.numel() for parameter in bare.parameters()]
    model = copy.deepcopy(bare)
    ddp = wrap(job, model)
    measured = {}
    for name, module in (("bare", bare), ("ddp", ddp)):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            with Ledger() as ledger:
                forward_backward(module, job["batches"][0][0])
                if module is ddp:
                    with phase("finish"):
                        ddp.finish_grad_sync()
        measured[name] = {
            "copied": sum(numel for numel in ledger.copied if numel >= min(numels)),
            "num_copies": [ledger.copied.count(numel) for numel in numels],
            "allocated": ledger.allocated,
        }
    return measured


def clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def form_accumulated(job: dict) -> dict:
    """Return the form of what `accumulate` returns."""
    sizes = {str(i): (size,) for i, size in enumerate(job["sizes"])}
    main_grad = {i: Maybe(Like(job["arguments"]["grad_dtype"], shape)) for i, shape in sizes.items()}
    grad = {i: Maybe(Like(torch.bfloat16, shape)) for i, shape in sizes.items()}
    step = {"main_grad": main_grad, "grad": grad, "is_view": dict.fromkeys(sizes, bool)}
    return {"steps": [step] * len(job["batches"]), "last": Maybe({i: (bool, form) for i, form in main_grad.items()})}


@returns(form_accumulated, list_steps)
def accumulate(job: dict) -> dict:
    """Take two steps of many micro-batches on bf16 parameters. Return main_grad, grad and whether it is in the buffer.

    An optimizer zeroes the gradients, not the wrapper. A parameter whose inputs are zeros is not used.
    With job["gather_grads"] False, module 6's wrapper leaves the averages in this rank's shards. "last" has, for each
    parameter, whether p.grad is set, and main_grad, after two more steps with gradients of 1 and without set_grads. It
    is None if a buffer does without finish_accumulation.
    """
    model = Dots([torch.ones(size, dtype=torch.bfloat16) for size in job["sizes"]]).to(device())
    with phase("construct"):
        ddp = student(job["package"], job["wrapper"])(model, process_group=create_group(job), **job["arguments"])
    if "gather_grads" in job:
        ddp.gather_grads = job["gather_grads"]

    def move(inputs: list) -> list:
        return [x.to(device()) if x.any() else None for x in inputs]

    is_sharded = job.get("gather_grads") is False  # then only the wrapper's zero_grad ends a step
    owner = ddp if is_sharded else torch.optim.SGD(model.parameters())
    steps = []
    for step, micro_batches in enumerate(job["batches"]):
        recording.note("step", step=step)
        owner.zero_grad(set_to_none=job["set_to_none"])
        for inputs in micro_batches[:-1]:
            with ddp.no_sync():
                ddp(move(inputs)).backward()
            if inputs is micro_batches[0]:
                with torch.no_grad():  # an evaluation
                    ddp(move(inputs))
        with phase("backward"):
            ddp(move(micro_batches[-1])).backward()
        with phase("finish"):
            ddp.finish_grad_sync()
        offsets = [offset for buffer in describe_buffers(ddp, model) for offset in buffer["offsets"].items()]
        views = [name for name, offset in offsets if type(offset) is int]
        steps.append(
            {
                "main_grad": {str(i): clone(getattr(w, "main_grad", None)) for i, w in enumerate(model.weights)},
                "grad": {str(i): clone(w.grad) for i, w in enumerate(model.weights)},
                "is_view": {str(i): f"weights.{i}" in views for i in range(len(model.weights))},
            }
        )
    buffer = ddp.grad_buffers[0]
    if not hasattr(buffer, "finish_accumulation"):  # an answer may do without it
        return {"steps": steps, "last": None}
    for _ in range(2):
        for i, weight in enumerate(buffer.params):
            weight.grad = torch.ones_like(weight)
            buffer.accumulate_into_buffer(i)
        buffer.finish_accumulation(False)
    last = {str(i): (w.grad is not None, clone(getattr(w, "main_grad", None))) for i, w in enumerate(model.weights)}
    return {"steps": steps, "last": last}
