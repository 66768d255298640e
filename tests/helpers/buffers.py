"""The buckets of modules 5 to 10 in their checks."""

from brigade.checks.expectations import overlaps, require_launches
from m05_grad_buffer.expected import compute_layout

BUCKET_NUMEL = 150


def format_zero_grad(form):
    """Return the call that zeroes the gradients in this form: see the scenario's `zero_gradients`."""
    owner, value = form.split(", to ")
    return f"{owner}.zero_grad(set_to_none={value == 'None'})"


def list_groups(parameters, size, buckets_per_group, bucket_numel=BUCKET_NUMEL):
    """Return the groups that the rules of modules 5 and 6 give: (dtype, elements, names of parameters), by dtype."""
    trainable = [(name, p) for name, p in reversed(parameters.items()) if p.requires_grad]
    groups = []
    for dtype in dict.fromkeys(p.dtype for _, p in trainable):
        named = [(name, p.numel()) for name, p in trainable if p.dtype == dtype]
        layout = compute_layout([numel for _, numel in named], bucket_numel, size)
        ranges = layout["bucket_ranges"]
        length = buckets_per_group or len(ranges)
        for first in range(0, len(ranges), length):
            names = [name for (name, _), b in zip(named, layout["bucket_of"]) if first <= b < first + length]
            groups.append((dtype, sum(end - start for start, end in ranges[first : first + length]), names))
    return groups


def compute_padded_numel(params, world):
    """Return the elements of all buckets of a buffer of these parameters, padding included."""
    numels = [p.numel() for p in reversed(list(params)) if p.requires_grad]
    return compute_layout(numels, BUCKET_NUMEL, world)["numel"]


def require_halves(results, case, steps=1):
    """Require reduce_scatters, launched asynchronously while backward runs, and all_gathers."""

    def accepts(launched):
        return {launch.op for launch in launched} == {"reduce_scatter", "all_gather"} and all(
            overlaps(launch) for launch in launched if launch.op == "reduce_scatter"
        )

    kind = "asynchronous reduce_scatters, launched during backward, and all_gathers"
    require_launches(results.events, case.group, kind, accepts, steps)
