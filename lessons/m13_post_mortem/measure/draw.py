"""Draw the calls of all ranks side by side: python lessons/m13_post_mortem/measure/draw.py dump_*.json

Each row is a rank, and each column a number of the group that `find_divergence` names. The picture is written to
`calls.png` in the directory of the first dump.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a directory of modules that comes before goes first
from m13_post_mortem.post_mortem import diagnose, load_trace
from m13_post_mortem.words import contents


def draw(paths: list[str], out: Path) -> None:
    """Draw the traces of these dumps: equal calls have the same colour, and the place of the finding has a frame."""
    traces = sorted(map(load_trace, paths), key=lambda trace: trace.rank)
    finding = diagnose(traces)
    group = finding.group or next((call.group for trace in traces for call in trace.calls), None)
    if group is None:
        sys.exit("these dumps contain no call")
    rows = [[call for call in trace.calls if call.group == group][-12:] for trace in traces]
    kinds = list(dict.fromkeys(contents(call) for row in rows for call in row))
    numbers = sorted({call.number for row in rows for call in row})
    figure, axes = plt.subplots(figsize=(1.6 + 1.25 * len(numbers), 1.3 + 0.6 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        for call in row:
            colour = plt.get_cmap("Pastel1")(kinds.index(contents(call)) % 9)
            axes.barh(place, 0.92, 0.7, call.number - 0.46, color=colour, edgecolor="grey")
            size = " ".join("×".join(map(str, shape)) for shape in call.sizes)
            axes.text(call.number, place, f"{call.op}\n{size}", ha="center", va="center", fontsize=11)
    if finding.number is not None:
        axes.axvspan(finding.number - 0.5, finding.number + 0.5, fill=False, edgecolor="black", linewidth=2)
    axes.set(
        xlim=(numbers[0] - 0.6, numbers[-1] + 0.6),
        xticks=numbers,
        xlabel=f"number of the call in group {group}",
        yticks=range(len(traces)),
        yticklabels=[f"rank {trace.rank}" for trace in traces],
    )
    axes.invert_yaxis()
    figure.savefig(out, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python draw.py dump_0.json dump_1.json ...")
    target = Path(sys.argv[1]).parent / "calls.png"
    draw(sys.argv[1:], target)
    print(f"{target} written")
