"""`make soak`: run all graded checks on the reference many times, while busy loops occupy both cores.

A correct answer must never fail. The command ends at the first failure and prints the output of pytest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time

from rich.progress import track

from brigade.course.modules import ROOT


def burn() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: python tests/soak.py --repetitions 5")
    parser.add_argument("--repetitions", type=int, default=30, help="how often to run all checks (default: 30)")
    parser.add_argument("--busy", type=int, default=2, help="the number of busy loops during the checks (default: 2)")
    options = parser.parse_args()
    loops = [multiprocessing.Process(target=burn, daemon=True) for _ in range(options.busy)]
    for loop in loops:
        loop.start()
    checks = sorted(str(path) for path in (ROOT / "tests").glob("test_m*.py"))
    seconds = []
    try:
        for repetition in track(range(options.repetitions), description="graded checks"):
            started = time.monotonic()
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--target",
                "solutions",
                "--seed",
                str(repetition),
                *checks,
            ]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            seconds.append(time.monotonic() - started)
            if done.returncode:
                print(done.stdout + done.stderr)
                print(f"repetition {repetition} failed; --seed {repetition} repeats its cases")
                return 1
    finally:
        for loop in loops:
            loop.terminate()
    print(f"{options.repetitions} repetitions passed; {min(seconds):.1f} to {max(seconds):.1f} s each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
