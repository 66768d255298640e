"""`make matrix`: run every test with the oldest, the pinned and the newest torch, each with its own Python.

A pair such as 3.12:2.13.0 names a Python and a torch. Each pair gets a virtual environment in out/matrix, with the
other packages of requirements.txt, and runs all tests there. A pair whose Python is not on this machine counts as
failed. The exit status is 0 if every pair passed, 1 if one failed, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from brigade.course.modules import ROOT

PAIRS = ("3.10:2.11.0", "3.12:2.13.0", "3.14:2.15.0")
INSTALL_S, TESTS_S = 3600, 3600  # deadlines


@dataclass(frozen=True)
class Pair:
    """A Python, as a version (3.12) or a path, and the version of torch to run with it."""

    python: str
    torch: str

    @property
    def directory(self) -> Path:
        """The directory of the pair's virtual environment and logs."""
        return ROOT / "out" / "matrix" / f"python{Path(self.python).name.removeprefix('python')}-torch{self.torch}"

    def find_interpreter(self) -> str | None:
        """Return a Python that starts, or None. A launcher may exist for a version that it cannot start."""
        name = f"python{self.python}" if re.fullmatch(r"3\.\d+", self.python) else self.python
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
        return None


def parse_pair(text: str) -> Pair:
    """Parse PYTHON:TORCH. Raise argparse.ArgumentTypeError if it is neither two versions nor a path and a version."""
    python, _, torch = text.rpartition(":")
    if not python or not re.fullmatch(r"\d+\.\d+\.\d+", torch):
        raise argparse.ArgumentTypeError(f"{text}: write it as PYTHON:TORCH, such as {PAIRS[0]}")
    return Pair(python, torch)


def install(pair: Pair, interpreter: str, log: Path) -> Path:
    """Create the environment unless it is complete. Return its Python. Raise CalledProcessError if pip fails."""
    environment = pair.directory / "venv"
    python, complete = environment / "bin" / "python", pair.directory / "installed"
    requirements = (ROOT / "requirements.txt").read_text()
    wanted = re.sub(r"(?m)^torch==.*$", f"torch=={pair.torch}", requirements)
    if complete.exists() and complete.read_text() == wanted:
        return python
    complete.unlink(missing_ok=True)
    (pair.directory / "requirements.txt").write_text(wanted)
    steps = (
        [interpreter, "-m", "venv", "--clear", environment],
        [python, "-m", "pip", "install", "--quiet", "-r", pair.directory / "requirements.txt"],
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT],
    )
    with log.open("w") as output:
        for step in steps:
            subprocess.run(step, check=True, stdout=output, stderr=subprocess.STDOUT, timeout=INSTALL_S)
    complete.write_text(wanted)
    return python


def run_tests(python: Path, log: Path, arguments: list[str]) -> tuple[bool, str]:
    """Return whether pytest passed, and its last line. Write its full output to `log`."""
    command = [python, "-m", "pytest", "-q", "-rs", "--target", "solutions", *arguments]
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=TESTS_S)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return done.returncode == 0, lines[-1].strip("= ") if lines else "no output"


def try_pair(pair: Pair, arguments: list[str]) -> tuple[bool, str]:
    """Install and test one pair. Return whether it passed, and one line on what happened."""
    interpreter = pair.find_interpreter()
    if interpreter is None:
        return False, f"there is no Python {pair.python} on this machine"
    pair.directory.mkdir(parents=True, exist_ok=True)
    try:
        python = install(pair, interpreter, pair.directory / "install.log")
        return run_tests(python, pair.directory / "tests.log", arguments)
    except subprocess.CalledProcessError:
        return False, f"the installation failed: {(pair.directory / 'install.log').relative_to(ROOT)}"
    except subprocess.TimeoutExpired as expired:
        return False, f"did not finish within {expired.timeout:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        epilog="Example: python -m tools.matrix 3.12:2.13.0 -- tests/test_m03_overlapped_ddp.py",
    )
    parser.add_argument("pairs", nargs="*", type=parse_pair, metavar="PYTHON:TORCH", help=f"default: {' '.join(PAIRS)}")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    arguments = words[split + 1 :] or ["-n", "3", "--dist", "worksteal"]
    console = Console(highlight=False, soft_wrap=True)
    passed = []
    try:
        for pair in options.pairs or [parse_pair(text) for text in PAIRS]:
            started = time.monotonic()
            with console.status(f"Python {pair.python} with torch {pair.torch}"):
                has_passed, line = try_pair(pair, arguments)
            passed.append(has_passed)
            minutes = (time.monotonic() - started) / 60
            verdict = "passed" if has_passed else "FAILED"
            console.print(f"Python {pair.python}, torch {pair.torch}: {verdict} after {minutes:.1f} min; {line}")
    except KeyboardInterrupt:
        print("\nmatrix: stopped", file=sys.stderr)
        return 130
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
