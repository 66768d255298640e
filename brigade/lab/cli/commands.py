"""The commands of the lab: see `brigade/course/cli/commands.py`."""

from brigade.course.cli.commands import Command
from brigade.course.table.modules import Module
from brigade.ranks.texts import Sources

PLACE = "brigade.lab.cli"
COMMANDS = (
    Command("bench", f"{PLACE}.lab", "Compare all core modules with torch in one run.",
            "brigade bench --comm-ratio 0.8"),
    Command("trace", f"{PLACE}.lab", "Draw one training step of a module as a timeline.", "brigade trace 4"),
    Command("score", f"{PLACE}.score", "Score a module that passes, on three fixed problems.", "brigade score 8"),
    Command("plan", f"{PLACE}.plan", "Predict step time, launches and memory.",
            "brigade plan --model gpt3-175b --dp 1024"),
)  # fmt: skip


def compare(entry: Module, sources: Sources) -> bool:
    """Print the comparison that `brigade check` shows when a module passes. Return whether it succeeded."""
    from brigade.lab.cli import compare

    return compare.compare(entry, sources)
