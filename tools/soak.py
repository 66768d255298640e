"""`make soak`: run the graded checks many times, each time on other random cases, to find results that depend on luck.

Without options: the reference with 30 seeds, while busy loops occupy both cores. A correct answer must never fail.

With `--all`: also the alternatives, the variants and the mutants. Every program must pass or fail the same checks with
every seed. Results are kept in the file `--out`, so that a later run continues where this one stopped; the results of
a program are used again only if neither its text nor the module's checks and scenario have changed.

With `--isolated`, which needs root: every check runs both ways, as `brigade check` and as `brigade grade` run it. It
must have the same status with gloo as in isolation with the switch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from brigade.checks.collect import collect, import_from_tests
from brigade.checks.run import Conditions, prepare
from brigade.course.modules import Module, select_modules
from brigade.grade.isolation import isolate_ranks, may_isolate
from brigade.runner.server import SERVER

import_from_tests("mutants")  # finds the directory
from mutants import list_mutants, list_variants, read_reference, run_on_text  # noqa: E402


@dataclass(frozen=True)
class Program:
    """A text of a module. Every check in `fails` must fail, every check in `passes` must pass."""

    module: Module
    name: str
    texts: dict[str, str]  # of its files, by name
    fails: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        tests = [path for name in ("scenario*.py", "expected.py") for path in sorted(self.module.tests.glob(name))]
        texts = [self.name, *self.texts.values(), *(path.read_text() for path in (self.module.checks, *tests))]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def list_programs(module: Module, include_all: bool) -> Iterator[Program]:
    names = tuple(check.name for check in collect([module]))
    yield Program(module, "the reference", read_reference(module), passes=names)
    if include_all:
        alternative = {module.path.name: (module.tests / "alternative.py").read_text()}
        yield Program(module, "the alternative", alternative, passes=names)
        for variant in list_variants(module):
            yield Program(module, variant.name, variant.apply(), passes=variant.checks)
        for mutant in list_mutants(module):
            yield Program(module, mutant.name, mutant.apply(), fails=mutant.checks)


def find_fault(program: Program, check: str, statuses: dict[str, str]) -> str:
    """Return what is wrong with the status of a check for each seed and way, or ""."""
    first = next(iter(statuses.values()))
    wanted = "failed" if check in program.fails else "passed" if check in program.passes else first
    if set(statuses.values()) == {wanted}:
        return ""
    kinds = {kind: [seed for seed in statuses if statuses[seed] == kind] for kind in sorted({*statuses.values()})}
    seeds = "; ".join(f"{kind} with seed {', '.join(found)}" for kind, found in kinds.items())
    return f"module {program.module.number}, {program.name}, {check}: {seeds}"


def run(
    programs: Sequence[Program],
    seeds: Sequence[int],
    out: Path | None = None,
    only: str = "",
    isolated: bool = False,
    named: bool = False,
) -> list[str]:
    """Run the checks whose names contain `only` on every program with every seed, and return what is wrong.

    With `named`, run only those that a program must fail or must pass. With `isolated`, run each of them with gloo and
    in isolation. Results in `out` are not repeated.
    """
    known = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    results = {(entry["key"], entry["check"], entry["seed"], entry.get("isolated", False)): entry for entry in known}
    faults = []
    with isolate_ranks("", None, "gloo") if isolated else contextlib.nullcontext():
        sandbox = SERVER.sandbox
        prepare()
        for program in track(programs, description="programs"):
            names = {*program.fails, *program.passes}
            for check in collect([program.module]):
                if only not in check.name or named and check.name not in names:
                    continue
                statuses = {}
                for seed in seeds:
                    for way in (False, True)[: 1 + isolated]:
                        place = (program.key, check.name, seed, way)
                        if place not in results:
                            SERVER.sandbox = sandbox if way else None  # for the next ranks of the same server
                            outcome = run_on_text(check, program.texts, Conditions(seed=seed))
                            SERVER.sandbox = sandbox
                            entry = dict(zip(("key", "check", "seed", "isolated"), place)) | {"status": outcome.status}
                            entry |= {"module": program.module.number, "name": program.name}
                            entry |= {"cause": outcome.verdict.likely_cause if outcome.verdict else ""}
                            results[place] = entry
                            if out:
                                with out.open("a") as file:
                                    file.write(json.dumps(entry) + "\n")
                        statuses[f"{seed}{' isolated' * way}"] = results[place]["status"]
                if fault := find_fault(program, check.name, statuses):
                    print(fault, flush=True)
                    faults.append(fault)
    return faults


def burn() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30, metavar="N", help="use the seeds 0 to N - 1 (default: 30)")
    parser.add_argument("--modules", default="0-11", help="such as 3, 1-4 or 1,5 (default: all)")
    parser.add_argument("--only", default="", metavar="NAME", help="run the checks whose names contain NAME")
    parser.add_argument("--all", action="store_true", help="also run alternatives, variants and mutants")
    parser.add_argument("--named", action="store_true", help="run only the checks that must catch a mutant")
    parser.add_argument("--isolated", action="store_true", help="run each check with gloo and isolated, as root")
    parser.add_argument("--busy", type=int, default=2, help="the number of busy loops meanwhile (default: 2)")
    parser.add_argument("--out", type=Path, help="keep the results in this file, and continue from it")
    options = parser.parse_args()
    if options.isolated and not may_isolate():
        parser.error("--isolated needs Linux and root")
    programs = [p for module in select_modules(options.modules) for p in list_programs(module, options.all)]
    loops = [multiprocessing.Process(target=burn, daemon=True) for _ in range(options.busy)]
    for loop in loops:
        loop.start()
    try:
        faults = run(programs, range(options.seeds), options.out, options.only, options.isolated, options.named)
    finally:
        for loop in loops:
            loop.terminate()
    print(f"{len(programs)} programs, {options.seeds} seeds: {len(faults) or 'no'} results are wrong or depend on luck")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
