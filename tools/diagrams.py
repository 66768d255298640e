"""The concept diagrams of the readings. Most examples are computed by the solutions' own functions.

    draw_layout(Path("out/layout.png"))

The colours are from Okabe and Ito's palette. Labels, hatches and frames repeat what the colours show, so the diagrams
also work in greyscale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from brigade.course.modules import ROOT, get_module
from brigade.lab.plots import COLOURS
from brigade.lab.program import Compute, Launch, Wait, simulate
from brigade.rank.emulated_link import Link
from solutions.m04_bucketed_ddp.bucketed_ddp import LaunchQueue
from solutions.m05_grad_buffer.grad_buffer import BufferLayout, plan_layout
from solutions.m11_fully_sharded.plan import plan_schedule
from solutions.m14_hybrid_sharded.hybrid_sharded import plan_grid
from solutions.m15_sharded_muon.sharded_muon import assign_matrices, plan_groups

BLUE, LIGHT_BLUE, ORANGE, LIGHT_ORANGE, GREEN, GREY = "#0072b2", "#8fcdf0", "#e69f00", "#f6d58d", "#009e73", "#e0e0e0"
EDGE = "#555555"
INK = {BLUE: "white", GREEN: "white"}  # text on other colours is black
FONT = 10  # points, at a width of 900 pixels

Style = dict[str, Any]  # the colour, and further options of the rectangle

# The example of module 5's reading. `NUMELS` are the sizes of the parameters in elements, in the buffer's order.
NUMELS, BUCKET_NUMEL, NUM_RANKS = (100, 30, 200, 50), 150, 2
RANK_STYLES: tuple[Style, ...] = ({"colour": LIGHT_BLUE}, {"colour": ORANGE, "hatch": "//"})
PADDING: Style = {"colour": GREY, "hatch": "xx"}
SHARD: Style = {"colour": GREEN}
FREED: Style = {"colour": "white", "linestyle": "--"}
ON_ITS_WAY: Style = {"colour": LIGHT_ORANGE, "hatch": "//"}
WHOLE: Style = {"colour": LIGHT_BLUE}
COMPUTING: Style = {"colour": LIGHT_BLUE, "edgecolor": "black", "linewidth": 2.5}
STATES = {
    "own shard": SHARD,
    "freed": FREED,
    "being gathered": ON_ITS_WAY,
    "full weights": WHOLE,
    "full weights, computing": COMPUTING,
}


@contextmanager
def diagram(
    path: Path,
    height: float,
    rows: Sequence[str],
    width: float,
    legend: dict[str, Style] | None = None,
    inches: float = 9,
) -> Iterator[Axes]:
    """Yield axes with one row for each label in `rows`, from top to bottom. Then write them as a PNG file.

    `height` and `inches`, the width of the picture, are in inches. Each row has height 1 on the y axis, and x ranges
    from 0 to `width`. The legend below contains a box and a name for each style.
    """
    figure = Figure(figsize=(inches, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(-0.004 * width, 1.004 * width)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), rows, fontsize=FONT)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    yield axes
    if legend:
        handles = []
        for name, style in legend.items():
            others = {key: value for key, value in style.items() if key != "colour"}
            handles.append(Patch(facecolor=style["colour"], label=name, **{"edgecolor": EDGE} | others))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=FONT)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def draw_box(axes: Axes, start: float, end: float, row: float, text: object, colour: str, **style: Any) -> None:
    """Draw a box with text in the middle. `style` contains additional options for the rectangle."""
    style = {"edgecolor": EDGE, "linewidth": 0.8, "height": 0.76} | style
    axes.add_patch(Rectangle((start, row - style["height"] / 2), end - start, facecolor=colour, **style))
    if text != "":
        plate = {"facecolor": colour, "edgecolor": "none", "pad": 1} if "hatch" in style else None
        write(axes, (start + end) / 2, row, text, ha="center", color=INK.get(colour, "black"), bbox=plate)


def write(axes: Axes, x: float, y: float, text: object, **style: Any) -> None:
    """Write text, with its vertical centre at y."""
    axes.text(x, y, text, **{"va": "center", "fontsize": FONT} | style)


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], arrow: str, **style: Any) -> None:
    """Draw an arrow, such as "->" or "<->", between two points."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": arrow, "color": "black"} | style)


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
    """Draw the chunks of all ranks before a ring all-reduce and after each of its steps."""
    states = list_ring_states(size)
    rows = [*(f"rank {rank}" for rank in range(size)), "chunk"]
    with diagram(path, 3.1, rows, len(states) * (size + 1.0) - 1) as axes:
        axes.set_ylim(size + 0.4, -2.4)
        for column, state in enumerate(states):
            left = column * (size + 1.0)
            for rank in range(size):
                for chunk, count in enumerate(state[rank]):
                    place = left + chunk, left + chunk + 1, rank
                    colour = BLUE if count == size else LIGHT_BLUE if count > 1 else "white"
                    draw_box(axes, *place, count, colour, height=1, edgecolor="#777777", linewidth=1)
                    if column and (rank - column - 1) % size == chunk:  # this chunk has arrived in this step
                        frame = {"edgecolor": COLOURS["collective"], "linewidth": 3, "fill": False, "height": 0.84}
                        draw_box(axes, place[0] + 0.08, place[1] - 0.08, rank, "", "none", **frame)
            write(axes, left + size / 2, -0.85, f"step {column}" if column else "before", ha="center")
            for chunk in range(size):
                write(axes, left + chunk + 0.5, size, chunk, ha="center", color=EDGE)
        for first, name in (
            (1, "ring_reduce_scatter: add the received chunk"),
            (size, "ring_all_gather: copy the received chunk"),
        ):
            start, end = first * (size + 1.0), (first + size - 1) * (size + 1.0) - 1
            axes.plot([start, end], [-1.5, -1.5], color="#777777", linewidth=1)
            write(axes, (start + end) / 2, -1.9, name, ha="center")


# ---- module 3: hooks and streams


def draw_hooks(path: Path) -> None:
    """Draw when autograd calls the two kinds of hooks of a parameter, and what is in its gradient then."""
    with diagram(path, 2.5, ["autograd", "your hook", "parameter.grad"], 4, inches=7) as axes:
        for start, end, row, text, colour in (
            (0.03, 0.97, 0, "backward of\nthe layer", LIGHT_BLUE),
            (1, 2, 1, "register_hook:\nf(2)", LIGHT_ORANGE),
            (2.03, 2.97, 0, "Accumulate-\nGrad", LIGHT_BLUE),
            (3, 4, 1, "post-accumulate:\nf(parameter)", ORANGE),
            (0, 2.5, 2, "1, from the first micro-batch", "white"),
            (2.5, 4, 2, "1 + 2 = 3", LIGHT_BLUE),
        ):
            draw_box(axes, start, end, row, text, colour)
        for start, end, text in ((0.97, 2.03, "gradient 2"), (2.97, 4, "done")):
            draw_arrow(axes, (start, 0), (end, 0), "->", color=EDGE)
            write(axes, (start + end) / 2, -0.1, text, ha="center", va="bottom")


def draw_streams(path: Path) -> None:
    """Draw an asynchronous all-reduce on a GPU: what the CPU queues, and which stream waits for which event."""
    waiting = {"colour": GREY, "hatch": "//"}
    with diagram(path, 3.4, ["CPU", "compute\nstream", "NCCL's\nstream"], 7.6, inches=7) as axes:
        for column, text in enumerate(("backward", "all_\nreduce", "wait()", "divide")):
            draw_box(axes, column, column + 1, 0, text, LIGHT_BLUE)
        write(axes, 4.15, 0, "runs ahead without waiting")
        draw_box(axes, 1, 3.2, 1, "backward", BLUE)
        draw_box(axes, 3.2, 6, 1, "waits", **waiting)
        draw_box(axes, 6, 7.5, 1, "divide", BLUE)
        draw_box(axes, 1, 3.2, 2, "waits", **waiting)
        draw_box(axes, 3.2, 6, 2, "all-reduce", ORANGE)
        for x, start, end, text in (
            (3.2, 1.38, 1.62, "event: gradient is ready "),
            (6, 1.62, 1.38, "event: sum is ready "),
        ):
            draw_arrow(axes, (x, start), (x, end), "-|>", lw=1.8)
            write(axes, x - 0.05, 1.5, text, ha="right")
        axes.annotate("time", (7.5, 2.55), (6.4, 2.55), va="center", fontsize=FONT, arrowprops={"arrowstyle": "->"})
        axes.set_ylim(2.7, -0.5)


# ---- module 4: from the hook to the launch

READY = (5, 3, 2, 4, 1, 0)  # parameters, in the order in which their gradients become ready on this rank
BUCKETS = ((5, 4), (3, 2), (1, 0))


def draw_queue(path: Path) -> None:
    """Draw the launch queue after each hook of a backward pass in which bucket 1 is complete before bucket 0."""
    launched: list[int] = []
    names = [f"bucket {index}: " + ", ".join(f"p{i}" for i in bucket) for index, bucket in enumerate(BUCKETS)]
    queue = LaunchQueue([len(bucket) for bucket in BUCKETS], launched.append)
    with diagram(path, 3.4, ["hook of", *names, "launches"], len(READY)) as axes:
        for column, parameter in enumerate(READY):
            of_gradient = next(index for index, bucket in enumerate(BUCKETS) if parameter in bucket)
            before = len(launched)
            queue.mark_ready(of_gradient)
            draw_box(axes, column + 0.28, column + 0.72, 0, f"p{parameter}", "white", height=0.5)
            for index, pending in enumerate(queue.num_pending):
                style: Style = {"edgecolor": "black", "linewidth": 2.5} if index == of_gradient else {}
                text, colour = f"{pending} pending", "white"
                if index < queue.next_to_launch:
                    text, colour = "launched", ORANGE if index >= before else LIGHT_ORANGE
                elif not pending:
                    text, colour, style = "complete,\nwaits", LIGHT_BLUE, style | {"hatch": "//"}
                draw_box(axes, column + 0.05, column + 0.95, index + 1, text, colour, **style)
            if new := launched[before:]:
                text = "\n".join(f"all-reduce {index}" for index in new)
                draw_box(axes, column + 0.05, column + 0.95, len(BUCKETS) + 1, text, ORANGE)


# ---- modules 5 and 8: the buffer

LAYOUT = plan_layout(list(NUMELS), BUCKET_NUMEL, NUM_RANKS)


def draw_buffer(axes: Axes, layout: BufferLayout) -> None:
    """Draw the parameters and the padding in the first row. The x axis counts the elements of the buffer."""
    edges = [0, *(edge for pair in layout.param_ranges for edge in pair), layout.numel]
    for i, (start, end) in enumerate(layout.param_ranges):
        draw_box(axes, start, end, 0, f"p{i}", BLUE)
    for start, end in zip(edges[2::2], edges[3::2]):
        draw_box(axes, start, end, 0, "", **PADDING)
    axes.set_xticks(sorted({edge for pair in (*layout.param_ranges, *layout.bucket_ranges) for edge in pair}))
    axes.tick_params(axis="x", labelsize=9, length=3)
    axes.set_xlabel("element of the buffer", fontsize=FONT)
    for _, end in layout.bucket_ranges[:-1]:
        axes.axvline(end, color=EDGE, linewidth=1, linestyle=":", zorder=0)


def list_shards(layout: BufferLayout) -> list[tuple[int, int, int, int]]:
    """Return (bucket, rank, start, end) of each rank's shard of each bucket."""
    shards = []
    for bucket, (start, end) in enumerate(layout.bucket_ranges):
        length = (end - start) // NUM_RANKS
        shards += [(bucket, rank, start + rank * length, start + (rank + 1) * length) for rank in range(NUM_RANKS)]
    return shards


def draw_layout(path: Path) -> None:
    """Draw a buffer of module 5: parameters, padding, buckets, and the shards of the ranks."""
    with diagram(path, 2.7, ["parameters", "buckets", "shards"], LAYOUT.numel, {"padding": PADDING}) as axes:
        draw_buffer(axes, LAYOUT)
        for index, (start, end) in enumerate(LAYOUT.bucket_ranges):
            draw_box(axes, start, end, 1, f"bucket {index}", LIGHT_ORANGE)
        for _, rank, start, end in list_shards(LAYOUT):
            draw_box(axes, start, end, 2, f"rank {rank}", **RANK_STYLES[rank])


def draw_pieces(path: Path) -> None:
    """Draw the parts of the parameters that each rank's optimizer updates in module 8."""
    rows = ["parameters", *(f"shards of rank {rank}" for rank in range(NUM_RANKS))]
    with diagram(path, 3.0, rows, LAYOUT.numel, {"padding": PADDING}) as axes:
        draw_buffer(axes, LAYOUT)
        for bucket, rank, shard_start, shard_end in list_shards(LAYOUT):
            draw_box(axes, shard_start, shard_end, 1 + rank, "", **PADDING)
            for i, (param_start, param_end) in enumerate(LAYOUT.param_ranges):
                start, end = max(param_start, shard_start), min(param_end, shard_end)
                if LAYOUT.bucket_of[i] == bucket and start < end:
                    text = f"p{i}\n{start - param_start}:{end - param_start}"
                    draw_box(axes, start, end, 1 + rank, text, **RANK_STYLES[rank])


# ---- module 11: gather, compute, free


def draw_units(path: Path) -> None:
    """Draw the state of each unit's weights on one rank, for each action of a forward pass with prefetch=1."""
    num_units = 4
    actions = plan_schedule(num_units, 1, False)
    rows = ["action", "root", *(f"unit {unit}" for unit in range(1, num_units))]
    weights = [FREED] * num_units
    with diagram(path, 3.5, rows, len(actions), STATES) as axes:
        for column, (action, current) in enumerate(actions):
            # Every unit except the root is freed after its computation.
            weights = [(FREED if unit else WHOLE) if now is COMPUTING else now for unit, now in enumerate(weights)]
            weights[current] = ON_ITS_WAY if action == "gather" else COMPUTING
            colour = ORANGE if action == "gather" else BLUE
            draw_box(axes, column + 0.05, column + 0.95, 0, f"{action} {current}", colour, height=0.5)
            for unit, style in enumerate(weights):
                draw_box(axes, column + 0.05, column + 0.19, unit + 1, "", **SHARD)
                draw_box(axes, column + 0.23, column + 0.95, unit + 1, "", **style)


def draw_flat_shard(path: Path) -> None:
    """Draw what refers to the storage of module 11's flat tensor, while its unit is gathered and after it is freed."""
    layout = plan_layout(list(NUMELS), None, NUM_RANKS)
    shards = [f"shard of rank {rank}" for rank in range(NUM_RANKS)]
    rows = ["parameter.data", "saved by autograd", "storage of full", *shards]
    styles = {"a view, without memory of its own": {"colour": "white"}, "full weights": WHOLE, "no memory": FREED}
    with diagram(path, 2.9, rows, 2 * layout.numel + 40, styles | {"its own memory": SHARD}) as axes:
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


def draw_backward_hooks(path: Path) -> None:
    """Draw the hooks of a backward of module 11 with a root and two units, and what each does, from left to right."""
    events = (  # the tensor with the hook, the method, its actions, and then the states of the root, unit 2 and unit 1
        ("model's output", "pre_backward(0)", "gather 2, gather 1", WHOLE, ON_ITS_WAY, ON_ITS_WAY),
        ("y, output of unit 2", "pre_backward(2)", "compute 2", WHOLE, COMPUTING, ON_ITS_WAY),
        ("x, output of unit 1", "pre_backward(1)", "reduce 2, compute 1", WHOLE, FREED, COMPUTING),
        ("input of unit 1", "leave(1)", "reduce 1", WHOLE, FREED, FREED),
        ("(end of backward)", "end_pass", "compute 0, reduce 0", FREED, FREED, FREED),
    )
    rows = ["hook on", "calls", "performs", "root", "unit 2", "unit 1"]
    with diagram(path, 3.6, rows, len(events), STATES) as axes:
        for column, (tensor, method, actions, *states) in enumerate(events):
            left, right = column + 0.03, column + 0.97
            draw_box(axes, left, right, 0, tensor, "white")
            draw_box(axes, left, right, 1, method, LIGHT_ORANGE)
            draw_box(axes, left, right, 2, actions, "white", linewidth=0)
            for row, style in enumerate(states, 3):
                draw_box(axes, left, left + 0.1, row, "", **SHARD)
                draw_box(axes, left + 0.13, right, row, "", **style)


# ---- module 12: who waits for whom when one rank runs out of data

BATCHES = (5, 3, 4)  # of each rank


def draw_waiting(path: Path) -> None:
    """Draw three ranks with unequal data: in a loop over their own data, and in one that ends everywhere at once."""
    size, steps = len(BATCHES), max(BATCHES)
    rows = [f"{'own loop' if number < size else 'lockstep'}, rank {number % size}" for number in range(2 * size)]
    styles = {
        "a step with a batch": {"colour": LIGHT_BLUE},
        "a step with 0 tokens": {"colour": LIGHT_ORANGE, "hatch": "//"},
        "waits forever": {"colour": GREY, "hatch": "xx"},
    }
    batch, nothing, waiting = styles.values()
    with diagram(path, 3.4, rows, steps + 1.0, styles) as axes:
        axes.set_ylim(2 * size - 0.1, -0.7)
        axes.set_yticks([row + 0.5 * (row >= size) for row in range(2 * size)], rows, fontsize=FONT)
        for row, count in enumerate(BATCHES):
            lockstep_row = row + size + 0.5  # below a gap
            for step in range(steps):
                style = batch if step < count else nothing
                draw_box(axes, step + 0.04, step + 0.96, lockstep_row, f"step {step + 1}", **style)
            write(axes, steps + 0.5, lockstep_row, "all have ended", ha="center")
            last = min(BATCHES)
            for step in range(last):
                draw_box(axes, step + 0.04, step + 0.96, row, f"step {step + 1}", **batch)
            if count > last:
                draw_box(axes, last + 0.04, last + 0.5, row, "step 4", **batch)
                draw_box(axes, last + 0.5, steps + 1.0, row, "waits for rank 1's all-reduce", **waiting)
            else:
                write(axes, count + 0.1, row, "has no data left and leaves the loop")


# ---- modules 14 and 15


def draw_grid(path: Path) -> None:
    """Draw the ranks of two nodes as a grid: rows are shard groups, and columns are replica groups."""
    nodes, columns = plan_grid(8, 4)
    frame: Style = {"colour": "white", "edgecolor": BLUE, "linewidth": 2}
    styles = {
        "shard group: weights and gradients, fast link": frame,
        "replica group: gradients of a shard, slow link": {"colour": "black"},
    }
    with diagram(path, 3.0, [f"node {number}" for number in range(len(nodes))], len(columns), styles) as axes:
        for row, ranks in enumerate(nodes):
            draw_box(axes, 0.03, len(ranks) - 0.03, row, "", **frame, height=0.8, fill=False)
            for shard, rank in enumerate(ranks):
                colour = (LIGHT_BLUE, LIGHT_ORANGE, GREEN, GREY)[shard]
                draw_box(axes, shard + 0.14, shard + 0.86, row, f"rank {rank}: shard {shard}", colour, height=0.5)
        for shard in range(len(columns)):
            draw_arrow(axes, (shard + 0.5, 0.73), (shard + 0.5, 0.27), "<->", linewidth=2.5)


LLAMA = [(4, 4), (4, 4), (1, 4), (1, 4), (14, 4), (14, 4), (4, 14)]  # a layer of Llama 3 8B, in units of 1024


def draw_groups(path: Path) -> None:
    """Draw which matrices of two layers travel together, and the padding of their rows."""
    shapes, num_ranks, num_groups = LLAMA * 2, 4, 3
    numels = [rows * columns for rows, columns in shapes]
    groups = plan_groups(shapes, assign_matrices(shapes, num_ranks), num_ranks, num_groups)
    lengths = [max(sum(numels[i] for i in row) for row in rows) for rows in groups]
    places = [k * (num_ranks + 0.3) + rank for k in range(len(groups)) for rank in range(num_ranks)]
    names = [f"group {k}, rank {rank}" for k in range(len(groups)) for rank in range(num_ranks)]
    styles = {
        "4096 × 4096: 16 units": {"colour": BLUE},
        "14336 × 4096 or 4096 × 14336: 56": {"colour": LIGHT_BLUE},
        "1024 × 4096: 4": {"colour": ORANGE},
        "padding": PADDING,
    }
    kinds = dict(zip((16, 56, 4), styles.values()))
    with diagram(path, 4.6, names, max(lengths), styles) as axes:
        axes.set_ylim(len(names) + 0.4, -0.6)
        axes.set_yticks(places, names)
        for y, row, length in zip(places, sum(groups, []), [length for length in lengths for _ in range(num_ranks)]):
            start = 0
            for i in row:
                draw_box(axes, start, start + numels[i], y, i, **kinds[numels[i]])
                start += numels[i]
            if start < length:
                draw_box(axes, start, length, y, "", **PADDING)


# ---- pages without a module


def draw_idea(path: Path) -> None:
    """Draw a step of modules 1, 2 and 4 by the α–β model: each waits less for the same communication."""
    link, numel, count, backward = Link(1e-3, 1e9), 1e8, 40, 0.12
    rows = {"one message per\nparameter, afterwards": (40, False), "one message,\nafterwards": (1, False)}
    rows["buckets,\nduring backward"] = (5, True)
    styles = {"computing": {"colour": BLUE}, "waiting for messages": {"colour": ORANGE, "hatch": "//"}}
    with diagram(path, 2.6, [*rows], 0.45, styles, inches=5.6) as axes:  # legible on a phone, too
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
            write(axes, end + 0.004, row, f"{1e3 * end:.0f} ms", fontsize=FONT + 3, fontweight="bold")


def draw_places(path: Path) -> None:
    """Draw the three places of a tensor, and the four conversions between them with what a rank sends."""
    with diagram(path, 2.8, [], 9) as axes:
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
            draw_arrow(axes, start, end, "-|>", color=EDGE, linewidth=2, connectionstyle=bend)
            write(axes, x, y, text, ha=side)


DIAGRAMS = {
    ROOT / "docs" / "idea.png": draw_idea,  # on the site's start page
    ROOT / "lessons" / "capstone" / "places.png": draw_places,
    **{
        get_module(number).lesson / f"{name}.png": draw_diagram
        for number, name, draw_diagram in (
            ("0", "ring", draw_ring),
            ("3", "hooks", draw_hooks),
            ("3", "streams", draw_streams),
            ("4", "queue", draw_queue),
            ("5", "layout", draw_layout),
            ("8", "pieces", draw_pieces),
            ("11", "units", draw_units),
            ("11", "flat_shard", draw_flat_shard),
            ("11", "hooks", draw_backward_hooks),
            ("12", "waiting", draw_waiting),
            ("14", "grid", draw_grid),
            ("15", "groups", draw_groups),
        )
    },
}
