"""The measuring scripts run, and print the machine-independent results that the readings quote."""

import os
import re
import runpy
import sys
from dataclasses import replace

import hang_guard
import pytest

from brigade.course.table.modules import MODULES, ROOT
from brigade.course.table.skeletons import make_skeletons
from brigade.lab import experiment, ladder
from brigade.ranks.runner import ranks
from brigade.ranks.runner.ranks import run_ranks

LAUNCH = ROOT / "lessons/m00_ring/measure/launch.py"  # torchrun starts it
LAST_MILE = [ROOT / "lessons/capstone" / name for name in ("train.py", "checkpoint.py")]  # see test_train.py
POST_MORTEM = ROOT / "lessons/m13_post_mortem/measure"  # torchrun starts hang.py, and draw.py needs its dumps
SCRIPTS = [
    path
    for path in sorted([*ROOT.glob("lessons/*/measure/*.py"), *ROOT.glob("lessons/capstone/*.py")])
    if path not in (LAUNCH, *LAST_MILE, *POST_MORTEM.iterdir())
]
RUNS_MODULES = [path for path in SCRIPTS if "experiment(main" in path.read_text()]

# Regular expressions, by directory and file, of what must stand in the output, in this order; of others, anything.
PRINTED = {
    "m00/measure": [
        "α = 30 ms, β = 4 MB/s", "2 ranks", *(ways := ["root ", "ring ", "exchange ", "dist.all_reduce "]), "4 ranks",
        *ways, r"overtakes the exchange at 960 kB \(predicted\), \d+ kB \(measured\)",
    ],
    "m02/launches": [r"one element: [\d.]+ ms", r"one flat tensor: [\d.]+ ms", r"39 tensors: [\d.]+ ms"],
    "m03/hooks": [r"tensor hook: \[4.0, 6.0\]", r"its .grad: \[5.0, 5.0\]", r"its argument: \[3.0, 7.0\]"],
    "m03/order": [
        *2 * ["'a.weight': 14.58, 'b.weight': 14.84"], *2 * ["'a.weight': 10.06, 'b.weight': 10.06"],
        r"rank [01] launched all_reduce #2 \([ab].weight, .* at \S+ in \w+, but rank [01] launched all_reduce #2",
        "deadlock: every rank has stopped",
        r"rank 0 waits in all_reduce #3 \(a.weight, float32, 48 B\), which rank 1 never launched",
    ],
    "m04/order": [
        *4 * ["'a.weight': 14.58, 'b.weight': 14.84"],
        *2 * ["'a.weight': 29.18, 'b.weight': 30.71"], *2 * ["'a.weight': 14.59, 'b.weight': 30.71"],
    ],
    "m04/turns": ["p5 launches nothing", r"p2 launches nothing", r"p4 launches \[0, 1\]", r"p0 launches \[2\]"],
    "m04/buckets": ["1 MiB: 435", "10 MiB: 339", "100 MiB: 98", "1000 MiB: 8"],
    "m04/torch_ddp": [
        "=False", "step 0: all_reduce of 3478016 B", *2 * ["step 1: broadcast"], "step 2: all_reduce of 11",
        "step 2: all_reduce of 23", "=True", *3 * [r"step 2: all_reduce of \d+ B"],
    ],
    "m05/ledger": [
        "BucketedDDP: 6.96 MB copied", "0.00 MB added", "3.48 MB allocated",
        "BufferedDDP: 0.00 MB copied", "3.48 MB added", "3.48 MB zeroed", "0.00 MB allocated",
    ],
    "m05/views": [rf"is \[{value}, {value}\], and p.grad is there" for value in ("3.0", "0.0", "5.0")],
    "m05/small": [": 1.0000", r"1.0 \+ 256 .*: 1.2559", r"0.0 \+ 256 .*: 0.2520", ": 0.5000", ": 1.0234"],
    "m06/manager": [
        r"two sums: \[3.0, 3.0\]; a SUM afterwards: 3.0",
        *(f"{error}: .*; a SUM afterwards: 1.0" for error in ("TypeError", "RuntimeError")),
        r"MAX, then SUM: \[2.0, 2.0\]; a SUM afterwards: 3.0",
        "all-gather: .*; a SUM afterwards: 3.0", "ZeroDivisionError: .*; a SUM afterwards: 1.0",
    ],
    "m06/ends": 2 * [f"{groups} launches: " for groups in (22, 11, 6, 1)],
    "m06/sent": [
        "2 ranks", "all_reduce: 1.00 ", "reduce_scatter: 1.00 ", "all_gather: 0.50 ",
        "4 ranks", "all_reduce: 1.50 ", "reduce_scatter: 1.50 ", "all_gather: 0.75 ",
    ],
    "m07/views": ["40000000 elements", "128 ranks", "all by slicing: .* for 98 of XL", "all by chunk", "own", "cached"],
    "m07/stale": ["in the new tensor: 1.0"],
    "m08/traffic": [
        "ShardedOptimizer: 39 reduce, 3.48 MB", "ShardedOptimizer: 39 broadcast, 3.48 MB",
        "ZeroOptimizer: 4 reduce_scatter, 3.48 MB", "ZeroOptimizer: 4 all_gather, 3.48 MB",
        "Zero.*: 4 all_reduce, 3.48 MB", "Zero.*: 39 broadcast, 3.48 MB",
    ],
    "m08/wire": ["2 ranks", *(names := ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]), "4 ranks", *names],
    "m08/against": [r"torch +1.00 ", "torch, flat", "ZeroOptimizer", "ShardedOptimizer"],
    "m08/masters": ["without a main parameter: 1.0", "with a main parameter: 0.8984"],
    "m10/alive": ["module 8: 17.0 .* 16.0", "=1: 10.5 .* 8.0", "=4: 15.0 .* 8.0", "no_sync: 25.5 .* 8.0"],
    "m11/peak": [
        "prefetch=0: at most 1.07 of 3.48 MB; 9 all_gather, 6.69 MB, 5 reduce_scatter, 3.48 MB",
        "prefetch=1: at most 1.87 of", "prefetch=2: at most 2.67 of",
        "reshard_after_forward=False: at most 3.48 of 3.48 MB; 5 all_gather, 3.48 MB, 5 reduce_scatter, 3.48 MB",
    ],
    "m11/exposed": ["alone: ", *(f"prefetch={depth}: .* ms exposed" for depth in (0, 1, 2)), "machine was|these times"],
    "m11/against": [*(f"{name}: 9 all_gather, 5 reduce_scatter" for name in ("torch", "ours")), "ours / torch: "],
    "m12/weights": ["4.6667", "2.0000", "4.0000", "your loop: 4.0000"],
    "m12/straggler": [f"{count} of 100 steps have a late rank" for count in (9, 16, 36)],
    "m12/text": ["tokens per step", "if tokens count equally", "dealt", "assigned"],
    "m14/two_links": [*2 * [r"rate: 8\n", "module 11 .* 1.00 of", r"module 14: .* 0\.[1-4]\d of"], r"rate: 1\n"],
    "m15/halves": ["rows: 3.3e-01", "columns: 6.2e-01", "the mean: 4.1e-01", "the sum .*e-10", "AdamW.*: 0.0e[+]00"],
    "m15/text": ["step, AdamW, Muon, one process", "  0: 5", "165.2", "82.6 MFLOPs", "82.6 .* 201 kB"],
    "m16/wire": ["all-reduce in bfloat16 +2.4", "reduce-scatter in bfloat16 +2.4", r"float32 +1.66e-03 .* 1.66e-03\n"],
    "m16/drift": ["own part: .* by [4-6]", r"rounded parts: .* by 0.0e\+00 after 100"],
    "m16/feedback": ["rounded: -0.976562, off by 0.001907", "with feedback: .* off by 0.000000"],
    "m17/counted": [r"nothing +4 +equal", r"backward only +4 +equal", r"forward and backward +1 +equal"],
    "cap/engine": ["modules 4, 5: 1 all_reduce; 1.50 times", "module 11: 2 all_gather, 2 reduce_scatter; 3.00 times"],
    "m08/memory": [
        r"7 CachedDDP +4 \+ 4\.?\d* \+ 8 .* 4P \+ 4P \+ 8P\n", r"torch DDP +4 \+ 8 \+ 8 .* 8P, and 4P of buckets\n",
        r"8 ZeroOptimizer +4 \+ 4\S* \+ 8\S* .* \+ 4\S* .* \+ 2\S* ",
        r"bf16 +2 \+ 4\S* \+ 12\S* .* \+ 6\S* .* \+ 3\S* +2P \+ 4P \+ 12P/N",
    ],
    "m08/elementwise": ["Adafactor: refused", "Adam: elementwise", "LBFGS: refused", "Muon: refused"],
}  # fmt: skip

# Rounds of those that measure many of them: as few as they can do with, since times are not compared here.
ROUNDS = {
    "m02/launches": 2,
    "m06/ends": 2,
    "m08/against": 7,
    "m11/against": 15,
    "m08/wire": 2,
    "m12/text": 3,
    "m14/two_links": 3,
    "m15/text": 2,
    "m16/train": 2,
}


# Those that measure for seconds run with --everything, or with their module.
LONG = {
    "m00/measure",
    "m02/launches",
    "m05/ledger",
    "m06/ends",
    "m07/views",
    "m08/against",
    "m08/masters",
    "m08/memory",
    "m08/traffic",
    "m08/wire",
    "m10/alive",
    "m11/against",
    "m11/exposed",
    "m11/peak",
    "m12/text",
    "m14/two_links",
    "m15/text",
    "m16/train",
    "m16/wire",
}


def name(path):
    return f"{path.relative_to(ROOT / 'lessons').parts[0][:3]}/{path.stem}"


def mark_long(paths):
    return [pytest.param(path, marks=[pytest.mark.extended] * (name(path) in LONG)) for path in paths]


def test_the_readings_name_their_scripts():
    assert set(PRINTED) | set(ROUNDS) | LONG <= {name(path) for path in SCRIPTS}
    for path in SCRIPTS:
        folder = ROOT.joinpath(*path.relative_to(ROOT).parts[:2])
        assert f"python {path.relative_to(ROOT)}" in (folder / "README.md").read_text()


@pytest.mark.parametrize("path", mark_long(SCRIPTS), ids=name)
def test_a_script_prints_what_its_reading_says(path, monkeypatch, capsys):
    """The script runs in this process, so that all scripts use the same fork server."""

    def run_few(function, *args, **options):
        return run_ranks(function, *args, ROUNDS[name(path)], **options)

    if name(path) in ROUNDS:
        monkeypatch.setattr(ranks, "run_ranks", run_few)
        monkeypatch.setattr(experiment, "run_ranks", run_few)
    monkeypatch.setattr(ladder, "EMULATED", replace(ladder.EMULATED, batch_size=8, time=32, rounds=2, warmup=0))
    monkeypatch.setattr(sys, "argv", [str(path), *(["solutions"] if path in RUNS_MODULES else [])])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(".*".join(PRINTED.get(name(path), ["."])), printed, re.DOTALL), printed


def test_a_skeleton_is_one_sentence(tmp_path, monkeypatch, capsys):
    for entry in MODULES:
        for file, text in make_skeletons(entry).items():
            (tmp_path / file.name).write_text(text)
    monkeypatch.setattr(sys, "argv", ["order.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^module \d, part \(a\) .*`brigade check \d`.*$"):
        runpy.run_path(str(ROOT / "lessons/m03_overlapped_ddp/measure/order.py"), run_name="__main__")


def test_a_script_runs_from_the_command_line():
    command = [sys.executable, "lessons/m04_bucketed_ddp/measure/buckets.py", "solutions"]
    done = hang_guard.run(command, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 0 and "10 MiB: 339 buckets" in done.stdout and not done.stderr


@pytest.mark.extended
def test_torchrun_starts_the_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(LAUNCH)]
    reading = (LAUNCH.parents[1] / "README.md").read_text()
    assert f"torchrun {' '.join(command[3:-1])} {LAUNCH.relative_to(ROOT)}" in reading
    how = {"cwd": ROOT, "capture_output": True, "text": True}
    done = hang_guard.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [re.sub(r" on .*:", "", line) for line in lines] == [f"rank {rank} of 2 the sum is 3" for rank in (0, 1)]


def test_without_torchrun_one_line_says_how_to_start():
    done = hang_guard.run([sys.executable, LAUNCH], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.endswith(f" torchrun --standalone --nproc-per-node 2 {LAUNCH.relative_to(ROOT)}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["skip", "circle"])
def test_dumps_of_a_broken_job_name_the_culprit(fault, tmp_path):
    """The dumps stored in tests/m13_post_mortem are what hang.py writes: the same calls, and the same finding."""
    folders = ROOT / "solutions", POST_MORTEM
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    hang_guard.run([*command, POST_MORTEM / "hang.py", fault], **how)
    lines = (ROOT / "tests/m13_post_mortem/dumps/2.13.txt").read_text().splitlines()
    for rank, line in enumerate(line for line in lines if line.startswith(f"{fault} ")):
        (tmp_path / f"stored_{rank}.json").write_text(line.removeprefix(f"{fault} "))
    program = "import sys, draw, pathlib; from m13_post_mortem.post_mortem import main; main(sys.argv[1:]); "
    program += "draw.draw(sys.argv[1:], pathlib.Path('calls.png'))"
    stored, new = (
        hang_guard.run([sys.executable, "-c", program, *(f"{name}_{rank}.json" for rank in range(3))], **how).stdout
        for name in ("stored", "dump")
    )
    assert stored and stored == new
    assert (tmp_path / "calls.png").read_bytes()[:4] == b"\x89PNG"
