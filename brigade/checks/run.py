"""Run checks on a submission. Commands, graders, mutant tests and pytest all use `run_check`."""

from __future__ import annotations

import os
import random
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from brigade.checks.collect import Check
from brigade.checks.context import CheckContext, Conditions
from brigade.checks.verdict import BROKEN, CheckFailed, Outcome, Verdict, make_not_run
from brigade.course.listing import GradedCheck
from brigade.course.modules import HAS_SOLUTIONS, ROOT, CourseError, get_module
from brigade.course.submission import Sources, compile_texts, is_sealed, keep_code, read, resolve_target
from brigade.rank import dynamo_stub
from brigade.runner import machine, ranks
from brigade.runner.server import SERVER, ServerLost

BROKEN_NOTE = "The check fails with the reference solution, too. It is not your mistake; please report it."
HUNG_LIMIT = 2  # once this many checks have reached their deadline, no other check runs


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
        if sources is None:
            sources = read_sources(target, check.module, prior_source, replaced)
        # The seed depends on the check's name, so that running the check alone repeats its cases.
        seed = random.Random(f"{conditions.seed}/{check.name}").randrange(2**63)
        context = CheckContext(sources, replace(conditions, seed=seed))
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
        if is_ours and is_broken(check, conditions, sources):
            outcome.status, outcome.verdict = "error", replace(failed.verdict, ending=BROKEN, note=BROKEN_NOTE)
    except ServerLost as lost:
        outcome.status, outcome.verdict = "error", Verdict("the ranks can be started", str(lost), ending="lost")
    except CourseError as error:
        outcome.status, outcome.verdict = "error", Verdict("the check can run here", str(error), ending="refused")
    except Exception as error:  # a submission that the check did not foresee is wrong, but must not crash the grader
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        got, ending = f"the check could not examine what the ranks returned ({reason})", "unexamined"
        if context and is_broken(check, conditions, sources):
            got, ending = f"the check raised {reason}. {BROKEN_NOTE}", BROKEN
        outcome.status, outcome.verdict = "error", Verdict("the check finishes", got, ending=ending)
        outcome.exception = error
    outcome.printed = context.output if context else []
    outcome.seconds = time.monotonic() - started
    return outcome


def is_broken(check: Check, conditions: Conditions, sources: Sources) -> bool:
    """Return whether a check that raised an exception on a submission does not pass with the reference either."""
    own = next(path for name, (path, _) in sources.items() if name.startswith(get_module(check.module).package))
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

    A check does not run if the check that it needs did not pass, or after `HUNG_LIMIT` checks reached their deadline.
    """
    hung = 0
    if len(checks) > 1:
        compile_student_files(target, max(check.module for check in checks), prior_source)
    results: dict[tuple[int, str], Future[Outcome]] = {(check.module, check.name): Future() for check in checks}

    def run_unless_in_vain(check: Check) -> Outcome:
        nonlocal hung
        needed = results.get((check.module, check.needs))  # its check is earlier in the list and so has started
        if needed and not (first := needed.result()).passed:
            outcome = Outcome(check, verdict=make_not_run(f"first {first.check.number}"))
        elif hung >= HUNG_LIMIT:
            outcome = Outcome(check, verdict=make_not_run(f"{hung} earlier checks reached their time limit"))
        else:
            outcome = run_check(check, target, conditions, prior_source)
            hung += outcome.ending == "deadline"
        results[check.module, check.name].set_result(outcome)
        return outcome

    if at_a_time == 1:
        yield from map(run_unless_in_vain, checks)
        return
    pool = ThreadPoolExecutor(at_a_time)
    try:
        futures = [pool.submit(run_unless_in_vain, check) for check in checks]
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


def start_server() -> None:
    """Start the server from which ranks are forked, unless it is running. It imports torch in the meantime.

    Isolated ranks cannot read the course's files, so they can use only modules that the server has imported.
    """
    SERVER.preload |= {"brigade.checks.edge_case_models", "brigade.checks.tiny_lm"}
    SERVER.start()


def prepare() -> None:
    """Import the modules that checks need, in this process and in the process from which ranks are forked."""
    start_server()
    # The tensors of checks are small; on a busy machine, a second thread only adds waiting time.
    limits = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ}
    os.environ |= limits
    dynamo_stub.import_torch()
    for name in limits:
        del os.environ[name]
    import torch

    import brigade.checks.reference  # noqa: F401

    machine.hide_gpus()  # this process computes the expected values on the CPU
    torch.set_num_threads(1)  # if torch was imported earlier; this applies to the current thread only


def read_sources(
    target: str | Path, number: int, prior_source: str, replaced: Collection[int] | None = None
) -> Sources:
    """Return the texts of a submission. Raise CheckFailed if it cannot be read."""
    try:
        return read(target, number, prior_source, replaced).sources
    except CourseError as error:
        raise CheckFailed(Verdict("the submission can be read", str(error), ending="unreadable")) from None


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
