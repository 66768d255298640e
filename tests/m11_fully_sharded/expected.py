"""The units, layouts and weights that module 11's checks expect."""

import contextlib
import copy
from collections import Counter
from functools import partial

import torch

from brigade.course.checks.reference import OPTIMIZERS, compute_loss
from brigade.ranks.claims import At
from m05_grad_buffer.expected import compute_layout
from m11_fully_sharded.scenario import UNIT_TYPES, cast_layers, change_forward


def find_units(model, unit_types):
    """Return the names of each unit's parameters, the root's first, in the order of `named_parameters()`."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    units = {"": []}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        owners = [".".join(parts[:end]) for end in range(1, len(parts))]
        unit = next((owner for owner in owners if isinstance(modules[owner], unit_types)), "")
        units.setdefault("" if uses[parameter] > 1 else unit, []).append(name)
    return list(units.values())


def get_unit_type(case):
    """Return the unit type of a case's model, as a key of UNIT_TYPES."""
    return "Block" if "Blocks" in case.model else "Linear"


def list_units(case):
    """Return `find_units` of a case's model."""
    return find_units(case.build(), UNIT_TYPES[get_unit_type(case)])


def lay_out(case, cast=None, trainable=True, size=None):
    """Return, for each unit, {dtype: (layout, names)} of its trainable parameters, for `size` ranks (default: all).

    `cast` is the dtype that `cast_layers` gives to some of them. If not `trainable`, return the frozen ones instead.
    """
    model = case.build()
    cast_layers({} if cast is None else {"cast": cast}, model)
    named = dict(model.named_parameters())
    units = []
    for names in list_units(case):
        kinds = {}
        for name in names:
            if named[name].requires_grad == trainable:
                kinds.setdefault(named[name].dtype, []).append(name)
        num = size or len(case.group)
        units.append({k: (compute_layout([named[n].numel() for n in v], None, num), v) for k, v in kinds.items()})
    return units


def cut_shards(weights, units, world):
    """Return the flat tensors of all ranks, shards[rank][i], that `join_shards` joins to these weights."""
    shards = [[] for _ in range(world)]
    for dtype, (layout, names) in (entry for unit in units for entry in unit.items()):
        flat = torch.zeros(layout["numel"], dtype=dtype)
        for name, (start, end) in zip(names, layout["param_ranges"], strict=True):
            flat[start:end] = weights[name].flatten()
        for own, part in zip(shards, flat.chunk(world), strict=True):
            own.append(part)
    return shards


def join_shards(shards, units, case):
    """Return tensors by the names of parameters, from the flat tensors of all ranks: shards[rank][i]."""
    parameters = case.parameters()
    layouts = [entry for unit in units for entry in unit.values()]
    wanted = [(layout["numel"] // len(shards),) for layout, _ in layouts]
    for rank, own in enumerate(shards):
        shapes = [None if shard is None else tuple(shard.shape) for shard in own]
        At(rank).equal("the shapes of this rank's parts of the flat tensors are {}", shapes, wanted)
    flats = [torch.cat(parts) for parts in zip(*shards, strict=True)]
    return {
        name: flat[start:end].view(parameters[name].shape)
        for flat, (layout, names) in zip(flats, layouts, strict=True)
        for name, (start, end) in zip(names, layout["param_ranges"], strict=True)
    }


def train_plain(
    case, steps=None, ranks=None, start=None, max_norm=None, clip=torch.nn.utils.clip_grad_norm_, state=None
):
    """Return the weights of plain training by name, the norm before clipping of each step, and the optimizer's state.

    `state` is the state with which the optimizer starts. A parameter without a gradient counts as one of zeros.
    """
    model = case.build(start)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    ranks, norms = case.group if ranks is None else ranks, []
    for step in range(len(case.batches[0])) if steps is None else steps:
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        for batch in (batch for rank in ranks for batch in case.batches[rank][step]):
            (compute_loss(model, batch) / len(ranks)).backward()
        if max_norm is not None:
            norms.append(float(clip(trainable, max_norm)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms, optimizer.state_dict()


@contextlib.contextmanager
def use_one_thread():
    """Compute with one thread, as ranks do: in bfloat16, sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@use_one_thread()
def train_mixed(case, compute_dtype, reduce_dtype, kept=torch.float32, is_divided_early=False, is_start_rounded=False):
    """Return the weights of training with the same casts in one process, and the first gradients.

    Each rank finishes after each micro-batch. Weights and sums of gradients have the dtype `kept`. If
    `is_divided_early`, gradients are divided in `compute_dtype`, and if `is_start_rounded`, so are the first weights.
    Both are mistakes.
    """
    keeper = case.build().to(compute_dtype if is_start_rounded else kept).to(kept)
    trainable = [p for p in keeper.parameters() if p.requires_grad]
    optimizer, model, first = OPTIMIZERS[case.optimizer](trainable), case.build().to(compute_dtype), None
    change_forward(model, "scaled")
    for module in (model, *model.blocks):
        module.register_forward_pre_hook(partial(cast_inputs, compute_dtype), with_kwargs=True)
    for step in range(len(case.batches[0])):
        optimizer.zero_grad()
        for micro in range(len(case.batches[0][0])):
            model.load_state_dict(keeper.state_dict() | {"scale": model.scale})
            local = [take_gradients(model, case.batches[rank][step][micro]) for rank in case.group]
            for parameter, gradients in zip(trainable, zip(*local, strict=True), strict=True):
                first_divisor = len(local) if is_divided_early else 1
                total = sum((g / first_divisor).to(reduce_dtype) for g in gradients)
                average = (total / (len(local) // first_divisor)).to(kept)
                parameter.grad = average if parameter.grad is None else parameter.grad + average
        if first is None:
            first = {name: p.grad.clone() for name, p in keeper.named_parameters() if p.requires_grad}
        optimizer.step()
    return {name: p.detach().float() for name, p in keeper.named_parameters()}, first


def cast_inputs(dtype, _, args, kwargs):
    """Return the arguments of a forward, with floating-point tensors in this dtype."""

    def cast(value):
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}


def take_gradients(model, batch):
    """Return the gradients of the trainable parameters for a batch."""
    model.zero_grad()
    compute_loss(model, batch).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]
