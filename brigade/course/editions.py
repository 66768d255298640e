"""The files that both the student edition and the Gradescope package contain: the core, its commands and the checks."""

from __future__ import annotations

from collections.abc import Iterable

from brigade.course.modules import ROOT

CORE = (
    "brigade/*.py",
    *(
        f"brigade/{folder}/**/*.py"
        for folder in ("course", "ipc", "runner", "sandbox", "rank", "switch", "checks", "cli")
    ),
)
CHECKS = ("tests/test_m*.py", "tests/helpers/*.py")
CHECKS += tuple(f"tests/m*/{name}" for name in ("scenario*.py", "causes.py", "expected.py", "dumps/*.txt"))


def select_requirements(packages: Iterable[str]) -> str:
    """Return the lines of requirements.txt that pin these packages."""
    pins = tuple(f"{package}==" for package in packages)
    lines = (ROOT / "requirements.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(pins))
