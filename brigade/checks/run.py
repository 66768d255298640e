"""Run checks on a submission. Commands, graders, mutant tests and pytest all use `run_check`."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from brigade.checks.collect import Check
from brigade.checks.context import CheckContext
from brigade.checks.server import start_server
from brigade.checks.verdict import BROKEN, CheckFailed, Outcome, Verdict, make_not_run
from brigade.course.listing import GradedCheck
from brigade.course.modules import HAS_SOLUTIONS, ROOT, CourseError, get_module
from brigade.course.submission import Sources, compile_texts, is_sealed, keep_code, read, resolve_target
from brigade.rank import dynamo_stub
from brigade.runner import machine, ranks
from brigade.runner.server import SERVER, ServerLost

DEADLINE_DIVISOR = 4  # once a check has reached its deadline, later checks get a quarter of the usual time
BROKEN_NOTE = "The check fails with the reference solution, too. It is not your mistake; please report it."
HUNG_LIMIT = 2  # once this many checks have reached their deadline, no other check runs


@dataclass(frozen=True)
class Conditions:
    """The conditions under which checks run. The same seed gives the same random cases."""

    seed: int = 0
    backend: str = "gloo"
    share_gpu: bool = False
    deadline_s: float | None = None  # for one run of ranks
    ends_at: float = math.inf  # the value of time.monotonic() by which a check has to end
    is_debugged: bool = False


def run_check(
    check: Check,
    target: str | Path,
    conditions: Conditions,
    prior_source: str = "own",
    sources: Sources | None = None,
    replaced: Collection[int] | None = None,
) -> Outcome:
    """Run one check on the submission in `target`, or on the texts `sources` instead, and return the outcome.

    `prior_source` and `replaced` select the earlier modules (see `submission.read`). Only KeyboardInterrupt and similar
    exceptions are raised.
    """
    started = time.monotonic()
    outcome = Outcome(
        check, prior_source=prior_source, repeat=make_repeat_command(check, target, conditions, prior_source)
    )
    context = None
    try:
        context = CheckContext(
            read_sources(target, check.module, prior_source, replaced) if sources is None else sources,
            seed=derive_seed(conditions.seed, check.name),
            backend=conditions.backend,
            share_gpu=conditions.share_gpu,
            deadline_s=conditions.deadline_s,
            ends_at=conditions.ends_at,
            is_debugged=conditions.is_debugged,
        )
        with context.take_turn():
            check.function(context)
        if context.contradiction:
            raise context.contradiction
        outcome.status = "passed"
    except CheckFailed as failed:
        outcome.verdict = failed.verdict
        outcome.status = "not written" if failed.verdict.part else "failed"
        is_import = failed.verdict.error in ("ImportError", "ModuleNotFoundError")
        is_ours = is_import and not failed.verdict.location  # perhaps of a scenario
        if is_ours and context and is_broken(check, conditions, context):
            outcome.status, outcome.verdict = "error", replace(failed.verdict, ending=BROKEN, note=BROKEN_NOTE)
    except ServerLost as lost:
        outcome.status, outcome.verdict = "error", Verdict("the ranks can be started", str(lost), ending="lost")
    except CourseError as error:
        outcome.status, outcome.verdict = "error", Verdict("the check can run here", str(error), ending="refused")
    except Exception as error:  # a submission that the check did not foresee is wrong, but must not crash the grader
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        got, ending = f"the check could not examine what the ranks returned ({reason})", "unexamined"
        if context and is_broken(check, conditions, context):
            got, ending = f"the check raised {reason}. {BROKEN_NOTE}", BROKEN
        outcome.status, outcome.verdict = "error", Verdict("the check finishes", got, ending=ending)
        outcome.exception = error
    outcome.printed = context.output if context else []
    outcome.seconds = time.monotonic() - started
    return outcome


def is_broken(check: Check, conditions: Conditions, context: CheckContext) -> bool:
    """Return whether a check that raised an exception on a submission does not pass with the reference either."""
    own = next(path for name, (path, _) in context.sources.items() if name.startswith(get_module(check.module).package))
    return HAS_SOLUTIONS and (is_sealed(own) or not run_check(check, "solutions", conditions).passed)


def run_checks(
    checks: Sequence[Check],
    target: str | Path,
    conditions: Conditions,
    prior_source: str = "own",
    at_a_time: int = 1,
    in_order: bool = True,
) -> Iterator[Outcome]:
    """Run checks, several at a time, and yield their outcomes in the order of the checks, or else as they finish.

    A check does not run if the check that it needs did not pass. Ranks mostly wait for each other, so two checks at a
    time use two cores better than one check. Once a check has reached its deadline, later checks get less time. After
    `HUNG_LIMIT` such checks, no other check runs.
    """
    hung = 0
    if len(checks) > 1:
        compile_student_files(target, max(check.module for check in checks), prior_source)
    results: dict[tuple[int, str], Future[Outcome]] = {(check.module, check.name): Future() for check in checks}

    def run_next(check: Check) -> Outcome:
        outcome = run_unless_in_vain(check)
        results[check.module, check.name].set_result(outcome)
        return outcome

    def run_unless_in_vain(check: Check) -> Outcome:
        nonlocal hung
        needed = results.get((check.module, check.needs))  # its check is earlier in the list and so has started
        reason = f"{hung} earlier checks reached their time limit" if hung >= HUNG_LIMIT else ""
        if needed and not (first := needed.result()).passed:
            reason = f"first {first.check.number}"
        if reason:
            return Outcome(
                check, verdict=make_not_run(reason), repeat=make_repeat_command(check, target, conditions, prior_source)
            )
        usual_s = conditions.deadline_s or ranks.DEADLINE_S[conditions.backend]
        is_shortened = hung > 0
        outcome = run_check(
            check,
            target,
            replace(conditions, deadline_s=usual_s / DEADLINE_DIVISOR) if is_shortened else conditions,
            prior_source,
        )
        if outcome.ending == "deadline":
            if is_shortened:
                note = "This check got less time than usual because an earlier check reached its time limit."
                outcome.verdict = replace(outcome.verdict, note=note)
            hung += 1
        return outcome

    if at_a_time == 1:
        yield from map(run_next, checks)
        return
    pool = ThreadPoolExecutor(at_a_time)
    try:
        futures = [pool.submit(run_next, check) for check in checks]
        for future in futures if in_order else as_completed(futures):
            yield future.result()
    except KeyboardInterrupt:
        SERVER.close()  # ends the ranks that the other checks wait for
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compile_student_files(target: str | Path, number: int, prior_source: str) -> None:
    """Compile the files up to this module once, in a rank. Otherwise every rank of every check compiles them again."""
    try:
        sources = read(target, number, prior_source).sources
        sources = {name: source for name, source in sources.items() if not is_sealed(source[0])}
        if sources:
            [codes] = ranks.run_ranks(compile_texts, sources, world_size=1)
            keep_code(sources, codes)
    except (CourseError, ranks.RankFailure):
        pass  # every check reports this error


def prepare() -> None:
    """Import the modules that checks need, in this process and in the process from which ranks are forked."""
    start_server()
    with limit_threads():
        dynamo_stub.import_torch()
    import torch

    import brigade.checks.reference  # noqa: F401

    machine.hide_gpus()  # this process computes the expected values on the CPU
    torch.set_num_threads(1)  # if torch was imported earlier; this applies to the current thread only


@contextlib.contextmanager
def limit_threads() -> Iterator[None]:
    """Make torch and numpy use one thread if they are imported in this block.

    The tensors of checks are small; on a busy machine, a second thread only adds waiting time.
    """
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    os.environ |= dict.fromkeys(before, "1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_sources(
    target: str | Path, number: int, prior_source: str, replaced: Collection[int] | None = None
) -> Sources:
    """Return the texts of a submission. Raise CheckFailed if it cannot be read."""
    try:
        return read(target, number, prior_source, replaced).sources
    except CourseError as error:
        raise CheckFailed(Verdict("the submission can be read", str(error), ending="unreadable")) from None


def derive_seed(seed: int, name: str) -> int:
    """Return the seed of one check, so that running a check alone repeats its cases."""
    return random.Random(f"{seed}/{name}").randrange(2**63)


def choose_backend() -> str:
    """Return "nccl" if there are at least two GPUs, else "gloo"."""
    return "nccl" if machine.count_gpus() >= 2 else "gloo"


def make_repeat_command(check: GradedCheck, target: str | Path, conditions: Conditions, prior_source: str) -> str:
    """Return the command that runs this check alone, on the same random cases."""
    words = ["brigade", "check", str(check.module), "--only", check.name.removeprefix("test_")]
    words += ["--seed", str(conditions.seed)]
    if resolve_target(target).resolve() != (ROOT / "lessons").resolve():
        words += ["--target", str(target)]
    if prior_source != "own":
        words += ["--prior", prior_source]
    if conditions.backend != choose_backend():
        words += ["--backend", conditions.backend]
    return shlex.join(words)
