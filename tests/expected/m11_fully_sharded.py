"""The units, layouts and weights that module 11's checks expect."""

import torch
from test_m05_grad_buffer import compute_layout

from brigade.checks import edge_case_models
from brigade.checks.reference import OPTIMIZERS, compute_loss
from scenarios.m11_fully_sharded import UNIT_TYPES, cast_layers


def find_units(model, unit_types):
    """Return the names of each unit's parameters, the root's first, in the order of `named_parameters()`."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = dict(model.named_modules(remove_duplicate=False))
    units = {"": []}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        owners = [".".join(parts[:end]) for end in range(1, len(parts))]
        unit = next((owner for owner in owners if isinstance(modules[owner], unit_types)), "")
        is_tied = sum(model.get_parameter(other) is parameter for other in names) > 1
        units.setdefault("" if is_tied else unit, []).append(name)
    return list(units.values())


def build(case):
    """Return the model with which the case's training starts."""
    return edge_case_models.build(case.model, case.sizes, case.start(), case.dtype)


def lay_out(case, unit_type="Block", cast=None, trainable=True):
    """Return, for each unit, {dtype: (layout, names)} of its trainable parameters, for the case's number of ranks.

    `cast` is the dtype that `cast_layers` gives to some of them. If not `trainable`, return the frozen ones instead.
    """
    model = build(case)
    cast_layers({} if cast is None else {"cast": cast}, model)
    named = dict(model.named_parameters())
    units = []
    for names in find_units(model, UNIT_TYPES[unit_type]):
        kinds = {}
        for name in names:
            if named[name].requires_grad == trainable:
                kinds.setdefault(named[name].dtype, []).append(name)
        size = len(case.group)
        units.append({k: (compute_layout([named[n].numel() for n in v], None, size), v) for k, v in kinds.items()})
    return units


def cut_shards(weights, units, world):
    """Return the flat tensors of all ranks, shards[rank][i], that `join_shards` joins to these weights."""
    shards = [[] for _ in range(world)]
    for dtype, (layout, names) in (entry for unit in units for entry in unit.items()):
        flat = torch.zeros(layout["numel"], dtype=dtype)
        for name, (start, end) in zip(names, layout["param_ranges"]):
            flat[start:end] = weights[name].flatten()
        for own, part in zip(shards, flat.chunk(world)):
            own.append(part)
    return shards


def join_shards(shards, units, case):
    """Return tensors by the names of parameters, from the flat tensors of all ranks: shards[rank][i]."""
    parameters = case.parameters()
    flats = [torch.cat(parts) for parts in zip(*shards)]
    layouts = [entry for unit in units for entry in unit.values()]
    return {
        name: flat[start:end].view(parameters[name].shape)
        for flat, (layout, names) in zip(flats, layouts)
        for name, (start, end) in zip(names, layout["param_ranges"])
    }


def train_plain(case, steps=None, ranks=None, start=None, max_norm=None, clip=torch.nn.utils.clip_grad_norm_):
    """Return the weights of plain training, by name, and the norm before clipping of each step.

    A parameter without a gradient counts as one with a gradient of zeros.
    """
    model = edge_case_models.build(case.model, case.sizes, case.start() if start is None else start, case.dtype)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trainable)
    ranks, norms = case.group if ranks is None else ranks, []
    for step in range(len(case.batches[0])) if steps is None else steps:
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        for batch in (batch for rank in ranks for batch in case.batches[rank][step]):
            (compute_loss(model, batch) / len(ranks)).backward()
        if max_norm is not None:
            norms.append(float(clip(trainable, max_norm)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms
