"""The pytest plugin of the graded checks: options, the `submission` fixture, points, and feedback without tracebacks.

A check takes the fixture and nothing else, so that the suite can also call it with a mutant:

    @pytest.mark.points(2)
    def test_gradients_are_averaged(submission):
        \"""After finish_grad_sync every gradient is the average over the group.\"""
        case = submission.case("Plain", world_size=2)
        results = submission.run(training.train, case.for_ranks(...), world_size=2)
        expect_equal("...", [result["gradients"][0] for result in results], case.gradients())
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from brigade.checks.diagnose import exceptions
from brigade.checks.server import start_server
from brigade.checks.verdict import CheckFailed, NotWritten
from brigade.course.modules import MODULES, CourseError
from brigade.course.submission import Sources, directory, read
from brigade.rank import dynamo_stub
from brigade.runner import ranks

HUNG = pytest.StashKey[int]()  # checks of this run that reached their deadline
HURRY = 4  # with --hurry those after the first get so much less time
HURRY_LIMIT = 2  # ... and after so many no check runs any more


@dataclass
class Checked:
    """The submission that a check examines: runs scenarios on it, and draws random cases.

    It holds the text of the submission's modules; only ranks import them.
    """

    sources: dict[str, tuple[str, str]]
    seed: int = 0
    backend: str = "gloo"
    share_gpu: bool = False
    deadline: float | None = None
    debug: bool = False
    rng: random.Random = field(init=False)
    output: list[str] = field(init=False, default_factory=list)
    failure_kind: str = field(init=False, default="")  # of the run that failed: see `ranks.RankFailure`

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def worlds(self, *sizes: int) -> list[int]:
        """The world sizes to check: those asked for; only 1 under --debug."""
        return [1] if self.debug else list(sizes)

    def case(self, model: str, world_size: int, **options: Any) -> Any:
        """A random training problem; see `reference.Case`."""
        from brigade.checks.reference import Case

        return Case(self.rng, model, world_size, **options)

    def run(self, scenario: Callable[..., Any], *args: Any, world_size: int, mode: str = "hold") -> ranks.RankResults:
        """What each rank returns from the scenario. Raises CheckFailed with the run's story when there is none.

        If there are fewer GPUs than ranks and sharing is not allowed, the ranks run on the CPU.
        """
        try:
            results = ranks.run_ranks(
                scenario,
                *args,
                world_size=world_size,
                backend=self.backend if self.share_gpu or world_size <= gpus() else "gloo",
                share_gpu=self.share_gpu,
                deadline=self.deadline,
                mode=mode,
                packages={"submission": self.sources},
                seed=self.rng.randrange(2**31),
                terminal=self.debug,
            )
        except ranks.RankFailure as failure:
            self.output = failure.output
            self.failure_kind = failure.kind
            raise story(failure, self.sources) from None
        self.output = results.output
        return results


def story(failure: ranks.RankFailure, sources: Sources) -> CheckFailed:
    """A failed run in the words of a failed check; `sources` are what ran."""
    if failure.part:
        return NotWritten(f"{failure.part} is written", "it is still the skeleton's `raise NotImplementedError`")
    expected = {
        "exception": "every rank runs to the end without an exception",
        "deadline": "every rank gets to the end of the step",
        "deadlock": "all ranks call the same collectives, so that none waits forever",
        "mismatch": "all ranks call the same collectives in the same order",
    }.get(failure.kind, "every rank delivers its result")
    usual = {
        "deadline": "a loop that does not end, or a rank that waits for something that never comes?",
        "deadlock": "a collective is skipped on some ranks only, by a condition that is not the same on all of them?",
        "mismatch": "a collective is skipped or added on some ranks only, or the order depends on the rank?",
        "died": "the process was ended from inside (os._exit, a crash): a check must run to its end",
    }
    cause = usual.get(failure.kind, "")
    if failure.kind == "exception":
        cause = exceptions.of_exception(failure, sources)
    return CheckFailed(expected, "\n".join([failure.summary, *failure.lines]), cause)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("brigade", "Bucket Brigade")
    group.addoption("--target", default="lessons", help="lessons (default), solutions, or the directory to check")
    group.addoption("--prior", default="own", choices=("own", "reference"), help="whose earlier modules are used")
    group.addoption(
        "--backend", default=None, choices=("gloo", "nccl"), help="default: nccl where there are GPUs enough"
    )
    group.addoption("--share-gpu", action="store_true", help="several NCCL ranks on one GPU: for correctness only")
    group.addoption("--seed", type=int, default=None, help="repeat the random cases of an earlier run")
    group.addoption("--deadline", type=float, default=None, help="seconds that one run of ranks may take")
    group.addoption("--hurry", action="store_true", help="when a check reached its deadline, wait less for the others")
    group.addoption("--debug-rank", action="store_true", help="world size 1, no deadline: breakpoint() works, with -s")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "points(n): what a graded check is worth")
    if config.getoption("--seed") is None:
        config.option.seed = random.randrange(10**6)
    try:
        directory(config.getoption("--target"))
        if config.getoption("--prior") == "reference":
            directory("solutions")
        if config.getoption("--backend") == "nccl":
            ranks.nccl_environment(1, share_gpu=False)
    except CourseError as error:
        raise pytest.UsageError(str(error)) from None
    if not config.getoption("collectonly"):
        start_server()
        dynamo_stub.import_torch()
        import torch

        import brigade.checks.reference  # noqa: F401

        torch.set_num_threads(1)  # the truth is small, and on a busy machine a second thread is waited for
    if config.getoption("--backend") is None:
        config.option.backend = default_backend()


def default_backend() -> str:
    """nccl where there is a GPU for each of two ranks, else gloo."""
    return "nccl" if gpus() >= 2 else "gloo"


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_report_header(config: pytest.Config) -> str:
    option = config.option
    return f"brigade: target {option.target}, prior {option.prior}, backend {option.backend}, seed {option.seed}"


def module_of(path: Path) -> int:
    """The number of the module that a test file checks."""
    for entry in MODULES:
        if path.name == entry.checks.name:
            return entry.number
    raise CourseError(f"{path.name} checks no module of the course")


@pytest.fixture
def submission(request: pytest.FixtureRequest) -> Checked:
    """The module under --target that this file checks, with its earlier modules."""
    option = request.config.option
    try:
        found = read(option.target, module_of(request.path), option.prior)
    except CourseError as error:
        raise CheckFailed("the submission can be read", str(error)) from None
    hung = request.config.stash.get(HUNG, 0) if option.hurry else 0
    if hung == HURRY_LIMIT:
        raise CheckFailed("the checks before this one come to an end", f"{hung} of them did not: this one was not run")
    checked = Checked(
        found.sources,
        seed=seed_of(option.seed, request.node.name),
        backend=option.backend,
        share_gpu=option.share_gpu,
        deadline=(option.deadline or ranks.DEADLINE_S[option.backend]) / HURRY if hung else option.deadline,
        debug=option.debug_rank,
    )
    request.node.brigade_checked = checked
    return checked


def seed_of(seed: int, name: str) -> int:
    """One seed per check, so that running a check alone repeats its cases."""
    return random.Random(f"{seed}/{name}").randrange(2**31)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    outcome = yield
    report = outcome.get_result()
    points = item.get_closest_marker("points")
    if points:
        report.brigade_points = points.args[0]
        report.brigade_title = (getattr(item.obj, "__doc__", None) or item.name).strip().splitlines()[0]
    checked = getattr(item, "brigade_checked", None)
    for rank, printed in enumerate(checked.output if checked and call.when == "call" else []):
        if printed.strip():
            shown = "\n".join(f"[rank {rank}] {line}" for line in printed.rstrip().splitlines())
            report.sections.append((f"what rank {rank} printed", shown))
    if call.excinfo is None or not isinstance(call.excinfo.value, (CheckFailed, CourseError)):
        return
    report.outcome = "failed"
    text = str(call.excinfo.value)
    if checked and checked.failure_kind == "deadline":
        hung = item.config.stash.get(HUNG, 0)
        item.config.stash[HUNG] = hung + 1
        if item.config.option.hurry and hung:
            text += "\n          It was given less time than usual, since a check before it had not come to its end."
    if points and not isinstance(call.excinfo.value, NotWritten):
        text += f"\nrepeat    {repeat(item)}"
    report.brigade_unwritten = isinstance(call.excinfo.value, NotWritten)
    report.longrepr = text
    if call.when == "setup":
        report.when = "call"  # a submission that cannot be read is a failed check, not an error of ours


def repeat(item: pytest.Item) -> str:
    """The command that runs this check alone, on the same random cases."""
    option = item.config.option
    words = ["brigade", "check", str(module_of(item.path)), "--only", item.name.removeprefix("test_")]
    words += ["--seed", str(option.seed)]
    if directory(option.target).resolve() != directory("lessons").resolve():
        words += ["--target", str(option.target)]
    if option.prior != "own":
        words += ["--prior", option.prior]
    if option.backend != default_backend():
        words += ["--backend", option.backend]
    return shlex.join(words)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The score, where graded checks ran."""
    reports = [r for key in ("passed", "failed") for r in terminalreporter.stats.get(key, [])]
    graded = [r for r in reports if hasattr(r, "brigade_points")]
    if graded:
        earned = sum(r.brigade_points for r in graded if r.passed)
        terminalreporter.write_line(f"{earned} of {sum(r.brigade_points for r in graded)} points")
