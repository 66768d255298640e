"""Grade a class of twelve mixed submissions, and print how much time and memory this takes (Linux only).

This is not part of `make test`, because it takes minutes. Memory is the proportional set size of the whole process
tree, measured once per second; pages that several processes share count once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import psutil

from brigade.checks.collect import import_from_tests
from brigade.course.modules import MODULES, ROOT, get_module

REFERENCE = {entry.number: (ROOT / "solutions" / entry.path).read_text() for entry in MODULES}
SKELETONS = {entry.number: (ROOT / "lessons" / entry.path).read_text() for entry in MODULES}
ALTERNATIVES = {e.number: (e.tests / "alternative.py").read_text() for e in MODULES}


def mutant(number: int, place: int) -> dict[int, str]:
    """Return the reference of a module with one of its mutants applied, by the module's number."""
    entry = get_module(number)
    return {number: import_from_tests("mutants").list_mutants(entry)[place].apply()[entry.path.name]}


def replaced(number: int, old: str, new: str) -> dict[int, str]:
    """Return the reference of a module with `new` in place of `old`, by the module's number."""
    assert old in REFERENCE[number]
    return {number: REFERENCE[number].replace(old, new, 1)}


def submissions() -> dict[str, dict[int, str]]:
    """Return the twelve submissions, by name. Each submission maps module numbers to texts."""
    return {
        "right": REFERENCE,
        "right.zip": REFERENCE,
        "another style": ALTERNATIVES,
        "not begun": SKELETONS,
        "half": {number: (REFERENCE if number <= 4 else SKELETONS)[number] for number in REFERENCE},
        "wrong from the start": REFERENCE | mutant(1, 5),
        "two mistakes": REFERENCE | mutant(4, 0) | mutant(8, 0),
        "three mistakes": REFERENCE | mutant(2, 1) | mutant(5, 2) | mutant(6, 3),
        "deadlock": REFERENCE
        | replaced(3, "if self.require_grad_sync:", "if self.require_grad_sync and not dist.get_rank():"),
        "no Python": REFERENCE | {5: "class GradBuffer(:\n"},
        "leaves": REFERENCE | {6: "raise SystemExit\n"},
        "empty": {},
    }


def write(directory: Path) -> None:
    for name, texts in submissions().items():
        if name.endswith(".zip"):
            with zipfile.ZipFile(directory / name, "w") as bundle:
                for number, text in texts.items():
                    bundle.writestr(get_module(number).path.name, text)
            continue
        (directory / name).mkdir()
        for number, text in texts.items():
            path = directory / name / get_module(number).path
            path.parent.mkdir()
            path.write_text(text)


def resident(process: psutil.Process) -> int:
    """Return the bytes of the process and all its descendants."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def main() -> int:
    argparse.ArgumentParser(description=__doc__, epilog="Example: python -m tools.class_of_12").parse_args()
    with tempfile.TemporaryDirectory(prefix="brigade-class-") as directory:
        everyone = Path(directory) / "class"
        everyone.mkdir()
        write(everyone)
        gradebook = Path(directory) / "grades.csv"
        command = ["-m", "brigade.cli", "grade", "--class", str(everyone), "--gradebook", str(gradebook)]
        started, peak = time.monotonic(), 0
        class_run = psutil.Popen([sys.executable, *command], cwd=ROOT)
        while True:
            try:
                class_run.wait(1.0)
                break
            except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
                peak = max(peak, resident(class_run))
        seconds = time.monotonic() - started
        print(f"{len(submissions())} submissions in {seconds:.0f} s, at most {peak / 1e9:.2f} GB")
    return class_run.returncode


if __name__ == "__main__":
    sys.exit(main())
