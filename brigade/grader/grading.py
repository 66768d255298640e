"""Run all graded checks on one submission and keep the score.

The maximum score is known before anything runs. A grading run contains every check of the requested modules from the
start, with zero points and the words "did not finish". A check keeps this result until it has run or is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from brigade.course.checks.collect import Check, collect
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions, run_check
from brigade.course.table.listing import GradedCheck
from brigade.course.table.modules import MODULES, get_module
from brigade.course.table.submission import Snapshot, list_earlier
from brigade.grader.outcome import Grading
from brigade.ranks.errors import UserError
from brigade.ranks.runner.server import SERVER
from brigade.ranks.verdict import make_not_run

Replaced = frozenset[int]  # the numbers of the earlier modules that the reference replaces

TOTAL_S = 900.0  # for one submission; checks that have not run by then count as failed
NO_NAME = ("ImportError", "AttributeError")  # raised if an earlier module lacks a name
PATIENCE = 2  # stop a module after this many of its checks have reached their deadline


def grade(
    target: Path,
    grading: Grading,
    *,
    prior: str = "auto",
    backend: str = "gloo",
    share_gpu: bool = False,
    total_s: float = TOTAL_S,
    on_change: Callable[[], None] = lambda: None,
    secret: bytes | None = None,
    at_a_time: int = 1,
) -> Grading:
    """Run all checks of `grading` on `target`, and return it. Call `on_change` before the first and after each check.

    With a `secret`, the seed becomes that of `derive_seed`.

    `on_change` may raise OSError after a check, for example if the disk is full. The grading run then continues. Only
    exceptions of the first and the last call propagate. With `prior` "auto", an error costs points only once, because
    failed checks are repeated with the reference's earlier modules. Several run `at_a_time`, with the same results.
    """
    grading.outcomes = [Outcome(check) for check in collect([get_module(number) for number, _ in grading.modules()])]
    on_change()
    snapshot = Snapshot(target, hides_place=True)
    if secret is not None:
        grading.seed = derive_seed(secret, snapshot, max(number for number, _ in grading.modules()))
    conditions = Conditions(grading.seed, backend, share_gpu, uses_hidden=True)
    pool = ThreadPoolExecutor(at_a_time)
    schedule = Schedule(snapshot, grading, prior, conditions, total_s, on_change, pool, at_a_time)
    try:
        schedule.run()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        conditions.stopped.set()
        if any(future.running() for future in schedule.started.values()):
            SERVER.close()  # ends the ranks of checks whose outcomes nobody needs any more
        pool.shutdown()  # no thread outlives the isolation
    grading.finished = True
    on_change()
    return grading


def derive_seed(secret: bytes, snapshot: Snapshot, last: int) -> int:
    """Return a seed below 2^62 for the modules of a submission up to number `last`: HMAC-SHA256 of their texts.

    Equal submissions get equal random cases, and so equal points. A submission that differs in one letter gets other
    cases, so nothing that feedback tells about the cases of one helps another. Nobody finds the secret from a seed.
    """
    texts: dict[str, str] = {}
    for entry in MODULES:
        with contextlib.suppress(UserError):  # what cannot be read gets no points
            if entry.number <= last:
                texts |= {name: text for name, (_, text) in snapshot.read_module(entry).items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hmac.digest(secret, digest, "sha256")[:8], "big") >> 2


@dataclass
class Schedule:
    """Run the checks in an order in which no module can use up the time of the others.

    First, every check runs once. Each module gets an equal share of the remaining time, and is stopped after two checks
    that reach their deadline. After a check that reaches its deadline or deadlocks, the reference replaces the earlier
    modules that have failed a check in later modules, because these would probably hang with them.

    Then failed checks are repeated. The reference replaces only the earlier modules that have lost points, or that are
    not graded. Because the modules are repeated in order, these have lost their points themselves. An earlier module
    that passes all its checks stays, because the mistake may be in a method that replaces one of its methods. There is
    one exception: it may lack a name that later modules use. After such an error (NO_NAME), the reference replaces all.
    """

    snapshot: Snapshot
    grading: Grading
    prior: str
    conditions: Conditions
    total_s: float
    on_change: Callable[[], None]
    pool: Executor  # starts checks before their turn, if it has several threads
    at_a_time: int
    has_stalled: bool = False  # whether a module hung in a check or used up its time
    # for each check, the attempts in order, by the numbers of the modules that the reference replaces
    attempts: dict[GradedCheck, dict[Replaced, Outcome]] = field(default_factory=lambda: defaultdict(dict))
    # the number of checks that have reached their deadline, by module and by whether earlier modules were replaced
    timeouts: Counter[tuple[int, bool]] = field(default_factory=Counter)
    started: dict[tuple[GradedCheck, Replaced], Future[Outcome]] = field(default_factory=dict)  # before their turn

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.ends_at = self.began + self.total_s
        self.earlier = {n: list_earlier(self.snapshot, get_module(n)) for n, _ in self.grading.modules()}

    def run(self) -> None:
        """Run every check once, then repeat failed checks that may pass with other earlier modules."""
        modules = self.grading.modules()
        for index, (number, _) in enumerate(modules):
            now = time.monotonic()
            ends_at = now + max(0.0, self.ends_at - now) / (len(modules) - index)
            self.start_early(number, self.choose_first(number), ends_at)
            for following, _ in modules[index + 1 : index + 2]:  # or a thread would wait at the end of each module
                self.start_early(following, self.choose_first(following), self.ends_at)
            self.attempt(number, self.choose_first(number), ends_at)
        if self.prior == "auto":
            for number, _ in modules:
                self.attempt(number, self.list_failed(number), self.ends_at)
            for number, _ in modules:
                self.attempt(number, self.earlier[number], self.ends_at)
            for outcome in self.grading.outcomes:
                self.explain(outcome)

    def choose_first(self, number: int) -> Replaced:
        """Return the earlier modules that the reference replaces when the checks of a module run first."""
        if self.prior == "auto":
            return self.list_failed(number) if self.has_stalled else frozenset()
        return self.earlier[number] if self.prior == "reference" else frozenset()

    def list_failed(self, number: int) -> Replaced:
        """Return the earlier modules that have failed a check so far, or that are not graded and so may be wrong."""
        passing = {n for n, outcomes in self.grading.modules() if all(outcome.passed for outcome in outcomes)}
        return self.earlier[number] - passing

    def may_gain(self, outcome: Outcome, replaced: Replaced) -> bool:
        """Return whether a check that has not passed could pass if the reference replaces these earlier modules."""
        attempts = self.attempts[outcome.check]
        if outcome.passed or replaced in attempts:
            return False
        lacks_name = any(one.verdict and one.verdict.error in NO_NAME for one in attempts.values())
        if attempts and not lacks_name and not replaced <= self.list_failed(outcome.check.module):
            return False
        if any(one.ending in ("deadline", "deadlock") for others, one in attempts.items() if others):
            return False  # it would hang again
        return not any(is_beyond_help(one) for one in attempts.values())

    def attempt(self, number: int, replaced: Replaced, ends_at: float) -> None:
        """Run the checks of one module that may gain points, until the module is stopped or out of time."""
        started = time.monotonic()
        self.start_early(number, replaced, ends_at)
        for outcome in self.grading.list_outcomes(number):
            if not self.may_gain(outcome, replaced):
                continue
            if time.monotonic() >= self.ends_at:
                self.skip(outcome, f"the grading run has used up its time limit ({self.total_s:.0f} s)")
            elif self.timeouts[number, bool(replaced)] >= PATIENCE:
                self.skip(outcome, f"module {number} was stopped: {PATIENCE} of its checks did not finish in time")
            elif time.monotonic() >= ends_at:
                self.has_stalled = True
                share = f"its share of the time limit ({ends_at - started:.0f} s)"
                self.skip(outcome, f"module {number} has used up {share}")
            else:
                self.examine(outcome, replaced, ends_at)

    def start_early(self, number: int, replaced: Replaced, ends_at: float) -> None:
        """Start those checks of a module that may gain points, in the order of their turns, if there are threads."""
        for outcome in self.grading.list_outcomes(number) if self.at_a_time > 1 else ():
            key = outcome.check, replaced
            if key not in self.started and self.may_gain(outcome, replaced):
                self.started[key] = self.pool.submit(self.run_once, *key, ends_at)

    def run_once(self, check: GradedCheck, replaced: Replaced, ends_at: float) -> Outcome:
        """Run one check in this thread."""
        assert isinstance(check, Check)  # from `collect`
        source = self.prior if self.prior != "auto" else "reference" if replaced else "own"
        conditions = replace(self.conditions, ends_at=ends_at)
        return run_check(check, self.snapshot, conditions, source, replaced=replaced)

    def skip(self, outcome: Outcome, reason: str) -> None:
        """Record why a check does not run. Keep the verdict of an earlier attempt."""
        if not self.attempts[outcome.check]:
            outcome.verdict = make_not_run(reason)
        self.report()

    def examine(self, outcome: Outcome, replaced: Replaced, ends_at: float) -> None:
        """Run one check. Running a check again can only gain points."""
        attempts, key = self.attempts[outcome.check], (outcome.check, replaced)
        early = self.started.get(key)
        found = early.result() if early else self.run_once(*key, ends_at)
        if found.ending == "lost":  # killed from outside, perhaps because memory ran out: try again
            found = self.run_once(*key, ends_at)
        found.seconds += outcome.seconds
        found.exception = None  # free the objects that it refers to
        found.repeat = ""  # a command with the grader's paths
        if found.passed or not attempts or (is_blocked(outcome) and not is_blocked(found)):
            self.grading.outcomes = [found if other is outcome else other for other in self.grading.outcomes]
        else:
            outcome.seconds = found.seconds
        attempts[replaced] = found
        self.timeouts[outcome.check.module, bool(replaced)] += found.ending == "deadline"
        if found.ending in ("deadline", "deadlock"):
            self.has_stalled = True  # so other earlier modules may be replaced in what has not started
            self.started = {key: future for key, future in self.started.items() if not future.cancel()}
        self.report()

    def report(self) -> None:
        """Call `on_change` with the changed grading, and ignore an OSError."""
        self.grading.seconds = time.monotonic() - self.began
        with contextlib.suppress(OSError):
            self.on_change()

    def explain(self, outcome: Outcome) -> None:
        """Add a note to a failed check that was tried with other earlier modules, because some have lost points."""
        attempts = [item for item in self.attempts[outcome.check].items() if item[0]]
        if outcome.passed or not attempts:
            return
        replaced, last = attempts[-1]
        if self.list_failed(outcome.check.module).isdisjoint(replaced):
            return
        what = "The check fails with the reference's earlier modules, too."
        if is_blocked(last):
            what = f"The repetition with the reference's earlier modules could not run: {last.reason.message}"
        note = "\n".join(filter(None, [outcome.reason.note, what]))
        outcome.verdict = replace(outcome.reason, note=note)


def is_beyond_help(outcome: Outcome) -> bool:
    """Return whether a check fails with any earlier modules: its own module is not Python, or a part is not written."""
    verdict = outcome.verdict
    return outcome.ending == "unreadable" or bool(
        verdict and verdict.part and verdict.part.module == outcome.check.module
    )


def is_blocked(outcome: Outcome) -> bool:
    """Return whether a check failed because of an import, or because an earlier module is not written."""
    verdict = outcome.verdict
    if verdict is None:
        return False
    return verdict.error == "ImportError" or bool(verdict.part and verdict.part.module != outcome.check.module)
