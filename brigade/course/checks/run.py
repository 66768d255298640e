"""Run checks on a submission. Commands, graders, mutant tests and pytest all use `run_check`."""

from __future__ import annotations

import os
import random
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from brigade.course.checks.collect import Check
from brigade.course.checks.context import CheckContext, Conditions
from brigade.course.checks.outcome import Outcome
from brigade.course.table.listing import GradedCheck
from brigade.course.table.modules import HAS_SOLUTIONS, ROOT, get_module
from brigade.course.table.submission import Snapshot, resolve_target, take_snapshot
from brigade.ranks import dynamo_stub
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine
from brigade.ranks.runner.failure import SHORT
from brigade.ranks.runner.server import SERVER, ServerLost
from brigade.ranks.texts import Sources, holds_sealed, is_sealed
from brigade.ranks.verdict import BROKEN, COMPLETE, CheckFailed, Verdict, make_not_run

BROKEN_NOTE = "The check fails with the reference solution, too. It is not your mistake; please report it."
FIRST_GPU = Path("/dev/nvidia0")
MOST_GOT = 400  # letters of what was wrong with an answer, if ranks hold code of the reference
HUNG_LIMIT = 2  # once this many checks have reached their deadline, no other check runs


def run_check(
    check: Check,
    target: str | Path | Snapshot,
    conditions: Conditions,
    prior_source: str = "own",
    sources: Sources | None = None,
    replaced: Collection[int] | None = None,
) -> Outcome:
    """Run one check on the submission in `target`, or on the texts `sources` instead, and return the outcome.

    `prior_source` and `replaced` select the earlier modules (see `Snapshot.read`). Only KeyboardInterrupt and similar
    exceptions are raised.
    """
    started = time.monotonic()
    snapshot = take_snapshot(target)
    repeat = make_repeat_command(check, snapshot.name, conditions, prior_source)
    outcome = Outcome(check, "passed", prior_source=prior_source, repeat=repeat)
    context = None
    try:
        try:
            sources = sources or snapshot.read(check.module, prior_source, replaced)
        except UserError as error:
            raise CheckFailed(Verdict("the submission can be read", str(error), ending="unreadable")) from None
        # The seed depends on the check's name, so that running the check alone repeats its cases.
        seed = random.Random(f"{conditions.seed}/{check.name}").randrange(2**63)
        context = CheckContext(sources, replace(conditions, seed=seed))
        check.function(context)
        if context.contradiction:
            raise context.contradiction
    except CheckFailed as failed:
        outcome.status, outcome.verdict = "not written" if failed.verdict.part else "failed", failed.verdict
    except (ServerLost, UserError) as error:
        ending = "lost" if isinstance(error, ServerLost) else "refused"
        outcome.status, outcome.verdict = "error", Verdict("the check can run here", str(error), ending=ending)
    except Exception as error:  # a submission that the check did not foresee is wrong, but must not crash the grader
        reason = f"it raised {type(error).__name__}: {error}".splitlines()[0][:300]
        if isinstance(error, ValueError) and str(error).startswith("zip() argument"):
            reason = "lists that belong together have different lengths"
        got = f"the check could not examine what the ranks returned, because {reason}"
        outcome.status, outcome.verdict = "error", Verdict("the check finishes", got, ending="unexamined")
        outcome.exception = error
    if context and is_broken(check, outcome, conditions, context.sources):
        outcome.status, outcome.verdict = "error", replace(outcome.reason, ending=BROKEN, note=BROKEN_NOTE)
    outcome.printed = context.output if context else []
    if context and holds_sealed(context.sources):
        shorten(outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def shorten(outcome: Outcome) -> None:
    """Cut what ranks that hold code of the reference printed and returned. `make_exception_failure` cuts exceptions."""
    outcome.printed = [text[-SHORT // len(outcome.printed) :] for text in outcome.printed]
    if outcome.verdict and outcome.ending in (COMPLETE, "unexamined"):
        outcome.verdict = replace(outcome.verdict, got=outcome.verdict.got[:MOST_GOT])


def is_broken(check: Check, outcome: Outcome, conditions: Conditions, sources: Sources) -> bool:
    """Return whether a check, or an import of its scenario, raises an exception on the reference, too."""
    verdict = outcome.verdict
    is_import = verdict and verdict.error in ("ImportError", "ModuleNotFoundError") and not verdict.location
    if not HAS_SOLUTIONS or not (outcome.exception or is_import):
        return False
    own = next(path for name, (path, _) in sources.items() if name.startswith(get_module(check.module).package))
    return is_sealed(own) or not run_check(check, "solutions", conditions).passed


def run_checks(
    checks: Sequence[Check],
    target: str | Path | Snapshot,
    conditions: Conditions,
    prior_source: str = "own",
    at_a_time: int = 1,
    urgent: Sequence[Check] = (),
) -> Iterator[Outcome]:
    """Run checks, several at a time, and yield their outcomes in the order of the checks.

    The `urgent` ones start first. A check that needs another one follows it in the same thread, so no thread waits. It
    does not run if the other did not pass, and no check runs after `HUNG_LIMIT` checks reached their deadline. All
    checks judge the same text, even if a student saves a file before the last check starts.
    """
    hung = 0
    snapshot = take_snapshot(target)
    pool = ThreadPoolExecutor(at_a_time)
    futures: dict[tuple[int, str], Future[Outcome]] = {(check.module, check.name): Future() for check in checks}

    def run_unless_in_vain(check: Check) -> Outcome:
        nonlocal hung
        needed = futures.get((check.module, check.needs))
        if needed and not (first := needed.result()).passed:
            return Outcome(check, verdict=make_not_run(f"first {first.check.number}"))
        if hung >= HUNG_LIMIT:
            return Outcome(check, verdict=make_not_run(f"{hung} earlier checks reached their time limit"))
        outcome = run_check(check, snapshot, conditions, prior_source)
        hung += outcome.ending == "deadline"
        return outcome

    def run_with_followers(check: Check) -> None:
        try:
            futures[check.module, check.name].set_result(run_unless_in_vain(check))
        except BaseException as error:
            futures[check.module, check.name].set_exception(error)
        for other in checks:
            if (other.module, other.needs) == (check.module, check.name):
                run_with_followers(other)

    try:
        for check in dict.fromkeys((*urgent, *checks)):
            if (check.module, check.needs) not in futures:
                pool.submit(run_with_followers, check)
        for check in checks:
            yield futures[check.module, check.name].result()
    except KeyboardInterrupt:
        SERVER.close()  # ends the ranks that the other checks wait for
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def start_server() -> None:
    """Start the server from which ranks are forked, unless it is running. It imports torch in the meantime.

    Isolated ranks cannot read the course's files, so they can use only modules that the server has imported.
    """
    SERVER.preload |= {
        "brigade.course.checks.edge_case_models",
        "brigade.course.checks.forms",
        "brigade.course.checks.tiny_lm",
        "brigade.testing",
    }
    SERVER.start()


def prepare() -> None:
    """Import the modules that checks need, in this process and in the process from which ranks are forked."""
    start_server()
    import_needed()


def import_needed() -> None:
    """Import the modules that checks need in this process."""
    import pytest

    with pytest.MonkeyPatch.context() as variables:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            # The tensors of checks are small; on a busy machine, a second thread only adds waiting time.
            variables.setenv(name, os.environ.get(name, "1"))
        dynamo_stub.import_torch()
        import torch

        # Torch's C++ code counts the GPUs once. It finds none here, or the first backward on the CPU initialises CUDA.
        variables.setenv("CUDA_VISIBLE_DEVICES", "")
        torch.cuda.is_available()
    import brigade.course.checks.reference  # noqa: F401

    torch.set_num_threads(1)  # if torch was imported earlier; this applies to the current thread only


def choose_backend() -> str:
    """Return "nccl" if there are at least two GPUs, else "gloo"."""
    return "nccl" if machine.count_gpus() >= 2 else "gloo"


def find_uncounted_gpus() -> str:
    """Return a sentence if there are GPUs that `choose_backend` cannot count, otherwise "".

    Without NVIDIA's management library (NVML), torch counts GPUs with CUDA, which finds none after `prepare`.
    """
    if not FIRST_GPU.exists() or machine.read_driver_version():
        return ""
    return (
        "NVIDIA's management library (NVML) does not answer, so GPUs are not counted and the checks use gloo. "
        "--backend nccl uses the GPUs."
    )


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
    if conditions.share_gpu:
        words += ["--share-gpu"]
    return shlex.join(words)
