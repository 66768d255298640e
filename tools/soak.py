"""`make soak`: run the graded checks many times, each time on other random cases, to find results that depend on luck.

Without options: the reference with 30 seeds. A correct answer must never fail, not even while other programs are busy.

With `--all`: also the alternatives, the variants and the mutants. Every program must pass or fail the same checks with
every seed. With `--isolated`, which needs root, every check runs both ways, as `brigade check` and as `brigade grade`
run it, and must have the same status.

Results are kept in the file `--out`, so that a later run continues where this one stopped. The results of a program are
used again only if neither its text nor the module's checks and scenario have changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from brigade.checks.collect import collect, import_from_tests
from brigade.checks.run import Conditions, prepare
from brigade.course.modules import Module, select_modules
from brigade.grade.isolation import isolate_ranks, may_isolate
from brigade.runner.server import SERVER

mutants = import_from_tests("mutants")


class Program(NamedTuple):
    """Texts of a module's files by name. The named checks must have the status `wanted`, the others any one status."""

    module: Module
    name: str
    texts: dict[str, str]
    wanted: str
    checks: Sequence[str]


def list_programs(module: Module, include_all: bool) -> Iterator[Program]:
    """Yield the reference, and with `include_all` also the alternative, the variants and the mutants."""
    names = [check.name for check in collect([module])]
    yield Program(module, "the reference", mutants.read_reference(module), "passed", names)
    if include_all:
        alternative = {module.path.name: (module.tests / "alternative.py").read_text()}
        yield Program(module, "the alternative", alternative, "passed", names)
        for variant in mutants.list_variants(module):
            yield Program(module, variant.name, variant.apply(), "passed", variant.checks)
        for mutant in mutants.list_mutants(module):
            yield Program(module, mutant.name, mutant.apply(), "failed", mutant.checks)


def make_key(program: Program) -> str:
    """Return a hash of everything on which the results of a program depend."""
    paths = [program.module.checks, *sorted(program.module.tests.glob("[se]*.py"))]  # scenarios and expected values
    texts = [program.name, *program.texts.values(), *(path.read_text() for path in paths)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def run(programs: Sequence[Program], seeds: Sequence[int], isolated: bool, out: Path | None) -> int:
    """Run all checks on every program with every seed, print which results are wrong, and return their number."""
    lines = out.read_text().splitlines() if out and out.exists() else []
    statuses = {tuple(place): status for place, status in map(json.loads, lines)}
    faults, sandbox = 0, SERVER.sandbox
    for program in track(programs, description="programs"):
        key = make_key(program)
        for check in collect([program.module]):
            seen: dict[str, list[str]] = {}  # by status: the seeds
            for seed, way in itertools.product(seeds, ("", " isolated")[: 1 + isolated]):
                place = (program.module.number, program.name, key, check.name, f"{seed}{way}")
                if place not in statuses:
                    SERVER.sandbox = sandbox if way else None  # for the next ranks of the same server
                    statuses[place] = mutants.run_on_text(check, program.texts, Conditions(seed=seed)).status
                    if out:
                        with out.open("a") as file:
                            file.write(json.dumps([place, statuses[place]]) + "\n")
                seen.setdefault(statuses[place], []).append(place[-1])
            if len(seen) > 1 or check.name in program.checks and program.wanted not in seen:
                faults += 1
                found = "; ".join(f"{status} with seed {', '.join(seen[status])}" for status in sorted(seen))
                print(f"module {program.module.number}, {program.name}, {check.name}: {found}", flush=True)
    SERVER.sandbox = sandbox
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30, metavar="N", help="use the seeds 0 to N - 1 (default: 30)")
    parser.add_argument("--modules", default="0-16", help="such as 3, 1-4 or 1,5 (default: all)")
    parser.add_argument("--all", action="store_true", help="also run alternatives, variants and mutants")
    parser.add_argument("--isolated", action="store_true", help="run each check with gloo and isolated, as root")
    parser.add_argument("--out", type=Path, help="keep the results in this file, and continue from it")
    options = parser.parse_args()
    if options.isolated and not may_isolate():
        parser.error("--isolated needs Linux and root")
    programs = [p for module in select_modules(options.modules) for p in list_programs(module, options.all)]
    with isolate_ranks("", None, "gloo") if options.isolated else contextlib.nullcontext():
        prepare()
        faults = run(programs, range(options.seeds), options.isolated, options.out)
    print(f"{len(programs)} programs, {options.seeds} seeds: {faults or 'no'} results are wrong or depend on luck")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
