"""`brigade.testing`: claims about any distributed code say what is wrong, and its page shows what runs."""

import inspect
import linecache
import math
import sys
import types

import hang_guard
import pytest
import torch
from in_ranks import claims

from brigade.course.table.modules import ROOT
from brigade.ranks.runner.ranks import RankResults
from brigade.testing import Observed, PerRank, RankFailure, run
from brigade.testing.plugin import ranks as ranks_fixture

EXAMPLES = sorted((ROOT / "tests" / "examples").glob("test_*.py"))


def test_the_page_shows_the_examples_or_names_them():
    text = (ROOT / "docs" / "testing.md").read_text()
    shown = {path.name for path in EXAMPLES if f"```python\n{path.read_text()}```" in text}
    assert shown == {"test_clip.py"}
    assert all(f"`tests/examples/{path.name}`" in text for path in EXAMPLES if path.name not in shown)


@pytest.fixture(scope="module")
def seen():
    """Return what `claims.drive` did on two ranks."""
    return run(claims.drive, PerRank([1.0, 2.0]))


def test_what_a_driver_returns_and_prints(seen):
    assert [each["rank"] for each in seen] == [0, 1] and seen.output == ["from 0\n", "from 1\n"]
    assert torch.equal(seen[0]["sum"], torch.full((4,), 3.0))
    seen.are_equal_on_all_ranks("sum")
    with pytest.raises(AssertionError, match=r"\brank 1\b.*\brank 0\b"):
        seen.are_equal_on_all_ranks("rank")
    with pytest.raises(AssertionError, match=r"\['rank'\].*\brank 0\b"):
        seen.are_equal_on_all_ranks()


def test_right_claims(seen):
    hooked = seen.step(1)
    assert hooked.gradients == ["2.bias", "2.weight", "0.bias", "0.weight"]
    hooked.launches("all_reduce", count=4).are_asynchronous().are_awaited().come_before_gradient(+1)
    hooked.launches().come_during_backward().do_not_block_backward().satisfy("has data", lambda one: one.numel > 0)
    seen.step(0).launches().do_not_block_backward()  # they wait after backward
    hooked.launches().have_dtype(torch.float32).carry(4 * (4 * 4 + 4 + 2 * 4 + 2))
    assert hooked.bytes_sent() == 4 * 30  # half of the bytes, to the other rank and back
    assert [(each.rank, each.number) for each in seen.steps()] == [(rank, n) for rank in (0, 1) for n in (1, 0, 7)]
    assert seen.kept_bytes("parameters") == seen.peak_bytes("gradients") == 4 * 30
    assert seen.kept_bytes("optimizer state") == 4 * 30  # momentum
    assert seen.kept_bytes() >= 3 * 4 * 30
    assert len(seen.launches("broadcast", rank=1)) == 1, "outside of the steps"


@pytest.mark.parametrize("mode", ["strict", "record"])
def test_code_that_asks_until_a_launch_is_complete_has_waited(mode):
    polled = run(claims.poll, mode=mode)
    polled.step(0).launches("all_reduce", count=1).are_awaited()
    kinds = [event["kind"] for event in polled.events[0]]
    assert kinds.count("complete") == (mode == "record")  # strict: to ask again is to wait
    assert polled[0].tolist() == [2.0, 2.0]


ALONE = {"w": torch.ones(2), "names": ["a", 0], "loss": 2.0}


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"w": torch.tensor([1.0, 1.000001]), "loss": 2.000002}, ""),
        (
            {"w": torch.tensor([1.0, 1.1])},
            r"\['w'\] differs by 0.1, .* is 1; it is 1.05 times as large, in nearly the same",
        ),
        ({"w": torch.tensor([1.0, -1.0])}, r"\['w'\] differs by 2, and its largest entry is 1$"),
        ({"w": torch.tensor([1.0, math.nan])}, r"\['w'\] differs by nan, and its largest entry is 1$"),
        ({"w": torch.full((2,), 2.0)}, ".*it is 2 times as large.*\n.*summed but not divided"),
        ({"w": torch.full((2,), 0.5)}, ".*it is 0.5 times as large.*\n.*divided by their number again"),
        ({"w": torch.ones(3)}, r"\['w'\] is \(3,\) torch.float32 instead of \(2,\) torch.float32"),
        ({"loss": 2}, r"\['loss'\] is another one"),
        ({"more": None}, r"\['more'\] is returned in only one of the runs"),
        ({"names": ["a", 1]}, r"\['names'\]\[1\] is another one"),
    ],
)
def test_ranks_are_compared_with_one_process(change, got):
    alone = Observed(RankResults([ALONE], [[]], [""]))
    seen = Observed(RankResults([ALONE, ALONE | change], [[], []], ["", ""]))
    if not got:
        assert seen.equals_one_process(alone) is seen is seen.equals_one_process(alone, "w")
        return
    with pytest.raises(AssertionError, match=rf"rank 1: the result{got}"):
        seen.equals_one_process(alone)
    with pytest.raises(ValueError, match="2 ranks"):
        seen.equals_one_process(seen)


def describe(wrong):
    return f"{len(wrong)} in step {wrong.step.number}."


WRONG = [
    lambda s: s.step(0, 1).launches(count=3),
    lambda s: s.step(0).launches("reduce_scatter", count=1),
    lambda s: s.step(0).launches().are_asynchronous(),
    lambda s: s.step(0).launches().come_before_gradient(+1),
    lambda s: s.step(7).launches().are_awaited(),
    lambda s: s.step(1).launches().have_dtype("bfloat16"),
    lambda s: s.step(1).launches().carry(8),
    lambda s: s.step(0).launches().come_during_backward(),
    lambda s: s.step(1).launches().are_none("none"),
    lambda s: s.step(1).launches().are_so_many("a step has {}", 1),
    lambda s: s.step(1).launches().are_one_for_each("layer", "all_reduce", [2]),
    lambda s: s.step(1).launches().satisfy("...", lambda x: x.numel > 2, describe),
    lambda s: s.step(1).equal("it has {}", [], [1, 2]),
    lambda s: s.step(1).at_most("it has {} B", 9, 8),
    lambda s: s.step(1).at_most("it has {} B", 123457, 123456.4),
    lambda s: s.step(1).at_most("the error is {}", 0.00123456789012, 1e-3),
    lambda s: s.step(1).at_most("it is {} times the mean", 1.25004, 1.25),
    lambda s: s.step(1).at_most("the error is {}", math.nan, 0.5),
    lambda s: s.step(1).equal("its places are {}", ["0", 3], [0, 3]),
]


def list_messages(error, functions, seen):
    """Return the message of the exception that each function raises when it is called with a run."""
    messages = []
    for function in functions:
        with pytest.raises(error) as caught:
            function(seen)
        messages.append(f"{caught.value}\n")
    return messages


def test_wrong_claims_say_what_happened(seen, snapshot):
    snapshot("claims", "\n".join(list_messages(AssertionError, WRONG, seen)))


MISUSED = [
    lambda s: s.step(5),
    lambda s: s.peak_bytes("weights"),
    lambda s: run(lambda: 1),
    lambda s: run(claims.drive, mode="fast"),
    lambda s: run(claims.drive, world_size=0),
    lambda s: list(run(claims.do_little, world_size=1).steps()),
    lambda s: run(claims.do_little, world_size=1).peak_bytes(),
    lambda s: run(claims.take_empty_step, world_size=1).step(0).launches().come_before_gradient(+1),
]


def test_misuse_is_one_sentence(seen, snapshot):
    assert run(claims.do_little, world_size=1)[0] is None
    snapshot("refusals.testing", "".join(list_messages(ValueError, MISUSED, seen)))


@pytest.mark.parametrize(
    ("driver", "kind", "words"),
    [
        (claims.deadlock, "deadlock", "all_reduce #0"),
        (claims.run_again, "exception", "__main__"),
        (claims.wait_in_cpp, "exception", "mode record"),
    ],
)
def test_a_run_that_cannot_end_says_why(driver, kind, words):
    with pytest.raises(RankFailure, match=words) as caught:
        run(driver)
    assert caught.value.kind == kind


CELLS = """
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 3

class Net(nn.Linear):
    def forward(self, x):
        return double(super().forward(x))

def double(x):
    return 2 * x

def drive(scale):
    net = Net(WIDTH, 1)
    with torch.no_grad():
        net.weight.fill_(scale), net.bias.zero_()
    total = net(torch.ones(1, WIDTH)).detach()
    dist.all_reduce(total)
    return total
"""


@pytest.fixture
def notebook(monkeypatch):
    """Return a module like that of a notebook, in which CELLS have been executed."""
    main = types.ModuleType("__main__")
    linecache.cache["<cell>"] = len(CELLS), None, CELLS.splitlines(keepends=True), "<cell>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(inspect, "getfile", lambda value, before=inspect.getfile: find_file(value, before))
    exec(compile(CELLS, "<cell>", "exec"), main.__dict__)
    return main


def find_file(value, before):
    """Return the file of a notebook's class, which IPython tells the module `inspect`."""
    return "<cell>" if getattr(value, "__module__", "") == "__main__" and isinstance(value, type) else before(value)


def test_a_driver_in_a_notebook_brings_what_it_uses_from_other_cells(notebook):
    assert run(notebook.drive, 0.5, world_size=2)[1].item() == 2 * 2 * 0.5 * 3
    notebook.WIDTH = torch.ones(3)
    with pytest.raises(ValueError, match=r"drive .*\bWIDTH\b.*Tensor"):
        run(notebook.drive, 0.5)


@pytest.mark.extended
def test_a_script_runs_from_any_directory(tmp_path):
    (tmp_path / "mine.py").write_text("def answer():\n    return 42\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import mine\nfrom brigade.testing import run\n\n\ndef drive():\n    return mine.answer()\n\n\n"
        "if __name__ == '__main__':\n    print(list(run(drive, world_size=2)))\n"
    )
    done = hang_guard.run([sys.executable, script], cwd="/", capture_output=True, text=True)
    assert done.stdout == "[42, 42]\n", done


def test_the_fixture_skips_a_test_that_has_too_few_gpus(monkeypatch):
    marker = types.SimpleNamespace(args=["nccl"])
    request = types.SimpleNamespace(node=types.SimpleNamespace(get_closest_marker=lambda name: marker))
    monkeypatch.setattr("brigade.testing.plugin.count_gpus", lambda: 1)
    run_on_gpus = ranks_fixture.__wrapped__(request)
    with pytest.raises(pytest.skip.Exception, match=r"3 GPUs.*\b1\b"):
        run_on_gpus(claims.drive, world_size=3)
