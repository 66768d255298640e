"""When a module passes, `brigade check` records it, compares it with the previous module, and names next steps."""

from __future__ import annotations

from pathlib import Path

from brigade.course.cli.commands import load_tables
from brigade.course.cli.console import console
from brigade.course.cli.progress_file import find_state, recall, remember
from brigade.course.cli.study import read_hints, recall_shown
from brigade.course.table.modules import CORE_MODULES, Module
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
    """Let the lab compare the module with the previous one, if the lab is installed. Return whether that succeeded."""
    return all(table.compare(entry, sources) for table in load_tables() if hasattr(table, "compare"))


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
    shown = recall_shown(entry)
    if unread := [part for part in read_hints(entry)[1] if part not in shown]:
        sentences.append(
            f"You needed no hints for {', '.join(unread)}. They show how we would begin; compare your code: "
            f"`brigade hint {entry.number} {unread[0]}`."
        )
    return sentences
