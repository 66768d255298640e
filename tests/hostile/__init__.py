"""Submissions that attack the grader, and the score that each of them must get.

`tests/grader/test_hostile.py` grades them, as an unprivileged user only: several would end everything that the user
who runs them owns.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brigade.course.table.modules import ROOT, get_module, select_modules
from brigade.ranks.sandbox.users import FIRST_UID

MODULE_1 = get_module(1)
SOME = ("test_gradients_are_averaged", "test_one_all_reduce_per_parameter")  # of module 1's checks: 3 points
ONE = SOME[:1]  # 2 points
ALL = ()
# The text goes on only where it can do no harm.
GUARD = f"""
import os
if not {FIRST_UID} <= os.getuid() < {FIRST_UID + 1000}:
    raise SystemExit("not confined")
"""


@dataclass(frozen=True)
class Hostile:
    """A directory, or a zip, that is handed in.

    `make` fills an empty directory. If it is None, the directory has module 1's right answer with `evil` after it.
    Graded on the `checks` of `modules` (ALL of them, or those that are named) within `limit_s` seconds, it gets `score`
    points, and the first check that fails says `told`.
    """

    name: str
    make: Callable[[Path], None] | None
    score: int
    told: str = ""
    modules: tuple[int, ...] = (1,)
    checks: tuple[str, ...] = SOME
    limit_s: float = 60.0
    is_long: bool = False  # it takes several seconds, and runs with --everything
    evil: tuple[str, ...] = ()  # an attack that finds nothing, and changes nothing. Alone, it runs with --everything

    @property
    def is_extended(self) -> bool:
        """Whether the case runs only with --everything."""
        return self.is_long or bool(self.evil)

    def write(self, directory: Path) -> None:
        """Write the submission into an empty directory."""
        (self.make or reference(*self.evil))(directory)


def quote(path: str, text: str = "") -> str:
    """Return the text, or the path, after checking that the file of the course contains it. Attacks look for it."""
    if text not in (ROOT / path).read_text():
        raise ValueError(f"{path} no longer contains {text!r}, for which an attack looks")
    return text or path


def reference(*evil: str, number: int = 1) -> Callable[[Path], None]:
    """Write the right answers up to module `number`, the last one with `evil` after it."""

    def make(directory: Path) -> None:
        for entry in select_modules(f"0-{number}"):
            for path in entry.paths:
                is_evil = path == get_module(number).path
                text = (ROOT / "solutions" / path).read_text()
                write(directory / path, text + guard_text(*evil) if is_evil else text)

    return make


def skeleton(*evil: str) -> Callable[[Path], None]:
    """Write module 1's skeleton with `evil` after it."""
    return files({1: (ROOT / "lessons" / MODULE_1.path).read_text() + guard_text(*evil)})


def alone(*evil: str, numbers: tuple[int, ...] = (1,)) -> Callable[[Path], None]:
    """Write modules that contain only `evil`, in which NAME is the module's class."""
    return files({number: guard_text(*evil).replace("NAME", get_module(number).public[-1]) for number in numbers})


def guard_text(*evil: str) -> str:
    """Return the text of an attack, which refuses to run outside of the grader's sandbox."""
    return GUARD + "\n".join(map(textwrap.dedent, evil)) + "\n"


def files(texts: dict[int, str]) -> Callable[[Path], None]:
    """Write the modules with these texts, by number."""

    def make(directory: Path) -> None:
        for number, text in texts.items():
            write(directory / get_module(number).path, text)

    return make


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def parse(names: dict[str, Any], text: str, defaults: str = "", last: str = "") -> list[Hostile]:
    """Return the cases of a text, each with a header "=== NAME | SCORE | TOLD | OPTIONS" above its attack.

    The options, after the `defaults` of all cases, are the arguments of `Hostile`, "skeleton" or "alone" if the attack
    does not follow the reference, "long", "together" if it may run after others in one submission, and names of texts
    that come before it. Words in capitals are values in `names`.
    A header may continue after a "|". `last` is the last statement of all attacks.
    """
    cases = []
    for part in re.split("^=== ", text, flags=re.MULTILINE)[1:]:
        header, _, attack = re.sub(r"\|\n", "|", part).partition("\n")
        name, score, told, options = (field.strip() for field in (header + "|||").split("|")[:4])
        options = f"{defaults} {options}".split()
        words = [word for word in options if "=" not in word]
        values = dict(word.split("=") for word in options if "=" in word)
        modules = tuple(map(int, values.get("modules", "1").split(",")))
        evil = [*(names[word] for word in words if word.isupper()), attack, last]
        if "together" in words:
            make = None
        elif "alone" in words:
            make = alone(*evil, numbers=modules)
        else:
            make = skeleton(*evil) if "skeleton" in words else reference(*evil, number=modules[-1])
        checks = values.get("checks", "SOME")
        checks = names.get(checks) or globals().get(checks, tuple(checks.split(",")))
        told, limit_s = names.get(told, told), float(values.get("limit_s", 60))
        own = () if make else tuple(evil)
        cases.append(Hostile(name, make, int(score), told, modules, checks, limit_s, "long" in words, own))
    return cases


def list_cases() -> list[Hostile]:
    """Return the cases of all files in this folder, and one with all attacks that find nothing."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    cases = [case for name in names for case in importlib.import_module(f"hostile.{name}").CASES]
    together = reference(*(text for case in cases for text in case.evil))
    return [*cases, Hostile("finds nothing, wherever it looks", together, 3)]
