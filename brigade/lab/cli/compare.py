"""The comparison that `brigade check` shows when a module passes."""

from __future__ import annotations

from brigade.course.cli.console import console
from brigade.course.table.listing import find_part
from brigade.course.table.modules import ROOT, Module, get_module
from brigade.course.table.submission import find, read
from brigade.lab.experiment import show_progress
from brigade.ranks.runner.ranks import RankFailure
from brigade.ranks.texts import Sources


def compare(entry: Module, sources: Sources) -> bool:
    """Print the comparison with the previous module, or the reason why it failed. Return whether it succeeded.

    With --prior reference, `sources` lack a previous module that this one does not import: take the reference's.
    """
    from brigade.lab import comparison

    previous = get_module(entry.number - 1)
    is_missing = previous.is_core and f"{previous.package}.{previous.name}" not in sources
    if is_missing and find(ROOT / "solutions", previous):
        sources = read("solutions", previous.number) | sources
    try:
        with show_progress("training steps", comparison.count_steps(entry)) as advance:
            results = comparison.compare_with_previous(entry, sources, advance)
    except RankFailure as failure:
        if find_part(failure):  # of the previous module, which is not written yet
            return False
        why = f"The comparison of step times failed: {failure.summary}."
        if failure.kind == "deadline":
            why = f"The comparison of step times was {failure.summary}."
        again = f"The next `brigade check {entry.number}` tries again."
        console.print(f"  Your points are safe. {why} {again}\n", markup=False)
        return False
    console.print(comparison.make_table(results, previous=entry.number - 1))
    console.print()
    if doubts := comparison.describe_doubts(results):
        console.print(doubts + "\n", markup=False)
    return True
