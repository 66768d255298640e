"""The argument of a check: it runs scenarios on the submission and draws random cases."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from brigade.course.checks.diagnose.evidence import find_skipped_call
from brigade.course.checks.diagnose.exceptions import explain_deadline, explain_exception
from brigade.course.table.listing import find_part
from brigade.course.table.skeletons import find_part_in
from brigade.ranks.borders import list_batches
from brigade.ranks.events import OPPOSITES, launches
from brigade.ranks.runner import machine, options, ranks
from brigade.ranks.runner.deadline import BUSY
from brigade.ranks.runner.failure import OTHER_SIZE
from brigade.ranks.texts import Sources
from brigade.ranks.verdict import USUAL_CAUSE, CheckFailed, Verdict, make_not_run

EXPECTED = {
    "exception": "every rank finishes without an exception",
    "deadline": "every rank finishes within the time limit",
    "deadlock": "all ranks call the same collectives, so no rank waits forever",
    "mismatch": "all ranks call the same collectives in the same order",
}
USUAL_CAUSES = {
    "deadline": "a loop does not end, or a rank waits for something that never arrives.",
    "deadlock": "some ranks skip a collective, because a condition differs between ranks.",
    "mismatch": "some ranks skip or add a collective, or have an order of their own, such as that of a set.",
    "died": "the submission ended the process (os._exit or a crash). Let every rank finish.",
}
USUAL_CAUSES_OF_MESSAGES = {  # if the run ends while all waiting ranks send or receive messages
    "deadlock": "a rank leaves out a message, names another peer, or waits too early.",
    "mismatch": "the two ranks are in different steps, or use different parts of the tensor.",
}

OTHER_DTYPE = "the buffer that receives has another dtype than the tensor that is sent."

OUT_OF_MEMORY = ("MemoryError", "can't allocate memory", "bad_alloc")  # in the exception of a rank
NO_SECOND_THREAD = ("can't start new thread", "Resource temporarily unavailable")  # also in what OpenMP prints
SECOND_THREAD = (
    "`brigade grade` also runs this with little memory, and then a rank may have only one thread and one process. "
    "Start no others, and do not call torch.set_num_threads."
)
MAX_FRAMES = 6  # of a traceback in a message


@dataclass(frozen=True)
class Conditions:
    """The conditions under which checks run. The same seed gives the same random cases."""

    seed: int = 0
    backend: str = "gloo"
    share_gpu: bool = False
    deadline_s: float | None = None  # for one run of ranks
    ends_at: float = math.inf  # the value of time.monotonic() by which a check has to end
    is_debugged: bool = False
    uses_hidden: bool = False  # whether checks may use cases that students never get: when they are graded
    stopped: threading.Event = field(
        default_factory=threading.Event, compare=False
    )  # set when no run may begin any more


@dataclass
class CheckContext:
    """The argument of a check. It runs scenarios on the submission and draws random cases with `rng`.

    `sources` contains the text of the submission's modules; only ranks import them.
    """

    sources: Sources
    conditions: Conditions = Conditions()
    rng: random.Random = field(init=False)
    output: list[str] = field(init=False, default_factory=list)
    contradiction: CheckFailed | None = field(init=False)  # why the check fails even if it passes

    def __post_init__(self) -> None:
        self.restart({})

    def restart(self, files: Sources) -> None:
        """Begin the check again, with the same random cases. These files take the place of the submission's."""
        self.sources = self.sources | files
        self.rng = random.Random(self.conditions.seed)
        self.contradiction = None

    def worlds(self, *sizes: int) -> list[int]:
        """Return the world sizes to check: `sizes`, or only 1 under --debug."""
        return [1] if self.conditions.is_debugged else list(sizes)

    def pair_worlds(self, sizes: Collection[int], *settings: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Return the world sizes to check, each with its element of all `settings`."""
        rows = list(zip(sizes, *settings, strict=True))
        worlds = self.worlds(*sizes)
        return [(world, *more) for world, (_, *more) in zip(worlds, rows[: len(worlds)], strict=True)]

    def case(self, model: str, world_size: int, **options: Any) -> Any:
        """Return a random training problem; see `reference.Case`."""
        from brigade.course.checks.reference import Case

        return Case(self.rng, model, world_size, **options)

    def run(
        self, scenario: Callable[..., Any], *args: Any, world_size: int, mode: str = "strict", memory: int | None = None
    ) -> ranks.RankResults:
        """Run the scenario and return the result of each rank. Raise CheckFailed if a rank has no result.

        If there are fewer GPUs than ranks and sharing is not allowed, the ranks run on the CPU. For `memory`, see
        `RunOptions`.
        """
        [results] = self._run(scenario, [args], world_size, mode=mode, memory=memory)
        return results

    @property
    def limits_memory(self) -> bool:
        """Whether a run can limit the memory of its ranks: see `RunOptions.memory`."""
        return options.RunOptions(backend=self.conditions.backend).witness is not None

    def run_each(self, scenario: Callable[..., Any], jobs_per_call: Sequence[ranks.PerRank]) -> list[ranks.RankResults]:
        """Call the scenario once for each element of `jobs_per_call` on the same ranks: see `run`."""
        return self._run(scenario, [[jobs] for jobs in jobs_per_call], len(jobs_per_call[0]))

    def _run(
        self,
        scenario: Callable[..., Any],
        args_per_call: Sequence[Sequence[Any]],
        world_size: int,
        memory: int | None = None,
        **more: Any,
    ) -> list[ranks.RankResults]:
        how = self.conditions
        more["backend"] = how.backend if how.share_gpu or world_size <= machine.count_gpus() else "gloo"
        try:
            results = self._start(scenario, args_per_call, world_size, memory=memory, share_gpu=how.share_gpu, **more)
        except ranks.RankFailure as failure:
            self.output = failure.output
            if memory and any(text in f"{failure.error} {failure.message}" for text in OUT_OF_MEMORY):
                expected = f"every rank finishes with {memory >> 20} MiB of memory, besides what torch needs"
                raise CheckFailed(replace(to_failure(failure, self.sources).verdict, expected=expected)) from None
            said = [failure.message, *(failure.output if failure.kind == "died" else ())]
            if memory and any(text in part for part in said for text in NO_SECOND_THREAD):
                verdict = to_failure(failure, self.sources).verdict
                raise CheckFailed(replace(verdict, likely_cause=SECOND_THREAD, hypothesis="second thread")) from None
            is_late = failure.kind == "deadline" and time.monotonic() >= how.ends_at
            note = "The time limit for the checks of this module was reached here." if is_late else ""
            raise to_failure(failure, self.sources, note) from None
        self.output = results[0].output
        expect_forms(scenario, results, args_per_call)
        self.contradiction = self.contradiction or find_contradictory_record(scenario, results, args_per_call)
        self.contradiction = self.contradiction or find_missing_content(scenario, results, args_per_call)
        return results

    def run_until_failure(
        self, scenario: Callable[..., Any], jobs_per_call: Sequence[ranks.PerRank], **options: Any
    ) -> list[ranks.RankResults | ranks.RankFailure]:
        """Call the scenario for each element of `jobs_per_call` on the same ranks, on the CPU, until a call fails.

        Return the results of the calls before, and the failure if there is one. For `options`, see `_start`. The
        records are not compared with borders, so a check must not rely on what they prove.
        """
        try:
            jobs = [[jobs] for jobs in jobs_per_call]
            results = self._start(scenario, jobs, len(jobs_per_call[0]), backend="gloo", **options)
        except ranks.RankFailure as failure:
            self.output = failure.output
            expect_forms(scenario, failure.completed, jobs)
            return [*failure.completed, failure]
        self.output = results[0].output
        expect_forms(scenario, results, jobs)
        return [*results]

    def _start(
        self,
        scenario: Callable[..., Any],
        args_per_call: Sequence[Sequence[Any]],
        world_size: int,
        *,
        memory: int | None = None,
        packages: Mapping[str, Sources] | None = None,
        usual_s: float = 0.0,
        **more: Any,
    ) -> list[ranks.RankResults]:
        """Run the scenario within the time that the check has. Raise RankFailure if a rank has no result.

        `packages` are importable beside the submission. The ranks have `usual_s` seconds, or the usual number. `more`
        are other fields of `RunOptions`.
        """
        if not hasattr(scenario, "make_form"):
            raise TypeError(f"{scenario.__qualname__} does not state what it returns: see forms.py")
        how = self.conditions
        usual_s = usual_s or (how.deadline_s or options.DEADLINE_S[how.backend]) * max(1, len(args_per_call) / 10)
        usual_s *= 3 if memory else 1  # such a run moves much data
        left_s = how.ends_at - time.monotonic()
        deadline_s, longest_s = (min(limit_s, left_s) for limit_s in (usual_s, BUSY * usual_s))
        if left_s <= 0 or how.stopped.is_set():
            raise CheckFailed(make_not_run("the time for the checks of its module is used up"))
        return ranks.run_calls(
            scenario,
            args_per_call,
            world_size=world_size,
            memory=memory,
            deadline=deadline_s,
            longest=longest_s,
            packages={"submission": self.sources, **(packages or {})},
            most_values=getattr(scenario, "most_values", options.MOST_VALUES),
            graded=True,
            seed=self.rng.randrange(2**63),
            terminal=how.is_debugged,
            **{"mode": "strict"} | more,
        )

    def try_run(self, scenario: Callable[..., Any], *args: Any, world_size: int) -> ranks.RankResults | None:
        """Run a scenario only to look for a cause. Return None if the run fails. Keep the failed check's output."""
        output = self.output
        try:
            return self.run(scenario, *args, world_size=world_size)
        except CheckFailed:
            return None
        finally:
            self.output = output


def expect_forms(
    scenario: Callable[..., Any], results_per_call: Sequence[ranks.RankResults], args_per_call: Sequence[Sequence[Any]]
) -> None:
    """Expect each result to have the form that its scenario states. See `forms.py`."""
    from brigade.course.checks.forms import find_mistake

    for results, args in zip(results_per_call, args_per_call[: len(results_per_call)], strict=True):
        for rank, result in enumerate(results):
            if mistake := find_mistake(scenario.make_form(*ranks.take_own(args, rank)), result):  # type: ignore[attr-defined]
                raise CheckFailed(
                    Verdict("each rank returns what it was asked for", mistake, rank=rank), results.events
                )


def find_contradictory_record(
    scenario: Callable[..., Any],
    results_per_call: Sequence[ranks.RankResults],
    args_per_call: Sequence[Sequence[Any]],
) -> CheckFailed | None:
    """Return the failure of a check for which a rank has written a record that its borders contradict, or None."""
    from brigade.course.checks.borders import find_contradiction

    reports = getattr(scenario, "reports", ())  # the kinds of events without which a record is not true
    for rank in range(len(results_per_call[0])):
        first = 0  # number of the call's first batch
        for results, args in zip(results_per_call, args_per_call, strict=True):
            jobs = args[0] if args and isinstance(args[0], ranks.PerRank) else []
            own = ranks.take_own(args, rank)
            steps = [*scenario.list_steps(*own)]  # type: ignore[attr-defined]
            if contradiction := find_contradiction(results.events[rank], jobs, rank, first, steps, reports):
                expected = "the record of every rank is true"
                return CheckFailed(Verdict(expected, contradiction, rank=rank, ending="record"), results.events)
            first += len(list_batches(own))
    return None


def find_missing_content(
    scenario: Callable[..., Any],
    results_per_call: Sequence[ranks.RankResults],
    args_per_call: Sequence[Sequence[Any]],
) -> CheckFailed | None:
    """Return the failure of a check in which launches carried something else than gradients, or None."""
    is_plain = getattr(scenario, "has_plain_steps", False)  # then it has one argument, the jobs of the ranks
    for results, (jobs, *_) in zip(results_per_call, args_per_call, strict=True) if is_plain else ():
        load_witness = ranks.SERVER.load_witness if results.carried is not None else None
        missing = load_witness().judge(results, jobs) if load_witness else ""
        if missing:
            expected = "the launches of a step carry its gradients"
            return CheckFailed(Verdict(expected, missing, ending="record"), results.events)
    return None


def to_failure(failure: ranks.RankFailure, sources: Sources, note: str = "") -> CheckFailed:
    """Return the exception that reports a failed run of `sources` as a failed check."""
    if part := find_part(failure):
        got = "it is still the skeleton's `raise NotImplementedError`"
        return CheckFailed(Verdict(f"{part} is written", got, ending="exception", part=part))
    kind = failure.kind
    if kind in ("exception", "died") and any(OTHER_SIZE in text for text in [failure.message, *failure.output]):
        kind = "mismatch"  # gloo noticed it before the monitor
    expected, cause = EXPECTED.get(kind, "every rank returns its result"), USUAL_CAUSES.get(kind, "")
    hypothesis = USUAL_CAUSE
    if kind in ("deadlock", "mismatch") and failure.waiting and set(OPPOSITES) >= set(failure.waiting):
        expected = "every message is received, with the length that its receiver expects"
        cause = USUAL_CAUSES_OF_MESSAGES[kind]
        if kind == "mismatch" and len({launch.dtype for own in failure.events for launch in launches(own)[-2:]}) > 1:
            cause = OTHER_DTYPE
    elif kind in ("deadlock", "mismatch") and (skipped := find_skipped_call(failure.events, kind)):
        cause, hypothesis = skipped, "skipped call"
    if kind == "exception":
        cause, hypothesis = explain_exception(failure, sources)
    elif kind == "deadline" and (found := explain_deadline(failure, sources))[0]:
        cause, hypothesis = found
    names = {Path(path).name for path, _ in sources.values()}
    own = [frame[:3] for frame in failure.frames if frame[0] in names]
    part = find_part_in(own[-1][0], own[-1][2]) if own else None
    where = [f"  {part} is in {own[-1][2]}"] if part else []
    return CheckFailed(
        Verdict(
            expected,
            "\n".join([failure.summary, *failure.lines[-MAX_FRAMES:], *where]),
            cause,
            hypothesis if cause else "",
            ending=kind,
            rank=failure.rank,
            location=own[-1] if own else None,
            error=failure.error or "",
            message=failure.message,
            note=note,
        ),
        failure.events,
    )
