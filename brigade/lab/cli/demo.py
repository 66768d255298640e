"""A first look at the course: python -m brigade.lab.cli.demo

Train every variant on real text, print and draw the results, then check a correct and a wrong answer to module 8.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from brigade.course.checks.course_tests import import_from_tests
from brigade.course.cli.console import console
from brigade.course.cli.errors import run_safely
from brigade.course.cli.main import main as brigade
from brigade.course.table.modules import CORE_MODULES, HAS_SOLUTIONS, REFERENCE, ROOT, get_module
from brigade.lab.experiment import show_progress
from brigade.ranks.runner import ranks

ROUNDS = 12  # steps per variant
# The mistake of 11 of 20 public answers (docs/bugs.md). The README shows what the checks print.
MODULE = 8
MUTANT = "a rank's own gradients clipped, then reduced"
CHECKS = ("--until", "e", "--seed", "2026")


def main() -> int:
    """Run the demo and return its exit status.

    The status is 0 for success, 1 for a failure of the course, 2 if the demo cannot run here, and 130 if it is stopped.
    """
    argparse.ArgumentParser(
        prog="python -m brigade.lab.cli.demo",
        description="Train a small language model on two ranks with every core module and with torch DDP, compare the "
        "results, and show how an answer is checked. This takes about a minute on two idle cores and needs no GPU.",
        epilog="Example: python -m brigade.lab.cli.demo",
    ).parse_args()
    return run_safely(demo, "demo")


def demo() -> int:
    """Train, draw and check. Return the exit status."""
    ranks.SERVER.start()  # imports torch at the same time as this process
    # Imported here, so that Ctrl-C prints no traceback while torch is loading.
    from brigade.lab import ladder, plots
    from brigade.lab.bench import select_written
    from brigade.lab.notebook_plots import draw_step_times

    workload = replace(ladder.EMULATED, batch_size=12, rounds=ROUNDS, warmup=2)
    entries, sources, left_out = select_written(REFERENCE, CORE_MODULES)
    variants = [ladder.get_variant(entry) for entry in entries]
    console.print(
        "Bucket Brigade: data-parallel training, built step by step.\n\n"
        "Two processes on this machine train the same small language model on the source code of Python's\n"
        "standard library, once with each core module and once with torch DDP. Then one process trains it alone.\n"
        "The link between the two processes is emulated: an all-reduce of all gradients takes\n"
        f"{ladder.PACE.comm_ratio:g} times as long as backward."
    )
    for sentence in left_out:
        console.print(sentence)
    if not HAS_SOLUTIONS:  # finds a deadlock in the student's code within seconds
        ladder.dry_run(workload, variants, sources, world_size=2)
    variants = ladder.add_torch_variants(variants)
    with show_progress("training steps", ladder.count_steps(workload, variants)) as advance:
        results = ladder.run_benchmark(workload, variants, sources, on_step=advance)
    console.print()
    console.print(plots.make_time_table(results))
    if wrong := results.list_wrong_losses():
        print("\n".join(f"demo: {sentence}" for sentence in wrong), file=sys.stderr)
        return 1
    console.print(plots.describe_losses(results))
    picture = ROOT / "out" / "ladder.png"
    picture.parent.mkdir(exist_ok=True)
    draw_step_times(results, plots.describe_ranks(results)).savefig(picture)
    console.print(f"{picture.relative_to(ROOT)} shows these times as a chart.\n")
    return show_checks() if HAS_SOLUTIONS else 0


def show_checks() -> int:
    """Run the checks of one module on its solution, then on a mutant of it. Return the exit status."""
    console.print(f"This command checks the reference solution: brigade check {MODULE} --until e --target solutions")
    if status := brigade(["check", str(MODULE), *CHECKS, "--target", "solutions"]):
        return status
    console.print("In the same solution, each rank now clips its own gradients before they are averaged:")
    status = check_mistake()
    if status != 1:
        print(f"demo: the checks of module {MODULE} do not catch the mistake", file=sys.stderr)
        return max(status, 1)
    console.print(
        "The checks caught the mistake. Your turn: the readings are in lessons/; `brigade next` shows where to start."
    )
    return 0


def check_mistake() -> int:
    """Write the mutant to out/mistake, and run the checks on it. Return the exit status of `brigade check`."""
    entry = get_module(MODULE)
    mutant = import_from_tests("mutants").find_mutant(MODULE, MUTANT)
    directory = ROOT / "out" / "mistake"
    folder = directory / entry.package
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in mutant.apply().items():
        (folder / name).write_text(text)
    return brigade(["check", str(MODULE), *CHECKS, "--target", str(directory), "--prior", "reference"])


if __name__ == "__main__":
    sys.exit(main())
