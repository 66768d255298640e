"""The commands of students, and what describes a command.

Each house that has commands has such a table, in `cli/commands.py`. It is found by this name, so no installation has to
know it: the commands work in a copy of the course that Python was only pointed to, and after `git pull`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import brigade


@dataclass(frozen=True)
class Command:
    """A command. Its file has `run_NAME(options)` and `add_NAME_arguments(parser)`.

    The file is imported only when the command is used, so that each command imports only what it needs.
    """

    name: str
    file: str  # the full name of a module
    summary: str
    example: str

    def load(self) -> ModuleType:
        return import_module(self.file)


PLACE = "brigade.course.cli"
COMMANDS = (
    Command("init", f"{PLACE}.edition", "Write the course to a new directory.", "brigade init my-course"),
    Command("update", f"{PLACE}.edition", "Renew a course, and keep your work.", "brigade update my-course"),
    Command("check", f"{PLACE}.check", "Run the checks of one module or of all modules.", "brigade check 3 --watch"),
    Command("next", f"{PLACE}.check", "Show what to do next.", "brigade next"),
    Command("hint", f"{PLACE}.own_work", "Show the next hint for a part of a module.", "brigade hint 3"),
    Command("reset", f"{PLACE}.own_work", "Restore a module's skeleton, and keep your version beside it.",
            "brigade reset 3"),
    Command("submit", f"{PLACE}.own_work", "Create the zip file that you hand in, in the current directory.",
            "brigade submit"),
    Command("post-mortem", f"{PLACE}.post_mortem",
            "Name the rank that broke a job, from the flight recorders of its ranks.", "brigade post-mortem dumps"),
    Command("break", f"{PLACE}.mistake", "Put a known mistake into a copy of a module that passes.",
            "brigade break 3"),
)  # fmt: skip


def load_tables() -> list[ModuleType]:
    """Return the tables of commands of all houses that are here."""
    places = Path(brigade.__path__[0]).glob("*/cli/commands.py")
    return [import_module(f"brigade.{house}.cli.commands") for house in sorted(path.parts[-3] for path in places)]
