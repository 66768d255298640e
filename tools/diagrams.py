"""The concept diagrams of the readings. Except for module 0, the solutions' own functions compute the examples.

    draw_layout(Path("out/layout.png"))

The colours are from Okabe and Ito's palette. Labels, hatches and frames repeat what the colours show, so the diagrams
also work in greyscale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import nn

from brigade.course.modules import ROOT
from brigade.lab.plots import COLOURS
from brigade.lab.program import Compute, Launch, Wait, simulate
from brigade.rank.emulated_link import Link
from solutions.m04_bucketed_ddp.bucketed_ddp import LaunchQueue
from solutions.m05_grad_buffer.grad_buffer import plan_layout
from solutions.m11_fully_sharded import fully_sharded
from solutions.m11_fully_sharded.plan import plan_schedule
from solutions.m14_hybrid_sharded.hybrid_sharded import plan_grid
from solutions.m15_sharded_muon.sharded_muon import assign_matrices, plan_groups

BLUE, LIGHT_BLUE, ORANGE, LIGHT_ORANGE, GREEN, GREY = "#0072b2", "#8fcdf0", "#e69f00", "#f6d58d", "#009e73", "#e0e0e0"
EDGE = "#555555"
INK = {BLUE: "white", GREEN: "white"}  # text on other colours is black
FONT = 10  # points, at a width of 900 pixels

# The example of module 5's reading. `NUMELS` are the sizes of the parameters in elements, in the buffer's order.
NUMELS, BUCKET_NUMEL, NUM_RANKS = (100, 30, 200, 50), 150, 2
RANK_STYLES = ({"colour": LIGHT_BLUE}, {"colour": ORANGE, "hatch": "//"})
PADDING = {"colour": GREY, "hatch": "xx"}


def make_axes(height: float, rows: Sequence[str], width: float, inches: float = 9) -> tuple[Figure, Axes]:
    """Return a figure `inches` wide, and its axes with one row for each label in `rows`, from top to bottom.

    `height` is in inches, too. Each row has height 1 on the y axis, and x ranges from 0 to `width`.
    """
    figure = Figure(figsize=(inches, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(-0.004 * width, 1.004 * width)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), rows, fontsize=FONT)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def draw_box(axes: Axes, start: float, end: float, row: float, text: str, colour: str, **style: Any) -> None:
    """Draw a box with text in the middle. `style` contains additional options for the rectangle."""
    style = {"edgecolor": EDGE, "linewidth": 0.8, "height": 0.76} | style
    axes.add_patch(Rectangle((start, row - style["height"] / 2), end - start, facecolor=colour, **style))
    if text:
        plate = {"facecolor": colour, "edgecolor": "none", "pad": 1} if "hatch" in style else None
        ink = INK.get(colour, "black")
        axes.text((start + end) / 2, row, text, ha="center", va="center", fontsize=FONT, color=ink, bbox=plate)


def draw_legend(figure: Figure, styles: dict[str, dict[str, Any]]) -> None:
    """Draw a legend below the figure, with a box and a name for each style."""
    handles = [
        Patch(
            facecolor=style["colour"],
            label=name,
            **{"edgecolor": EDGE} | {k: v for k, v in style.items() if k != "colour"},
        )
        for name, style in styles.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=FONT)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


# ---- module 0: the chunks that travel around a ring


def list_ring_states(size: int) -> list[list[list[int]]]:
    """Return the states of a ring all-reduce on `size` ranks: before it, and after each step.

    `state[rank][chunk]` is the number of ranks whose values are in this chunk of this rank.
    """
    states = [[[1] * size for _ in range(size)]]
    for step in range(2 * (size - 1)):
        before = states[-1]
        after = [list(chunks) for chunks in before]
        for rank in range(size):
            chunk = (rank - step - 2) % size
            own = before[rank][chunk] if step < size - 1 else 0  # the second phase replaces values
            after[rank][chunk] = own + before[rank - 1][chunk]
        states.append(after)
    return states


def draw_ring(path: Path, size: int = 4) -> None:
    """Draw the chunks of all ranks before a ring all-reduce and after each of its steps, as a PNG file."""
    states = list_ring_states(size)
    figure = Figure(figsize=(9, 3.1), dpi=100, layout="constrained")
    axes = figure.subplots()
    for column, state in enumerate(states):
        left = column * (size + 1.0)
        for rank in range(size):
            for chunk, count in enumerate(state[rank]):
                has_arrived = column and (rank - column - 1) % size == chunk
                colour = COLOURS["backward"] if count == size else COLOURS["forward"] if count > 1 else "white"
                axes.add_patch(Rectangle((left + chunk, rank), 1, 1, facecolor=colour, edgecolor="#777777", zorder=1))
                if has_arrived:
                    edge = COLOURS["collective"]
                    box = Rectangle((left + chunk + 0.08, rank + 0.08), 0.84, 0.84, fill=False, edgecolor=edge, lw=3)
                    axes.add_patch(box)
                ink = "white" if count == size else "black"
                axes.text(left + chunk + 0.5, rank + 0.52, count, ha="center", va="center", color=ink, fontsize=10)
        axes.text(left + size / 2, -0.25, f"step {column}" if column else "before", ha="center", fontsize=10)
        for chunk in range(size):
            axes.text(left + chunk + 0.5, size + 0.5, chunk, ha="center", color="#555555", fontsize=10)
    for first, name in (
        (1, "ring_reduce_scatter: add the received chunk"),
        (size, "ring_all_gather: copy the received chunk"),
    ):
        start, end = first * (size + 1.0), (first + size - 1) * (size + 1.0) - 1
        axes.plot([start, end], [-1.0, -1.0], color="#777777", linewidth=1)
        axes.text((start + end) / 2, -1.25, name, ha="center", fontsize=10)
    names = [f"rank {rank}" for rank in range(size)]
    axes.set_yticks([rank + 0.5 for rank in range(size)] + [size + 0.35], [*names, "chunk"])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_xlim(-0.1, len(states) * (size + 1.0) - 0.9)
    axes.set_ylim(size + 0.7, -2.1)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


# ---- module 4: from the hook to the launch

READY = (5, 3, 2, 4, 1, 0)  # parameters, in the order in which their gradients become ready on this rank
BUCKETS = ((5, 4), (3, 2), (1, 0))


def draw_queue(path: Path) -> None:
    """Draw the launch queue after each hook of a backward pass in which bucket 1 is complete before bucket 0."""
    launched: list[int] = []
    names = [f"bucket {index}: " + ", ".join(f"p{i}" for i in bucket) for index, bucket in enumerate(BUCKETS)]
    figure, axes = make_axes(3.4, ["hook of", *names, "launches"], len(READY))
    queue = LaunchQueue([len(bucket) for bucket in BUCKETS], launched.append)
    for column, parameter in enumerate(READY):
        of_gradient = next(index for index, bucket in enumerate(BUCKETS) if parameter in bucket)
        before = len(launched)
        queue.mark_ready(of_gradient)
        draw_box(axes, column + 0.28, column + 0.72, 0, f"p{parameter}", "white", height=0.5)
        for index, pending in enumerate(queue.num_pending):
            row, frame = index + 1, {"edgecolor": "black", "linewidth": 2.5} if index == of_gradient else {}
            if index < queue.next_to_launch:
                text, colour = "launched", ORANGE if index >= before else LIGHT_ORANGE
            else:
                text, colour = (f"{pending} pending", "white") if pending else ("complete,\nwaits", LIGHT_BLUE)
            hatch = {"hatch": "//"} if not pending and index >= queue.next_to_launch else {}
            draw_box(axes, column + 0.05, column + 0.95, row, text, colour, **frame, **hatch)
        if new := launched[before:]:
            text = "\n".join(f"all-reduce {index}" for index in new)
            draw_box(axes, column + 0.05, column + 0.95, len(BUCKETS) + 1, text, ORANGE)
    save(figure, path)


# ---- module 3: hooks and streams


def draw_hooks(path: Path) -> None:
    """Draw when autograd calls the two kinds of hooks of a parameter, and what is in its gradient then."""
    figure, axes = make_axes(2.5, ["autograd", "your hook", "parameter.grad"], 4, inches=7)
    draw_box(axes, 0.03, 0.97, 0, "backward of\nthe layer", LIGHT_BLUE)
    draw_box(axes, 1, 2, 1, "register_hook:\nf(2)", LIGHT_ORANGE)
    draw_box(axes, 2.03, 2.97, 0, "Accumulate-\nGrad", LIGHT_BLUE)
    draw_box(axes, 3, 4, 1, "post-accumulate:\nf(parameter)", ORANGE)
    draw_box(axes, 0, 2.5, 2, "1, from the first micro-batch", "white")
    draw_box(axes, 2.5, 4, 2, "1 + 2 = 3", LIGHT_BLUE)
    for start, end, text in ((0.97, 2.03, "gradient 2"), (2.97, 4, "done")):
        axes.annotate("", (end, 0), (start, 0), arrowprops={"arrowstyle": "->", "color": EDGE})
        axes.text((start + end) / 2, -0.1, text, ha="center", va="bottom", fontsize=FONT)
    save(figure, path)


def draw_streams(path: Path) -> None:
    """Draw an asynchronous all-reduce on a GPU: what the CPU queues, and which stream waits for which event."""
    figure, axes = make_axes(3.4, ["CPU", "compute\nstream", "NCCL's\nstream"], 7.6, inches=7)
    queued = ("backward", "all_reduce", "wait()", "divide")
    for column, text in enumerate(queued):
        draw_box(axes, column, column + 1, 0, text.replace("_", "_\n"), LIGHT_BLUE)
    axes.text(4.15, 0, "runs ahead without waiting", va="center", fontsize=FONT)
    draw_box(axes, 1, 3.2, 1, "backward", BLUE)
    draw_box(axes, 3.2, 6, 1, "waits", GREY, hatch="//")
    draw_box(axes, 6, 7.5, 1, "divide", BLUE)
    draw_box(axes, 1, 3.2, 2, "waits", GREY, hatch="//")
    draw_box(axes, 3.2, 6, 2, "all-reduce", ORANGE)
    for x, (start, end), text in (
        (3.2, (1.38, 1.62), "event: gradient is ready "),
        (6, (1.62, 1.38), "event: sum is ready "),
    ):
        axes.annotate("", (x, end), (x, start), arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.8})
        axes.text(x - 0.05, 1.5, text, ha="right", va="center", fontsize=FONT)
    axes.annotate("time", (7.5, 2.55), (6.4, 2.55), va="center", fontsize=FONT, arrowprops={"arrowstyle": "->"})
    axes.set_ylim(2.7, -0.5)
    save(figure, path)


# ---- modules 5 and 8: the buffer


def make_buffer_axes(height: float, rows: Sequence[str]) -> tuple[Figure, Axes, Any]:
    """Return a figure, its axes and the layout. The x axis counts the elements of the buffer.

    The first row, which shows the parameters and the padding, is already drawn.
    """
    layout = plan_layout(list(NUMELS), BUCKET_NUMEL, NUM_RANKS)
    figure, axes = make_axes(height, ["parameters", *rows], layout.numel)
    ends = [0]
    for i, (start, end) in enumerate(layout.param_ranges):
        draw_box(axes, start, end, 0, f"p{i}", BLUE)
        ends.append(end)
    starts = [start for start, _ in layout.param_ranges[1:]] + [layout.numel]
    for start, end in zip(ends[1:], starts):
        draw_box(axes, start, end, 0, "", **PADDING)
    axes.set_xticks(sorted({edge for pair in (*layout.param_ranges, *layout.bucket_ranges) for edge in pair}))
    axes.tick_params(axis="x", labelsize=9, length=3)
    axes.set_xlabel("element of the buffer", fontsize=FONT)
    for _, end in layout.bucket_ranges[:-1]:
        axes.axvline(end, color=EDGE, linewidth=1, linestyle=":", zorder=0)
    return figure, axes, layout


def list_shards(layout: Any) -> list[tuple[int, int, int, int]]:
    """Return (bucket, rank, start, end) of each rank's shard of each bucket."""
    shards = []
    for bucket, (start, end) in enumerate(layout.bucket_ranges):
        length = (end - start) // NUM_RANKS
        shards += [(bucket, rank, start + rank * length, start + (rank + 1) * length) for rank in range(NUM_RANKS)]
    return shards


def draw_layout(path: Path) -> None:
    """Draw a buffer of module 5: parameters, padding, buckets, and the shards of the ranks."""
    figure, axes, layout = make_buffer_axes(2.7, ["buckets", "shards"])
    for index, (start, end) in enumerate(layout.bucket_ranges):
        draw_box(axes, start, end, 1, f"bucket {index}", LIGHT_ORANGE)
    for _, rank, start, end in list_shards(layout):
        draw_box(axes, start, end, 2, f"rank {rank}", **RANK_STYLES[rank])
    draw_legend(figure, {"padding": PADDING})
    save(figure, path)


def draw_pieces(path: Path) -> None:
    """Draw the parts of the parameters that each rank's optimizer updates in module 8."""
    figure, axes, layout = make_buffer_axes(3.0, [f"shards of rank {rank}" for rank in range(NUM_RANKS)])
    for bucket, rank, shard_start, shard_end in list_shards(layout):
        draw_box(axes, shard_start, shard_end, 1 + rank, "", **PADDING)
        for i, (param_start, param_end) in enumerate(layout.param_ranges):
            start, end = max(param_start, shard_start), min(param_end, shard_end)
            if layout.bucket_of[i] == bucket and start < end:
                text = f"p{i}\n{start - param_start}:{end - param_start}"
                draw_box(axes, start, end, 1 + rank, text, **RANK_STYLES[rank])
    draw_legend(figure, {"padding": PADDING})
    save(figure, path)


# ---- module 11: gather, compute, free


SHARD = {"colour": GREEN}
FREED = {"colour": "white", "linestyle": "--"}
ON_ITS_WAY = {"colour": LIGHT_ORANGE, "hatch": "//"}
WHOLE = {"colour": LIGHT_BLUE}
COMPUTING = {"colour": LIGHT_BLUE, "edgecolor": "black", "linewidth": 2.5}
STATES = {
    "own shard": SHARD,
    "freed": FREED,
    "being gathered": ON_ITS_WAY,
    "full weights": WHOLE,
    "full weights, computing": COMPUTING,
}


def draw_units(path: Path) -> None:
    """Draw the state of each unit's weights on one rank, for each action of a forward pass with prefetch=1."""
    num_units = 4
    actions = plan_schedule(num_units, 1, False)
    figure, axes = make_axes(3.5, ["action", "root", *(f"unit {unit}" for unit in range(1, num_units))], len(actions))
    weights = [FREED] * num_units
    for column, (action, current) in enumerate(actions):
        # Every unit except the root is freed after its computation.
        weights = [(WHOLE if unit == 0 else FREED) if now is COMPUTING else now for unit, now in enumerate(weights)]
        weights[current] = ON_ITS_WAY if action == "gather" else COMPUTING
        colour = ORANGE if action == "gather" else BLUE
        draw_box(axes, column + 0.05, column + 0.95, 0, f"{action} {current}", colour, height=0.5)
        for unit, style in enumerate(weights):
            draw_box(axes, column + 0.05, column + 0.19, unit + 1, "", **SHARD)
            draw_box(axes, column + 0.23, column + 0.95, unit + 1, "", **style)
    draw_legend(figure, STATES)
    save(figure, path)


def draw_flat_shard(path: Path) -> None:
    """Draw what refers to the storage of module 11's flat tensor, while its unit is gathered and after it is freed."""
    layout = plan_layout(list(NUMELS), None, NUM_RANKS)
    shards = [f"shard of rank {rank}" for rank in range(NUM_RANKS)]
    rows = ["parameter.data", "saved by autograd", "storage of full", *shards]
    figure, axes = make_axes(2.9, rows, 2 * layout.numel + 40)
    axes.set_ylim(len(rows) - 0.4, -1.1)
    for left, title, style in (
        (0, f"gathered: resize_({4 * layout.numel}), then an all-gather", WHOLE),
        (layout.numel + 40, "freed: resize_(0)", FREED),
    ):
        axes.text(left + layout.numel / 2, -0.75, title, ha="center", fontsize=FONT)
        draw_box(axes, left, left + layout.numel, 2, "", **style)
        for i, (start, end) in enumerate(layout.param_ranges):
            draw_box(axes, left + start, left + end, 0, f"p{i}", "white")
            if i % 2 == 0:
                draw_box(axes, left + start, left + end, 1, f"p{i}.T", "white")
        for rank in range(NUM_RANKS):
            start = left + rank * layout.numel // NUM_RANKS
            draw_box(axes, start, start + layout.numel // NUM_RANKS, 3 + rank, "", **SHARD)
    styles = {"a view, without memory of its own": {"colour": "white"}, "full weights": WHOLE, "no memory": FREED}
    draw_legend(figure, styles | {"its own memory": SHARD})
    save(figure, path)


def record_hooks() -> list[tuple[str, int, list[tuple[str, int]], list[dict[str, Any]]]]:
    """Run a backward of module 11 with a root and two units. Return what each hook does that changes something.

    This is the hook's method and unit, the actions that it performs, and the state of each unit's weights afterwards.
    """
    events = []
    actions, call_in_backward = plan_schedule(3, 1, True), fully_sharded.call_in_backward

    def note(method: str, unit: int) -> None:
        performed = actions[sum(len(event[2]) for event in events) : len(actions) - len(ddp.schedule)]
        whole = [COMPUTING if ddp.current == unit else WHOLE for unit in range(3)]
        states = [
            ON_ITS_WAY if flat.gather_handle else whole[unit] if flat.full.untyped_storage().nbytes() else FREED
            for unit, flat in enumerate(ddp.flats)
        ]
        if performed or states != events[-1][3]:
            events.append((method, unit, performed, states))

    def watch(values: Any, function: Any) -> None:
        call_in_backward(values, lambda: (function(), note(function.func.__name__, *function.args)))

    class Watched(fully_sharded.FullyShardedDDP):
        def end_pass(self, phase: Any) -> None:
            is_backward = self.phase is fully_sharded.Phase.BACKWARD
            super().end_pass(phase)
            if is_backward:
                note("end_pass", 0)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_sharded.call_in_backward = watch
    try:
        layers = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)), nn.Tanh()
        ddp = Watched(nn.Sequential(*layers), (nn.Sequential,))
        ddp(torch.ones(1, 2)).sum().backward()
    finally:
        fully_sharded.call_in_backward = call_in_backward
        dist.destroy_process_group()
    return events


def draw_backward_hooks(path: Path) -> None:
    """Draw the hooks of a backward of module 11, and what each of them does, from left to right."""
    tensors = {
        ("pre_backward", 0): "model's output",
        ("pre_backward", 2): "y, output of unit 2",
        ("pre_backward", 1): "x, output of unit 1",
        ("leave", 1): "input of unit 1",
        ("end_pass", 0): "(end of backward)",
    }
    events = record_hooks()
    figure, axes = make_axes(3.6, ["hook on", "calls", "performs", "root", "unit 2", "unit 1"], len(events))
    for column, (method, unit, performed, states) in enumerate(events):
        left, right = column + 0.03, column + 0.97
        draw_box(axes, left, right, 0, tensors[method, unit], "white")
        draw_box(axes, left, right, 1, "end_pass" if method == "end_pass" else f"{method}({unit})", LIGHT_ORANGE)
        draw_box(axes, left, right, 2, ", ".join(f"{a} {u}" for a, u in performed), "white", linewidth=0)
        for row, number in ((3, 0), (4, 2), (5, 1)):
            draw_box(axes, left, left + 0.1, row, "", **SHARD)
            draw_box(axes, left + 0.13, right, row, "", **states[number])
    draw_legend(figure, STATES)
    save(figure, path)


# ---- module 12: who waits for whom when one rank runs out of data

BATCHES = (5, 3, 4)  # of each rank


def draw_waiting(path: Path) -> None:
    """Draw three ranks with unequal data: in a loop over their own data, and in one that ends everywhere at once."""
    size, steps = len(BATCHES), max(BATCHES)
    rows = [f"{'own loop' if number < size else 'lockstep'}, rank {number % size}" for number in range(2 * size)]
    figure, axes = make_axes(3.4, rows, steps + 1.0)
    axes.set_ylim(2 * size - 0.1, -0.7)
    styles = {
        "a step with a batch": {"colour": LIGHT_BLUE},
        "a step with 0 tokens": {"colour": LIGHT_ORANGE, "hatch": "//"},
        "waits forever": {"colour": GREY, "hatch": "xx"},
    }
    batch, nothing, waiting = styles.values()
    for row in range(2 * size):
        count, is_lockstep = BATCHES[row % size], row >= size
        shift = 0.5 * is_lockstep  # a gap between the two loops
        for step in range(count if is_lockstep else min(BATCHES)):
            draw_box(axes, step + 0.04, step + 0.96, row + shift, f"step {step + 1}", **batch)
        if is_lockstep:
            for step in range(count, steps):
                draw_box(axes, step + 0.04, step + 0.96, row + shift, f"step {step + 1}", **nothing)
            axes.text(steps + 0.5, row + shift, "all have ended", ha="center", va="center", fontsize=FONT)
        elif count > min(BATCHES):
            draw_box(axes, min(BATCHES) + 0.04, min(BATCHES) + 0.5, row, "step 4", **batch)
            draw_box(axes, min(BATCHES) + 0.5, steps + 1.0, row, "waits for rank 1's all-reduce", **waiting)
        else:
            axes.text(count + 0.1, row, "has no data left and leaves the loop", va="center", fontsize=FONT)
    axes.set_yticks([row + 0.5 * (row >= size) for row in range(2 * size)], rows, fontsize=FONT)
    draw_legend(figure, styles)
    save(figure, path)


def draw_grid(path: Path) -> None:
    """Draw the ranks of two nodes as a grid: rows are shard groups, and columns are replica groups."""
    nodes, columns = plan_grid(8, 4)
    figure, axes = make_axes(3.0, [f"node {number}" for number in range(len(nodes))], len(columns))
    colours = (LIGHT_BLUE, LIGHT_ORANGE, GREEN, GREY)
    for row, ranks in enumerate(nodes):
        frame = Rectangle((0.03, row - 0.4), len(ranks) - 0.06, 0.8, fill=False, edgecolor=BLUE, linewidth=2)
        axes.add_patch(frame)
        for shard, rank in enumerate(ranks):
            style = {"colour": colours[shard], "height": 0.5}
            draw_box(axes, shard + 0.14, shard + 0.86, row, f"rank {rank}: shard {shard}", **style)
    for shard in range(len(columns)):
        style = {"arrowstyle": "<->", "color": "black", "linewidth": 2.5}
        axes.annotate("", (shard + 0.5, 0.27), (shard + 0.5, 0.73), arrowprops=style)
    styles = {
        "shard group: weights and gradients, fast link": {"colour": "white", "edgecolor": BLUE, "linewidth": 2},
        "replica group: gradients of a shard, slow link": {"colour": "black"},
    }
    draw_legend(figure, styles)
    save(figure, path)


# ---- module 15: the buffers of three groups, whose rows contain whole matrices

LLAMA = [(4, 4), (4, 4), (1, 4), (1, 4), (14, 4), (14, 4), (4, 14)]  # a layer of Llama 3 8B, in units of 1024


def draw_groups(path: Path) -> None:
    """Draw which matrices of two layers travel together, and the padding of their rows."""
    shapes, num_ranks, num_groups = LLAMA * 2, 4, 3
    numels = [rows * columns for rows, columns in shapes]
    groups = plan_groups(shapes, assign_matrices(shapes, num_ranks), num_ranks, num_groups)
    lengths = [max(sum(numels[i] for i in row) for row in rows) for rows in groups]
    names = [f"group {k}, rank {rank}" for k in range(len(groups)) for rank in range(num_ranks)]
    figure, axes = make_axes(4.6, names, max(lengths))
    axes.set_ylim(len(names) + 0.4, -0.6)
    styles = {
        "4096 × 4096: 16 units": {"colour": BLUE},
        "14336 × 4096 or 4096 × 14336: 56": {"colour": LIGHT_BLUE},
        "1024 × 4096: 4": {"colour": ORANGE},
        "padding": PADDING,
    }
    kinds = dict(zip((16, 56, 4), styles))
    for k, rows in enumerate(groups):
        for rank, row in enumerate(rows):
            start, y = 0, k * (num_ranks + 0.3) + rank
            for i in row:
                draw_box(axes, start, start + numels[i], y, str(i), **styles[kinds[numels[i]]])
                start += numels[i]
            if start < lengths[k]:
                draw_box(axes, start, lengths[k], y, "", **PADDING)
    axes.set_yticks([k * (num_ranks + 0.3) + r for k in range(len(groups)) for r in range(num_ranks)], names)
    draw_legend(figure, styles)
    save(figure, path)


def draw_idea(path: Path) -> None:
    """Draw a step of modules 1, 2 and 4 by the α–β model: each waits less for the same communication."""
    link, numel, count, backward = Link(1e-3, 1e9), 1e8, 40, 0.12
    rows = {"one message per\nparameter, afterwards": (40, False), "one message,\nafterwards": (1, False)}
    rows["buckets,\nduring backward"] = (5, True)
    figure, axes = make_axes(2.6, [*rows], 0.45, inches=5.6)  # legible on a phone, too
    styles = {"computing": {"colour": BLUE}, "waiting for messages": {"colour": ORANGE, "hatch": "//"}}
    for row, (launches, overlaps) in enumerate(rows.values()):
        work = [Compute("backward", backward / count)] * count
        calls = [Launch("all_reduce", numel / launches, ())] * launches
        size = count // launches
        parts = [[*work[k * size : k * size + size], call] for k, call in enumerate(calls)]
        steps = sum(parts, []) if overlaps else [*work, *calls]
        end = simulate([Compute("forward", 0.06), *steps, *map(Wait, range(launches))], link).end_s
        computed = 0.06 + backward
        draw_box(axes, 0, computed, row, "computing", **styles["computing"])
        draw_box(axes, computed, end, row, "", **styles["waiting for messages"])
        axes.text(end + 0.004, row, f"{1e3 * end:.0f} ms", va="center", fontsize=FONT + 3, fontweight="bold")
    draw_legend(figure, styles)
    save(figure, path)


def draw_places(path: Path) -> None:
    """Draw the three places of a tensor, and the four conversions between them with what a rank sends."""
    figure, axes = make_axes(2.8, [], 9)
    axes.set_ylim(2.5, -0.5)
    for start, row, text, colour in (
        (0, 1, "partial: a summand", LIGHT_ORANGE),
        (3.2, 2, "sharded: 1/N", GREEN),
        (6.4, 1, "replicated: all of it", LIGHT_BLUE),
    ):
        draw_box(axes, start, start + 2.6, row, text, colour, height=0.5)
    for start, end, text, x, y, side in (
        ((1.3, 0.73), (7.7, 0.73), "all-reduce: 2(N − 1)/N · S", 4.5, 0.22, "center"),
        ((1.3, 1.28), (3.15, 2.0), "reduce-scatter:\n(N − 1)/N · S", 1.9, 1.97, "right"),
        ((5.85, 2.1), (7.9, 1.28), "all-gather:\n(N − 1)/N · S", 7.4, 1.97, "left"),
        ((6.35, 1.0), (4.5, 1.72), "keep your own part: 0", 4.6, 1.1, "center"),
    ):
        bend = "arc3,rad=-0.25" if text.startswith("all-reduce") else "arc3"
        style = {"arrowstyle": "-|>", "color": EDGE, "linewidth": 2, "connectionstyle": bend}
        axes.annotate("", end, start, arrowprops=style)
        axes.text(x, y, text, ha=side, va="center", fontsize=FONT)
    save(figure, path)


STANDALONE = [  # the file, and the function that draws it
    (ROOT / "docs" / "idea.png", draw_idea),  # on the site's start page
    (ROOT / "lessons" / "capstone" / "places.png", draw_places),
]
DIAGRAMS = [  # module number, name of the file, function that draws it
    (0, "ring", draw_ring),
    (3, "hooks", draw_hooks),
    (3, "streams", draw_streams),
    (4, "queue", draw_queue),
    (5, "layout", draw_layout),
    (8, "pieces", draw_pieces),
    (11, "units", draw_units),
    (11, "flat_shard", draw_flat_shard),
    (11, "hooks", draw_backward_hooks),
    (12, "waiting", draw_waiting),
    (14, "grid", draw_grid),
    (15, "groups", draw_groups),
]
