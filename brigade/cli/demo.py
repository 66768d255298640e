"""What a newcomer sees first: python -m brigade.cli.demo

Trains the ladder on real text, prints and draws it, then checks a right answer to module 3 and a wrong one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from brigade.checks.collect import import_from_tests
from brigade.cli.console import console
from brigade.cli.main import main as brigade
from brigade.course.modules import CORE_MODULES, HAS_SOLUTIONS, REFERENCE, ROOT, get_module
from brigade.lab.script import run_to_status, show_progress
from brigade.runner import ranks

ROUNDS = 20  # steps of each variant
MODULE = 3
MUTANT = "synchronous all-reduce in the hook"  # of tests/mutants: the numbers are right, nothing overlaps


def main() -> int:
    """Returns the exit status: 0 good, 1 something is wrong with the course, 2 it cannot run here, 130 stopped."""
    argparse.ArgumentParser(
        prog="python -m brigade.cli.demo",
        description="Trains a small language model on two ranks with every module of the course and with torch DDP, "
        "compares them, and shows how an answer is checked. About a minute on two cores; no GPU is needed.",
        epilog="Example: python -m brigade.cli.demo",
    ).parse_args()
    return run_to_status("demo", demo)


def demo() -> int:
    """Train, draw and check; return the exit status."""
    ranks.SERVER.start()  # it imports torch while this process does
    # Imported here, so that Ctrl-C is quiet while torch is loading too.
    from brigade.lab import ladder, plots
    from brigade.lab.bench import select_written

    workload = replace(ladder.EMULATED, batch_size=16, rounds=ROUNDS)
    entries, sources, left_out = select_written(REFERENCE, CORE_MODULES)
    variants = [ladder.get_variant(entry) for entry in entries]
    console.print(
        "Bucket Brigade: data-parallel training, built step by step.\n\n"
        "Two processes on this machine train the same small language model on the source of Python's standard\n"
        "library, once with each module of the course and once with torch DDP. Then one process does it alone.\n"
        "The link between the two is emulated: to move all gradients takes "
        f"{workload.link.comm_ratio:g} of the time of backward."
    )
    for sentence in left_out:
        console.print(sentence)
    if not HAS_SOLUTIONS:  # a deadlock of the student's is found within seconds here
        ladder.dry_run(workload, variants, sources, world_size=2)
    with show_progress("training steps", ladder.count_steps(workload, [*variants, *ladder.TORCH])) as advance:
        found = ladder.run_ladder(workload, variants, sources, on_step=advance)
    console.print()
    console.print(plots.make_ladder_table(found))
    if wrong := found.list_wrong_losses():
        print("\n".join(f"demo: {sentence}" for sentence in wrong), file=sys.stderr)
        return 1
    console.print(plots.describe_losses(found))
    picture = ROOT / "out" / "ladder.png"
    plots.draw_ladder(found, picture)
    console.print(f"The picture is {picture.relative_to(ROOT)}.\n")
    return show_checks() if HAS_SOLUTIONS else 0


def show_checks() -> int:
    """Run the checks of one module on its solution, then on a mutant of it."""
    entry = get_module(MODULE)
    console.print(f"How an answer is checked: brigade check {MODULE} --target solutions")
    status = brigade(["check", str(MODULE), "--target", "solutions"])
    if status:
        return report_failure(status, f"the solution of module {MODULE} does not pass its own checks")
    mutants = import_from_tests(f"mutants.{entry.package}").MUTANTS
    mutant = next(mutant for mutant in mutants if mutant.name == MUTANT)
    directory = ROOT / "out" / "mistake"
    file = directory / entry.path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(mutant.apply((ROOT / "solutions" / entry.path).read_text()))
    console.print(f"The same solution with one mistake in it, {mutant.name}. Its numbers are right:")
    status = brigade(["check", str(MODULE), "--target", str(directory), "--prior", "reference"])
    if status != 1:
        return report_failure(status, f"the checks of module {MODULE} do not catch the mistake")
    console.print(
        "The mistake was caught. Your turn: lessons/ has the readings, and `brigade next` says where to start."
    )
    return 0


def report_failure(status: int, sentence: str) -> int:
    """Return the demo's exit status after a check with a wrong end; print the sentence unless the user stopped it."""
    if status == 130:
        return 130
    print(f"demo: {sentence}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
