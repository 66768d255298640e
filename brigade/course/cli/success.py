"""When a module passes, `brigade check` records it, compares it with the previous module, and names next steps."""

from __future__ import annotations

from pathlib import Path

from brigade.course.cli.console import console
from brigade.course.cli.progress_file import find_state, recall, remember
from brigade.course.table.listing import find_part
from brigade.course.table.modules import CORE_MODULES, ROOT, Module, get_module
from brigade.course.table.submission import find, read
from brigade.ranks.runner.ranks import RankFailure
from brigade.ranks.texts import Sources


def handle_success(entry: Module, sources: Sources, key: str, target: Path, show: bool) -> None:
    """Remember that these sources pass: `key` is their fingerprint.

    The first time, compare with the previous module and show the next steps. A comparison that did not finish is tried
    again the next time.
    """
    news = key != recall("passed").get(entry.package)
    remember("passed", entry.package, key)
    if show and entry.is_core and key != recall("compared").get(entry.package) and compare(entry, sources):
        remember("compared", entry.package, key)
    for sentence in list_next_steps(entry, target) if show and news else ():
        console.print(sentence, markup=False)


def compare(entry: Module, sources: Sources) -> bool:
    """Print the comparison with the previous module, or the reason why it failed. Return whether it succeeded.

    With --prior reference, `sources` lack a previous module that this one does not import: take the reference's.
    """
    from brigade.lab import comparison
    from brigade.lab.experiment import show_progress

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


def list_next_steps(entry: Module, target: Path) -> list[str]:
    """Return sentences on what a student can do after passing a module, or after completing the core."""
    sentences = []
    if entry.is_core and all(find_state(other, target) == "passes" for other in CORE_MODULES):
        sentences += [
            f"Module {entry.number} is done, and with it the core: all {len(CORE_MODULES)} modules pass. Well done!",
            "`brigade bench --comm-ratio 0.8 --save` compares them with torch. The written questions are in "
            "`answers.md` beside each module. `brigade submit` creates the zip file to hand in.",
        ]
    else:
        sentences.append(f"Module {entry.number} is done. `brigade next` shows what comes next.")
    return sentences
