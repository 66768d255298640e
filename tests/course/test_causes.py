"""The cause of a rank's exception is named only if the exception, its frames and the text prove it.

`test_mutants.py` proves most causes. These tests are about the others, and about exceptions without a known cause.
"""

from __future__ import annotations

import pytest

from brigade.course.checks.context import SECOND_THREAD, USUAL_CAUSES, CheckContext, to_failure
from brigade.course.checks.diagnose.evidence import find_skipped_call
from brigade.course.checks.diagnose.exceptions import explain_exception, find_missing_returns
from brigade.course.table.listing import Part
from brigade.course.table.skeletons import find_part_in
from brigade.ranks.runner.failure import OTHER_SIZE, RankFailure, remove_jargon
from brigade.ranks.runner.server import SERVER
from brigade.ranks.sandbox import enter
from brigade.ranks.verdict import CheckFailed


def explain(error: str, message: str, lines: tuple[str, ...] = (), own: bool = True, text: str = "") -> tuple[str, str]:
    """Return the likely cause and the name of the symptom. `lines` are those of the frames, `text` the submission's."""
    frames = [("f.py", number, "f", line) for number, line in enumerate(lines, 1)]
    failure = RankFailure("exception", f"rank 0 raised {error}", [], 0, error, message=message, frames=frames)
    failure.own = own
    return explain_exception(failure, {"m.f": ("/somewhere/f.py", text)})


def explain_wait(text: str) -> tuple[str, str]:
    return explain("AttributeError", NO_WAIT, ("h.wait()",), text=text)


NOT_CALLABLE = "'NoneType' object is not callable"
NO_WAIT = "'NoneType' object has no attribute 'wait'"
ARGUMENT = "f() takes 1 positional argument but 2 were given"
REGISTERED = "p.register_post_accumulate_grad_hook(self.launch(p))"
ASSIGNED = "attempting to assign a gradient of size '[340]' to a tensor of size '[20, 17]'."


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("submission.m01_naive_ddp.helpers", True),
        ("helpers", True),
        ("submission.m01_naive_ddp.x", True),
        ("xgboost", False),
    ],
)
def test_a_helper_file_is_named_where_it_is_missing(name, is_named, tmp_path):
    """A relative import, or one of a file beside the module, finds no file. A package may not be installed."""
    (tmp_path / "helpers.py").touch()
    failure = RankFailure("exception", "", [], 0, "ModuleNotFoundError", message=f"No module named '{name}'")
    cause, symptom = explain_exception(
        failure, {"m01_naive_ddp.naive_ddp": (str(tmp_path / "naive_ddp.py"), "import x")}
    )
    assert (symptom == "helper file") == is_named
    assert not is_named or f"{name.rpartition('.')[2]}.py" in cause


EXPLAINED = [
    (explain("BdbQuit", "(no message)"), "breakpoint"),
    (explain("TypeError", NOT_CALLABLE, ("loss.backward()",), own=False), "called hook"),
    (explain("TypeError", NOT_CALLABLE, ("self.f()",)), ""),
    (explain("TypeError", "anything", (REGISTERED,)), ""),
    (explain("TypeError", ARGUMENT, own=False), "signature"),
    (explain("TypeError", ARGUMENT), ""),  # a call of the submission's own
    (explain("AttributeError", NO_WAIT), ""),
    (explain_wait("dist.all_reduce(t)\nh = dist.broadcast(t, async_op=True)"), ""),
    (explain_wait("x = 1\nh = all_reduce(t, async_op=False)"), "no result"),
    (
        explain("ValueError", "Check failed: outputShape[0] * worldSize == inputShape[0] (768 vs. 192)."),
        "unequal shards",
    ),
    (explain("AttributeError", "'NoneType' object has no attribute 'view'", ("x = p.view(-1)",)), ""),
    (explain("IndexError", "list index out of range", ("start, end = pairs[i]",)), ""),
    (explain("KeyError", "'layers.0.weight'", own=False), ""),
    (explain("RuntimeError", ASSIGNED, ("p.grad = piece",)), "assigned gradient"),
]


def test_causes(snapshot):
    assert [symptom for (_, symptom), _ in EXPLAINED] == [expected for _, expected in EXPLAINED]
    snapshot("causes", "".join(f"{symptom}: {cause}\n" for (cause, symptom), _ in EXPLAINED if symptom))
    assert all(bool(cause) == bool(symptom) for (cause, symptom), _ in EXPLAINED)


def test_a_refused_system_call_is_explained_where_the_kernel_refuses_calls(monkeypatch):
    refused = "PermissionError", "[Errno 1] Operation not permitted", ("socket.socket()",)
    assert explain(*refused) == ("", "")
    monkeypatch.setattr(SERVER, "sandbox", enter.Sandbox(uid=1, reservation=0))
    assert explain(*refused)[1] == "refused call"
    assert explain("PermissionError", "[Errno 13] Permission denied: '/x'", ("open('/x')",)) == ("", "")
    monkeypatch.setattr(SERVER, "sandbox", enter.Sandbox(uid=1, reservation=0, offline=False))
    assert explain(*refused) == ("", "")


@pytest.mark.parametrize(
    ("error", "message", "expected"),
    [
        ("OSError", "Load averages are unobtainable", "hidden load"),
        ("KeyError", "'getpwuid(): uid not found: 64100'", "no user name"),
        ("OSError", "No username set in the environment", "no user name"),  # Python 3.13
        ("OperationalError", "access permission denied", "refused lock"),
    ],
)
def test_what_an_isolated_rank_cannot_do_is_explained(error, message, expected, monkeypatch):
    """`test_switch.py` shows that isolated ranks raise exceptions with these messages."""
    assert explain(error, message) == ("", "")
    monkeypatch.setattr(SERVER, "sandbox", enter.Sandbox(uid=1, reservation=0))
    assert explain(error, message)[1] == expected
    assert explain(error, "another message") == ("", "")


LOST_TENSOR = 'File "multiprocessing/resource_sharer.py", line 82\nPermissionError: [Errno 1] Operation not permitted'


@pytest.mark.parametrize("printed", [LOST_TENSOR, LOST_TENSOR.replace("[Errno 1]", "[Errno 13]"), ""])
@pytest.mark.parametrize("is_isolated", [True, False])
def test_a_tensor_that_another_process_could_not_send_explains_a_deadline(printed, is_isolated, monkeypatch):
    """A DataLoader with a worker waits for it until the deadline."""
    monkeypatch.setattr(SERVER, "sandbox", enter.Sandbox(uid=1, reservation=0) if is_isolated else None)
    failure = RankFailure("deadline", "stopped after 20 s", [], output=["", printed])
    likely_cause = to_failure(failure, {}).verdict.likely_cause
    is_explained = is_isolated and printed == LOST_TENSOR
    assert likely_cause.endswith("Load the data in the rank itself, with num_workers=0.") == is_explained
    assert is_explained or likely_cause.startswith("a loop does not end")


@pytest.mark.parametrize("path", ["/proc/meminfo", "/proc", "/sys/fs/cgroup", "/dev/stderr"])
def test_a_hidden_file_is_explained_where_files_are_hidden(path, monkeypatch):
    missing = "FileNotFoundError", f"[Errno 2] No such file or directory: {path!r}", (f"open({path!r})",)
    assert explain(*missing) == ("", "")
    monkeypatch.setattr(SERVER, "sandbox", enter.Sandbox(uid=1, reservation=0))
    assert explain(*missing)[1] == "hidden file"
    unhidden = "FileNotFoundError", "[Errno 2] No such file or directory: '/procs'", ("open('/procs')",)
    assert explain(*unhidden) == ("", "")


RAISED = RankFailure("exception", "", [], 0, "RuntimeError", message="can't start new thread")
DIED = RankFailure("died", "", [], 0, output=["libgomp: Thread creation failed: Resource temporarily unavailable"])


@pytest.mark.parametrize("failure", [RAISED, DIED], ids=lambda failure: failure.kind)
@pytest.mark.parametrize("memory", [None, 1 << 26])
def test_a_second_thread_is_explained_in_a_run_with_little_memory(failure, memory, monkeypatch):
    def fail(*arguments, **options):
        raise failure

    monkeypatch.setattr(CheckContext, "_start", fail)
    with pytest.raises(CheckFailed) as caught:
        CheckContext({}).run(fail, world_size=1, memory=memory)
    assert (caught.value.verdict.likely_cause == SECOND_THREAD) == (memory is not None)


def test_an_exception_inside_a_registered_lambda_is_not_blamed_on_its_registration():
    line = "p.register_post_accumulate_grad_hook(lambda _: self.mark_ready(0))"
    frames = [("f.py", 1, "<lambda>", line), ("f.py", 2, "mark_ready", "self.nothing")]
    failure = RankFailure("exception", "rank 0 raised AttributeError", [], 0, "AttributeError", frames=frames)
    failure.own = True
    assert explain_exception(failure, {}) == ("", "")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f() -> int:\n    x = 1\n", ["f"]),
        ("def f() -> None:\n    x = 1\n    return\n", []),
        ("def f() -> list:\n    x = 1\n    yield x\n", []),
        ('def f() -> int:\n    """Of a protocol."""\n', []),
        ("def f() -> int:\n    x = 1\n    raise NotImplementedError\n", []),
    ],
)
def test_a_forgotten_return(text, names):
    assert find_missing_returns(text) == names


MESSAGE = "rank 0 is not part of {}; got '{}'"


def test_no_name_of_the_toolkit_is_quoted():
    message = MESSAGE.format("group <brigade.ranks.rank.strict.StrictGroup object at 0x7f85>", "StrictWork")
    assert remove_jargon(message) == MESSAGE.format("process_group", "Work")
    aborted = "hello\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    aborted += "  what():  [enforce fail at /__w/pytorch/pair.cc:454] op.preamble.length <= op.nbytes. 8 vs 4"
    assert remove_jargon(aborted) == "hello\n" + OTHER_SIZE


def test_a_mismatch_that_gloo_notices_first_is_told_as_a_mismatch():
    raised = RankFailure("exception", "rank 0 raised RuntimeError", [], 0, "RuntimeError", message=OTHER_SIZE)
    died = RankFailure("died", "rank 1 died without a result", [], 1, output=["", OTHER_SIZE])
    for failure in (raised, died):
        verdict = to_failure(failure, {}).verdict
        assert verdict.ending == "mismatch" and verdict.likely_cause == USUAL_CAUSES["mismatch"]


@pytest.mark.parametrize(
    ("file", "function", "part"),
    [
        ("overlapped_ddp.py", "no_sync", Part(3, "d")),
        ("plan.py", "plan_units", Part(11, "a")),  # not the module's main file
        ("overlapped_ddp.py", "own_helper", None),
        ("bucketed_ddp.py", "mark_ready", None),  # two functions have this name
    ],
)
def test_an_exception_names_the_part_that_raised_it(file, function, part):
    frames = [("scenario.py", 3, "train", "step()"), (file, 7, function, "raise ValueError")]
    lines = [f"  {name}, line {line}, in {where}" for name, line, where, _ in frames]
    failure = RankFailure("exception", "rank 0 raised ValueError", lines, 0, "ValueError", frames=frames)
    verdict = to_failure(failure, {"m.one": (f"/submission/{file}", "")}).verdict
    assert find_part_in(file, function) == part
    assert (f"{part} is in {function}" in verdict.got) == (part is not None) and verdict.part is None


SAVE, TRAIN = ("state_dict", 4), ("forward", 4)  # the caller of a launch, and its elements


@pytest.mark.parametrize(
    ("first", "second", "kind", "is_named"),
    [
        ([TRAIN, SAVE], [TRAIN], "deadlock", True),
        ([TRAIN, SAVE], [TRAIN], "mismatch", False),  # rank 1 is perhaps only slower
        ([SAVE, TRAIN], [TRAIN, ("forward", 5)], "mismatch", True),  # the first launches have the same size
        ([SAVE, SAVE], [SAVE, TRAIN], "mismatch", False),  # rank 1 has left the method early
        ([TRAIN, SAVE], [("forward", 5), TRAIN], "mismatch", False),  # the ranks differ before the method
        ([TRAIN, TRAIN], [TRAIN], "deadlock", False),
        ([TRAIN, SAVE], [TRAIN, ("step", 4)], "mismatch", False),  # rank 0 has perhaps skipped a launch of its step
    ],
)
def test_a_skipped_call_is_named_only_if_the_records_show_it(first, second, kind, is_named):
    common = {"kind": "launch", "group": "0", "ranks": [0, 1], "op": "all_gather", "dtype": "float32"}
    common |= {"reduce_op": None, "root": None}
    records = [
        [common | {"caller": caller, "phase": caller, "numel": n} for caller, n in calls] for calls in (first, second)
    ]
    assert bool(find_skipped_call(records, kind)) == is_named
