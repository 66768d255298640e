"""`make soak`: run the graded checks many times, each time on other random cases, to find results that depend on luck.

Without options: the reference with 30 seeds, while busy loops occupy both cores. A correct answer must never fail.

With `--all`: also the alternatives, the variants and the mutants. Every program must pass or fail the same checks with
every seed. Results are kept in the file `--out`, so that a later run continues where this one stopped; the results of
a program are used again only if neither its text nor the module's checks and scenario have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alternatives.variants import VARIANTS
from mutants import run_on_text
from rich.progress import track

from brigade.checks.collect import collect, import_from_tests
from brigade.checks.run import Conditions, prepare
from brigade.course.modules import ROOT, Module, select_modules


@dataclass(frozen=True)
class Program:
    """A text of a module. Every check in `fails` must fail, every check in `passes` must pass."""

    module: Module
    name: str
    text: str
    fails: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        tests = [ROOT / "tests" / folder / self.module.checks.name for folder in (".", "scenarios", "expected")]
        tests[1:] = [path.with_name(f"{self.module.package}.py") for path in tests[1:]]
        texts = [self.name, self.text, *(path.read_text() for path in tests if path.exists())]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def list_programs(module: Module, include_all: bool) -> Iterator[Program]:
    reference = (ROOT / "solutions" / module.path).read_text()
    names = tuple(check.name for check in collect([module]))
    yield Program(module, "the reference", reference, passes=names)
    if include_all:
        alternative = ROOT / "tests" / "alternatives" / f"{module.package}.py"
        yield Program(module, "the alternative", alternative.read_text(), passes=names)
        for variant in VARIANTS.get(module.number, []):
            yield Program(module, variant.name, variant.apply(reference), passes=variant.passes)
        for mutant in import_from_tests(f"mutants.{module.package}").MUTANTS:
            yield Program(module, mutant.name, mutant.apply(reference), fails=mutant.caught_by)


def find_faults(program: Program, outcomes: dict[int, dict[str, str]]) -> Iterator[str]:
    """Yield what is wrong with the outcomes of a program: for each seed, the status of each check."""
    for check in next(iter(outcomes.values()), {}):
        statuses = {seed: by_check[check] for seed, by_check in outcomes.items()}
        wanted = {"failed"} if check in program.fails else {"passed"} if check in program.passes else set()
        wrong = {seed for seed, status in statuses.items() if wanted and status not in wanted}
        if wrong or len(set(statuses.values())) > 1:
            kinds = {kind: [seed for seed in statuses if statuses[seed] == kind] for kind in set(statuses.values())}
            seeds = "; ".join(f"{kind} with seed {', '.join(map(str, kinds[kind]))}" for kind in sorted(kinds))
            yield f"module {program.module.number}, {program.name}, {check}: {seeds}"


def run(programs: Sequence[Program], seeds: Sequence[int], out: Path | None) -> list[str]:
    """Run every program with every seed, except those with results in `out`. Return the faults of all programs."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    results = {(entry["key"], entry["seed"]): entry["outcomes"] for entry in known}
    faults = []
    prepare()
    for program in track(programs, description="programs"):
        outcomes: dict[int, dict[str, str]] = {}
        for seed in seeds:
            if (program.key, seed) not in results:
                checks = [
                    run_on_text(check, program.text, Conditions(seed=seed)) for check in collect([program.module])
                ]
                results[program.key, seed] = {outcome.check.name: outcome.status for outcome in checks}
                if out:
                    entry = {"module": program.module.number, "name": program.name, "key": program.key, "seed": seed}
                    causes = {outcome.check.name: outcome.verdict.likely_cause for outcome in checks if outcome.verdict}
                    with out.open("a") as file:
                        file.write(
                            json.dumps(entry | {"outcomes": results[program.key, seed], "causes": causes}) + "\n"
                        )
            outcomes[seed] = results[program.key, seed]
        for fault in find_faults(program, outcomes):
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
    parser.add_argument("--all", action="store_true", help="also run alternatives, variants and mutants")
    parser.add_argument("--busy", type=int, default=2, help="the number of busy loops meanwhile (default: 2)")
    parser.add_argument("--out", type=Path, help="keep the results in this file, and continue from it")
    options = parser.parse_args()
    programs = [p for module in select_modules(options.modules) for p in list_programs(module, options.all)]
    loops = [multiprocessing.Process(target=burn, daemon=True) for _ in range(options.busy)]
    for loop in loops:
        loop.start()
    try:
        faults = run(programs, range(options.seeds), options.out)
    finally:
        for loop in loops:
            loop.terminate()
    print(f"{len(programs)} programs, {options.seeds} seeds: {len(faults) or 'no'} results are wrong or depend on luck")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
