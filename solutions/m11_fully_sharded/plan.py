"""The plan of module 11: which parameters form a unit, and what happens to the units in which order.

Both functions are pure. They need neither ranks nor tensors with values.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

UnitTypes = tuple[type[nn.Module], ...]


def plan_units(module: nn.Module, unit_types: UnitTypes) -> list[list[str]]:
    """Return the parameter names of each unit, as in `named_parameters()`. The first unit is the root.

    Each outermost submodule of one of these types is a unit; `module` itself is not. Units are in registration order.
    The root contains all other parameters, and all parameters that are registered under more than one name. The root is
    listed even if it is empty, but other units without parameters are omitted.
    """
    # `named_parameters(remove_duplicate=False)` yields a tied parameter under all its names. `named_modules` yields a
    # module before the modules inside it. The names of a submodule's parameters begin with its name and a dot.
    ### BEGIN SOLUTION part (a)
    prefixes = [f"{name}." for name, part in module.named_modules() if name and isinstance(part, unit_types)]
    counts = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    units: dict[str, list[str]] = {"": []}  # the root has the prefix ""
    for name, parameter in module.named_parameters():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        units.setdefault("" if counts[parameter] > 1 else prefix, []).append(name)
    return list(units.values())
    ### END SOLUTION


def plan_schedule(num_units: int, prefetch: int, backward: bool) -> list[tuple[str, int]]:
    """Return the actions of a forward or backward pass in order: tuples ("gather" | "compute" | "reduce", unit).

    Forward computes units 0 (the root) to `num_units` - 1, and backward computes them in reverse order. Each unit is
    gathered before it computes, as early as `prefetch` allows: while unit i computes, the next `prefetch` units are
    gathered too, but no later units. Backward reduces each unit after it has computed and before the next unit
    computes; whether it reduces before or after it gathers the next one is free. The root is gathered only in forward,
    and stays gathered until the end of backward.
    """
    ### BEGIN SOLUTION part (b)
    order = list(range(num_units))[:: -1 if backward else 1]
    gathers = [("gather", unit) for unit in order if unit or not backward]
    schedule = gathers[: prefetch + 1]
    for position, unit in enumerate(order):
        schedule.append(("compute", unit))
        schedule += gathers[position + prefetch + 1 : position + prefetch + 2]
        schedule += [("reduce", unit)] * backward
    return schedule
    ### END SOLUTION
