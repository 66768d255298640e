"""The cause of a rank's exception is named only if the exception, its frames and the text prove it."""

from __future__ import annotations

import re

import pytest
from in_ranks import course as functions

from brigade.checks.context import CheckContext, to_failure
from brigade.checks.diagnose.evidence import find_skipped_call
from brigade.checks.diagnose.exceptions import CALLED_HOOK, explain_exception, find_missing_returns, find_used_results
from brigade.checks.diagnose.parts import describe_part
from brigade.checks.verdict import CheckFailed
from brigade.course.submission import read
from brigade.runner.report import OTHER_SIZE, RankFailure, remove_jargon


def cause(error: str, message: str, texts: list[str] = (), own: bool = True, text: str = "") -> str:
    """Return the likely cause. `texts` are the lines of the frames, and `text` is the submission's text."""
    frames = [("f.py", line, "f", content) for line, content in enumerate(texts, 1)]
    failure = RankFailure(
        "exception", f"rank 0 raised {error}: {message}", [], 0, error, message=message, frames=frames
    )
    failure.own = own
    likely_cause, symptom = explain_exception(failure, {"m.f": ("/somewhere/f.py", text)})
    assert bool(likely_cause) == bool(symptom)
    return likely_cause


NONE = "'NoneType' object has no attribute 'wait'"
NO_VIEW = "'NoneType' object has no attribute 'view'"
UNEQUAL = "Check failed: outputShape[0] * worldSize == inputShape[0] (768 vs. 192)."
BEYOND = "list index out of range"
ARGUMENT = "f() takes 1 positional argument but 2 were given"
ENGINE = ["loss.backward()"]
REGISTERED = ["p.register_post_accumulate_grad_hook(self.launch(p))"]


@pytest.mark.parametrize(
    ("likely_cause", "message"),
    [
        (cause("BdbQuit", "(no message)"), "--debug"),
        (cause("TypeError", "expected Variable, but hook returned 'Work'", ENGINE, own=False), "It must return None"),
        (cause("TypeError", "'NoneType' object is not callable", ENGINE, own=False), CALLED_HOOK),
        (cause("TypeError", "'NoneType' object is not callable", ["self.f()"]), ""),
        (cause("RuntimeError", "anything", [*REGISTERED, "p.grad / 2"]), CALLED_HOOK),
        (cause("TypeError", "anything", REGISTERED), ""),
        (cause("TypeError", ARGUMENT, own=False), "signature differs"),
        (cause("TypeError", ARGUMENT), ""),  # a call of the submission's own
        (cause("TypeError", "Invalid function argument. Expected parameter `tensor`", own=False), ""),
        (cause("AttributeError", NONE), ""),
        (
            cause("AttributeError", NONE, text="h = dist.all_reduce(t)"),
            "f.py, line 1: without async_op=True, all_reduce",
        ),
        (cause("AttributeError", NONE, text="dist.all_reduce(t)\nh = dist.broadcast(t, async_op=True)"), ""),
        (cause("ValueError", "Global rank 0 is not part of process_group"), "group_src"),
        (cause("ValueError", UNEQUAL), "an input of 192 elements, but the outputs of all ranks have 768"),
        (cause("AttributeError", NO_VIEW, ["x = p.grad.view(-1)"]), "Treat it as zeros"),
        (cause("AttributeError", NO_VIEW, ["x = p.view(-1)"]), ""),
        (cause("IndexError", BEYOND, ["start, end = buffer.bucket_ranges[i]"]), "last bucket"),
        (cause("IndexError", BEYOND, ["start, end = pairs[i]"]), ""),
    ],
)
def test_cause(likely_cause, message):
    assert message in likely_cause if message else likely_cause == ""


OWN_LINE = "p.register_post_accumulate_grad_hook(lambda _: self.mark_ready(0))"


def test_an_exception_inside_a_registered_lambda_is_not_blamed_on_its_registration():
    frames = [("f.py", 1, "<lambda>", OWN_LINE), ("f.py", 2, "mark_ready", "self.nothing")]
    failure = RankFailure("exception", "rank 0 raised AttributeError", [], 0, "AttributeError", frames=frames)
    failure.own = True
    assert explain_exception(failure, {}) == ("", "")


def test_a_new_gradient_of_another_dtype_or_shape():
    dtype = "attempting to assign a gradient with dtype 'double' to a tensor with grad_dtype 'Float'."
    shape = "attempting to assign a gradient of size '[340]' to a tensor of size '[20, 17]'."
    assert "torch.zeros_like" in cause("RuntimeError", dtype, ["p.grad = torch.zeros(p.shape)"])
    assert "torch.cat promotes" in cause("RuntimeError", dtype, ["p.grad = piece"], text="flat = torch.cat(grads)")
    narrow = "attempting to assign a gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'."
    assert "as main parameters are" in cause("RuntimeError", narrow, ["s.grad = grad"], text="torch.cat(grads)")
    assert "main_grad and its parameter have different dtypes" in cause(
        "RuntimeError", dtype, ["p.grad = view"], text="p.main_grad = view"
    )
    assert ".to(parameter.dtype)" in cause("RuntimeError", dtype, ["shard.grad = grad"])
    assert "must have its parameter's shape" in cause("RuntimeError", shape, ["p.grad = piece"])


def test_an_outer_optimizer_without_defaults():
    text = (
        "class Outer(torch.optim.Optimizer):\n    def __init__(self, params):\n        super().__init__(params, {})\n"
    )
    likely_cause = cause("KeyError", "'lr'", own=False, text=text)
    assert "have no 'lr'. Pass the defaults" in likely_cause
    assert cause("KeyError", "'layers.0.weight'", own=False, text=text) == ""


def test_an_exception_without_a_known_cause_is_placed_in_a_part():
    """If the line is in a helper function that the student added, the note names the part that calls it."""
    text = "class Bucket:\n    def finish(self):\n        help()\n\n\ndef help():\n    1 / 0\n"
    frames = [("bucketed_ddp.py", 3, "finish", "help()"), ("bucketed_ddp.py", 7, "help", "1 / 0")]
    failure = RankFailure("exception", "rank 0 raised ZeroDivisionError", [], 0, "ZeroDivisionError", frames=frames)
    sources = {"m04_bucketed_ddp.bucketed_ddp": ("/somewhere/bucketed_ddp.py", text)}
    note = describe_part(failure, sources)
    assert note == "The line is in Bucket.finish, module 4, part (c). For a hint, run `brigade hint 4 c`."
    failed = to_failure(failure, sources)
    assert failed.verdict.note == note and failed.with_cause("a known cause.").verdict.note == ""
    failure.frames = [("bucketed_ddp.py", 7, "help", "1 / 0")]
    assert describe_part(failure, sources) == ""


def test_results_that_are_used():
    text = "def f():\n    return all_reduce(t, async_op=False)\nx = g(dist.broadcast(t), functools.reduce(a, b))\n"
    assert [(line, op) for line, op in find_used_results({"f": ("f.py", text)})] == [
        ("f.py, line 2", "all_reduce"),
        ("f.py, line 3", "broadcast"),
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f() -> int:\n    x = 1\n", ["f"]),
        ("def f() -> int:\n    x = 1\n    return x\n", []),
        ("def f() -> int:\n    def g():\n        return 1\n    g()\n", ["f"]),
        ("def f() -> None:\n    x = 1\n    return\n", []),
        ("def f():\n    x = 1\n    g()\n", []),
        ("def f() -> list:\n    x = 1\n    yield x\n", []),
        ('def f() -> int:\n    """Of a protocol."""\n', []),
        ("def f() -> int:\n    x = 1\n    raise NotImplementedError\n", []),
    ],
)
def test_a_forgotten_return(text, names):
    assert find_missing_returns([text]) == names
    assert bool(names) == ("`return` is missing" in cause("TypeError", "'NoneType' object is not iterable", text=text))


def test_no_name_of_the_toolkit_is_quoted():
    message = "rank 0 is not part of group <brigade.rank.strict.StrictGroup object at 0x7f85>; got 'StrictWork'"
    assert remove_jargon(message) == "rank 0 is not part of process_group; got 'Work'"
    aborted = "hello\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    aborted += "  what():  [enforce fail at /__w/pytorch/pair.cc:454] op.preamble.length <= op.nbytes. 8 vs 4"
    assert remove_jargon(aborted) == "hello\n" + OTHER_SIZE


def test_a_mismatch_that_gloo_notices_first_is_told_as_a_mismatch():
    raised = RankFailure("exception", "rank 0 raised RuntimeError", [], 0, "RuntimeError", message=OTHER_SIZE)
    died = RankFailure("died", "rank 1 died without a result", [], 1, output=["", OTHER_SIZE])
    for failure in (raised, died):
        verdict = to_failure(failure, {}).verdict
        assert verdict.ending == "mismatch" and "in the same order" in verdict.expected
        assert verdict.likely_cause.startswith("some ranks skip or add a collective")


# ---- methods that every rank must call


@pytest.mark.parametrize(("module", "method"), [(8, "state_dict"), (11, "full_state_dict")])
def test_a_checkpoint_on_one_rank_only(module, method):
    with pytest.raises(CheckFailed) as failed:
        CheckContext(read("solutions", module).sources).run(functions.save_on_one_rank, module, world_size=2)
    verdict = failed.value.verdict
    assert verdict.ending in ("deadlock", "mismatch") and verdict.hypothesis == "skipped call"
    assert verdict.likely_cause.startswith(f"{method} is collective") and "but rank 1 did not launch" in str(verdict)
    if verdict.ending == "mismatch":  # the message has the line of both ranks
        assert len(re.findall(r"launched \w+ #\d+ \([^)]*\) at \w+\.py:\d+ in \w+", str(verdict))) == 2


def record(*calls):
    """Return the record of one rank with these launches, given as (caller, numel)."""
    common = {"kind": "launch", "group": "0", "ranks": [0, 1], "op": "all_gather", "dtype": "float32"}
    return [common | {"caller": caller, "numel": n, "reduce_op": None, "root": None} for caller, n in calls]


SAVE, TRAIN = ("state_dict", 4), ("forward", 4)


@pytest.mark.parametrize(
    ("first", "second", "kind", "is_named"),
    [
        ([TRAIN, SAVE], [TRAIN], "deadlock", True),
        ([TRAIN, SAVE], [TRAIN], "mismatch", False),  # rank 1 is perhaps only slower
        ([SAVE, TRAIN], [TRAIN, ("forward", 5)], "mismatch", True),  # the first launches have the same size
        ([SAVE, SAVE], [SAVE, TRAIN], "mismatch", False),  # rank 1 has left the method early
        ([TRAIN, SAVE], [("forward", 5), TRAIN], "mismatch", False),  # the ranks differ before the method
        ([TRAIN, TRAIN], [TRAIN], "deadlock", False),
    ],
)
def test_a_skipped_call_is_named_only_if_the_records_show_it(first, second, kind, is_named):
    assert bool(find_skipped_call([record(*first), record(*second)], kind)) == is_named
