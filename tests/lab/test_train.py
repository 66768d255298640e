"""The capstone's program: every engine trains like one process, and checkpoints survive kills, ranks and engines."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import re
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import hang_guard
import pytest
import test_bench
import torch
from in_ranks import last_mile

from brigade.course.checks.tiny_lm import Size
from brigade.course.table.modules import MODULES, ROOT, get_module, select_modules
from brigade.course.table.skeletons import make_skeletons
from brigade.lab import bench, ladder
from brigade.ranks.errors import UserError
from brigade.ranks.runner.ranks import RankFailure, run_calls, run_ranks
from lessons.capstone import checkpoint
from solutions.m13_post_mortem import post_mortem

PROGRAM = ROOT / "lessons" / "capstone" / "train.py"
SPEC = importlib.util.spec_from_file_location("train", PROGRAM)
train = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(train)

SIZE = Size(d_model=16, d_ff=24, layers=2, heads=2, vocabulary=256, context=32)
WORKLOAD = asdict(ladder.Workload(size=SIZE, batch_size=5, time=16, bucket_mb=0.005))
TOLERANCE = 1e-4  # nats per token, as the capstone promises
KILLS = 10

engine = functools.cache(lambda number: asdict(ladder.get_variant(get_module(number))))


@pytest.fixture(scope="module")
def sources():
    return bench.read_engine("solutions", ladder.get_variant(get_module(16)))


@pytest.fixture
def call(sources):
    """Return a function that calls a function of the ranks with each of several tuples of arguments."""
    packages = {"submission": sources, "train": {"train": (str(PROGRAM), PROGRAM.read_text())}}

    def call(function, *args, world_size=2):
        how = {"world_size": world_size, "packages": packages, "deadline": hang_guard.HANG_S, "seed": 0}
        return run_calls(function, args, stream=False, **how)

    return call


def make_plan(steps, folder="", **changes):
    """Return a plan that saves after every second step, if there is a folder."""
    plan = {"steps": steps, "every": 2, "deadline": hang_guard.HANG_S, "dumps": str(folder), "save": str(folder)}
    return plan | {"resume": "", "tokens": 80, "has_loop": True} | changes


def expect_equal(losses, expected):
    assert losses == pytest.approx(expected, abs=TOLERANCE)


def compare_engines(call, engines, steps, world_sizes=(1, 2, 3), workload=WORKLOAD):
    """Compare all engines on some ranks with engine 1 on one rank. With 2 ranks, each is a node of module 14."""
    [[expected]] = call(train.train, (make_plan(steps), workload, engine(1)), world_size=1)
    assert expected[0] > expected[-1]
    for world_size in world_sizes:
        nodes = workload | {"node_size": 1 if world_size == 2 else None}
        runs = [(make_plan(steps), nodes, engine(number)) for number in engines]
        for number, results in zip(engines, call(train.train, *runs, world_size=world_size), strict=True):
            for losses in results:
                assert losses == pytest.approx(expected, abs=TOLERANCE), f"engine {number} on {world_size} ranks"


# ---- losses


def test_every_engine_trains_like_one_process(call):
    """With 5 sequences of unequal lengths, ranks have different numbers of tokens."""
    compare_engines(call, (4, 9, 11, 14), 3, world_sizes=(2, 3))


@pytest.mark.extended
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14])
def test_an_engine_trains_like_one_process_for_50_steps(number, call):
    compare_engines(call, [number], 50)


def test_muon_trains_like_one_process(call):
    runs = [call(train.train, (make_plan(4), WORKLOAD, engine(15)), world_size=size)[0][0] for size in (1, 2)]
    expect_equal(*runs)


@pytest.mark.extended
def test_half_bytes_train_almost_like_one_process(call):
    """Gradients are rounded to bfloat16 on their way, so the losses differ, but not by much."""
    [[expected]] = call(train.train, (make_plan(50), WORKLOAD, engine(1)), world_size=1)
    [[losses, _]] = call(train.train, (make_plan(50), WORKLOAD, engine(16)))
    assert losses != pytest.approx(expected, abs=1e-7) and losses == pytest.approx(expected, abs=0.02)


def test_a_rank_without_a_sequence_takes_part(call):
    """There is one sequence for two ranks."""
    workload = WORKLOAD | {"batch_size": 1}
    [[expected]] = call(train.train, (make_plan(3), workload, engine(1)), world_size=1)
    for results in call(train.train, *[(make_plan(3), workload, engine(number)) for number in (1, 8, 11)]):
        expect_equal(results[0], expected)


@pytest.mark.parametrize("number", [1, 4, pytest.param(8, marks=pytest.mark.extended)])
def test_the_plain_loop_counts_every_token_once(number, call):
    """Five sequences of unequal lengths are on two ranks, without modules 12 and 13."""
    [[expected]] = call(train.train, (make_plan(3), WORKLOAD, engine(1)), world_size=1)
    for losses in call(train.train, (make_plan(3, has_loop=False, dumps=""), WORKLOAD, engine(number)))[0]:
        expect_equal(losses, expected)


# ---- checkpoints


def resume_with_another_engine(call, folder, chain, steps):
    """Train 2 steps with each (engine, ranks, node size) of a chain, each from the last one's checkpoint."""
    [[expected]] = call(train.train, (make_plan(steps), WORKLOAD, engine(1)), world_size=1)
    resume = ""
    for place, (number, world_size, node_size) in enumerate(chain, 1):
        until = steps * place // len(chain)
        plan = make_plan(until, folder, resume=resume)
        workload = WORKLOAD | {"node_size": node_size}
        [[losses, *_]] = call(train.train, (plan, workload, engine(number)), world_size=world_size)
        expect_equal(losses, expected[:until])
        resume = str(folder)
    return expected


@pytest.mark.extended
def test_a_checkpoint_of_module_11_goes_on_in_module_8_and_in_plain_torch(call, tmp_path):
    expected = resume_with_another_engine(call, tmp_path, [(11, 3, None), (8, 2, None)], 6)
    names = ["manifest.json", "step-6-rank-0-of-2.pt", "step-6-rank-1-of-2.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "the files of old checkpoints are gone"
    [snippet] = re.findall(r"```python\n(folder = .*?)```", PROGRAM.with_name("last_mile.md").read_text(), re.DOTALL)
    assert snippet.count("\n") == 5, "the reading promises five lines"
    snippet = snippet.replace("out/run", str(tmp_path))
    [[whole]] = call(train.train, (make_plan(9), WORKLOAD, engine(1)), world_size=1)
    assert whole[:6] == expected
    [[losses]] = call(last_mile.train_plainly, (snippet, WORKLOAD, 6, 9), world_size=1)
    expect_equal(losses, whole[6:])


@pytest.mark.extended
def test_every_engine_reads_and_writes_checkpoints(call, tmp_path):
    chain = [(1, 2, None), (14, 2, 1), (9, 3, None), (2, 1, None), (10, 2, None), (7, 3, None), (11, 1, None)]
    chain += [(12, 2, None), (3, 3, None), (8, 1, None), (4, 2, None), (6, 2, None), (14, 3, None), (5, 2, None)]
    resume_with_another_engine(call, tmp_path, chain, 56)


@pytest.mark.extended
def test_muon_resumes_on_another_number_of_ranks(call, tmp_path):
    [[expected]] = call(train.train, (make_plan(6), WORKLOAD, engine(15)), world_size=1)
    call(train.train, (make_plan(4, tmp_path), WORKLOAD, engine(15)), world_size=3)
    [[losses, _]] = call(train.train, (make_plan(6, resume=str(tmp_path)), WORKLOAD, engine(15)))
    expect_equal(losses, expected)


@pytest.mark.extended
def test_16_bit_weights_keep_their_fp32_copies(call, tmp_path):
    """Module 8 goes on exactly, because the checkpoint has its main parameters."""
    short = asdict(replace(ladder.get_variant(get_module(8)), dtype="bfloat16"))
    [[expected, _]] = call(train.train, (make_plan(8), WORKLOAD, short))
    call(train.train, (make_plan(4, tmp_path), WORKLOAD, short))
    weights, _ = checkpoint.load(tmp_path)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    [[losses, _]] = call(train.train, (make_plan(8, resume=str(tmp_path)), WORKLOAD, short))
    assert losses == expected


def kill_and_resume(call, folder, draws):
    """Kill a run of module 8 on two ranks at each (rank, moment), and let three ranks go on. Return what was left."""
    [[expected]] = call(train.train, (make_plan(6), WORKLOAD, engine(1)), world_size=1)
    resumed, left = [], []
    for number, (victim, moment) in enumerate(draws):
        own = folder / str(number)
        own.mkdir()
        with pytest.raises(RankFailure) as failure:
            call(last_mile.train_until, (make_plan(6, own), WORKLOAD, engine(8), victim, moment))
        assert failure.value.kind == "died"
        is_complete = (own / checkpoint.MANIFEST).exists()
        about = checkpoint.read_manifest(own, asdict(SIZE)) if is_complete else {"step": 0}
        left.append(about["step"])
        resumed.append((make_plan(6, own, resume=str(own) if is_complete else ""), WORKLOAD, engine(11)))
    for [losses, *_] in call(train.train, *resumed, world_size=3):
        expect_equal(losses, expected)
    for number in range(len(draws)):
        files = sorted(path.name for path in (folder / str(number)).iterdir() if not path.name.endswith(".tmp"))
        assert files == ["manifest.json", *(f"step-6-rank-{rank}-of-3.pt" for rank in range(3))]
    return left


def draw_moments(call, folder, count):
    """Return random pairs (rank, moment) of a run."""
    (folder / "whole").mkdir()
    [counts] = call(last_mile.train_until, (make_plan(6, folder / "whole"), WORKLOAD, engine(8), -1, 0))
    moments = [(rank, moment) for rank, count in enumerate(counts) for moment in range(count)]
    return random.Random(count).sample(moments, count)


def test_a_kill_leaves_the_last_complete_checkpoint(call, tmp_path):
    """Rank 0 is killed before it renames its second manifest, and after that, before it removes an old file."""
    moments = 3 * [2 * (last_mile.PIECES + 3)]  # of rank 0 in a save, without removals: both files, each to the disk
    second = 4 + moments[0] + (last_mile.PIECES + 3) + last_mile.PIECES + 1
    assert kill_and_resume(call, tmp_path, [(0, second), (0, second + 2)]) == [2, 4]


@pytest.mark.extended
def test_kills_at_random_moments(call, tmp_path):
    left = kill_and_resume(call, tmp_path, draw_moments(call, tmp_path, KILLS))
    assert len(set(left)) > 2, "the moments are too similar"


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_other_ranks(call, tmp_path):
    [[expected]] = call(train.train, (make_plan(4), WORKLOAD, engine(1)), world_size=1)
    (tmp_path / train.STOP).touch()
    with pytest.raises(RankFailure, match="stopped after 1 of 4 steps, because of the file stop") as failure:
        call(train.train, (make_plan(4, tmp_path), WORKLOAD, engine(8)))
    assert failure.value.error == "UserError" and checkpoint.read_manifest(tmp_path, asdict(SIZE))["step"] == 1
    (tmp_path / train.STOP).unlink()
    for losses in call(train.train, (make_plan(4, tmp_path, resume=str(tmp_path)), WORKLOAD, engine(11)), world_size=3):
        expect_equal(losses[0], expected)


def test_a_full_disk_is_one_sentence(call, tmp_path):
    [[first, second]] = call(last_mile.train_on_a_full_disk, (make_plan(6, tmp_path), WORKLOAD, engine(1)))
    file = tmp_path / "step-4-rank-1-of-2.pt"
    assert first == second == f"{file} cannot be written: File too large; what was saved before is still complete"
    assert checkpoint.read_manifest(tmp_path, asdict(SIZE))["step"] == 2
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    checkpoint.load(tmp_path)


@pytest.fixture(scope="module")
def saved(sources, tmp_path_factory):
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    how = {"packages": {"submission": sources}, "deadline": hang_guard.HANG_S, "seed": 0, "stream": False}
    run_ranks(train.train, make_plan(2, folder), WORKLOAD, engine(1), **how)
    return folder


def change_manifest(folder, **changes):
    path = folder / checkpoint.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SPOILT = {  # what happens to a checkpoint, and what is said
    "missing": (lambda f: (f / "step-2-rank-1-of-2.pt").unlink(), r"is incomplete: /.+rank-1-of-2.pt is missing"),
    "short": (
        lambda f: (f / "step-2-rank-0-of-2.pt").write_bytes(b"PK"),
        r"is damaged: /.+/step-2-rank-0-of-2.pt has 2 bytes instead of \d+",
    ),
    "incomplete": (lambda f: (f / "manifest.json").unlink(), "no complete checkpoint, only files without manif"),
    "empty": (lambda f: [path.unlink() for path in f.iterdir()], "contains no complete checkpoint$"),
    "newer": (lambda f: change_manifest(f, version=2, files=7), "has version 2: this course reads version 1"),
    "other": (lambda f: change_manifest(f, model={"d_model": 1}), "is of another model: {'d_model': 1}, not {"),
    "no json": (lambda f: (f / "manifest.json").write_text("{"), "is not the manifest of a checkpoint"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "is not the manifest of a checkpoint"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_checkpoint_is_one_sentence(name, saved, tmp_path):
    spoil, sentence = SPOILT[name]
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    spoil(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=sentence) as raised:
        checkpoint.read_manifest(folder, asdict(SIZE))
    assert "\n" not in str(raised.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_of_the_right_size_may_be_damaged(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "step-2-rank-0-of-2.pt"
    file.write_bytes(bytes(file.stat().st_size))
    checkpoint.read_manifest(tmp_path, asdict(SIZE))
    with pytest.raises(UserError, match=re.escape(f"is damaged: torch cannot read {file}")):
        checkpoint.load(tmp_path)


# ---- the program


def test_a_hang_leaves_a_dump_of_every_rank(call, tmp_path):
    with pytest.raises(RankFailure) as failure:
        call(last_mile.hang, (make_plan(6, dumps=str(tmp_path)), WORKLOAD, engine(4), 1, 3))
    assert failure.value.kind == "died"
    paths = [tmp_path / f"dump_{rank}.json" for rank in (0, 1)]
    for path in paths:  # as after a minute, for which the test does not wait
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"time_ns": record["time_ns"] + 60 * 10**9}))
    finding = post_mortem.diagnose([post_mortem.load_trace(path) for path in paths])
    assert (finding.kind, finding.ranks) == ("behind", [1])
    assert "lockstep.py" in finding.text, "the line is that of the loop, not of the recorder"


REFUSED = {
    "13": (["--engine", "13"], "module 13 trains no model: choose another engine"),
    "0": (["--engine", "0"], "module 0 trains no model"),
    "17": (["--engine", "99"], "there is no module 99"),
    "steps": (["--resume", "{saved}", "--steps", "2"], "another model"),
    "skeleton": (["--target", "{skeletons}"], r"cannot train, because module 7, part \(a\) is not written yet"),
    "nothing": (["--target", "{empty}"], "cannot train: module . cannot be imported: there is no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence(name, saved, tmp_path):
    arguments, sentence = REFUSED[name]
    (tmp_path / "empty").mkdir()
    for entry in MODULES if name == "skeleton" else ():
        for file, text in make_skeletons(entry).items():
            (tmp_path / file.name).write_text(text)
    places = {"saved": saved, "skeletons": tmp_path, "empty": tmp_path / "empty"}
    with pytest.raises(UserError, match=sentence):
        train.run(["--target", "solutions", *(one.format(**places) for one in arguments)])


def test_steps_and_directories_that_are_taken(saved, monkeypatch, capsys):
    monkeypatch.setattr(train, "SIZES", {"tiny": SIZE})
    common = ["--target", "solutions", "--save", str(saved)]
    assert train.run([*common, "--resume", str(saved), "--steps", "2"]) == 0
    assert "has 2 steps already: choose more with --steps" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match=f"has a checkpoint already: add --resume {saved}, or choose another"):
        train.run(common)


def test_the_program_prints_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "SIZES", {"tiny": SIZE})
    shape = ["--tokens", "64", "--steps", "3", "--rounds", "2", "--save", str(tmp_path)]
    assert train.run(["--target", "solutions", "--engine", "11", *shape]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"11 FullyShardedDDP +\d\.\d+.*\n *torch DDP +\d\.\d+.*\n *torch fully_shard +\d\.\d+", printed)
    assert len({re.search(rf"{name} +(\S+)", printed)[1] for name in ("DDP", "torch DDP", "fully_shard")}) == 1
    assert max(map(len, printed.splitlines())) <= 80
    assert checkpoint.read_manifest(tmp_path, asdict(SIZE))["step"] == 3


def test_modules_1_to_8_are_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "SIZES", {"tiny": SIZE})
    for path in (path for entry in select_modules("1-8") for path in entry.paths):
        shutil.copy(ROOT / "solutions" / path, tmp_path)
    shape = ["--tokens", "64", "--steps", "3", "--rounds", "2", "--save", str(tmp_path / "run")]
    assert train.run(["--target", str(tmp_path), "--engine", "8", *shape]) == 0
    printed = capsys.readouterr().out
    assert "because module 12 is not written yet" in printed and re.search(r"8 ZeroOptimizer +\d\.\d+", printed)
    assert checkpoint.read_manifest(tmp_path / "run", asdict(SIZE))["step"] == 3


def test_a_hang_without_module_13_is_one_sentence(monkeypatch, capsys):
    ends, codes = [], []
    timer = SimpleNamespace(start=lambda: None, cancel=lambda: None)
    monkeypatch.setattr(train.threading, "Timer", lambda _, function: ends.append(function) or timer)
    monkeypatch.setattr(train.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(train.os, "_exit", codes.append)
    monkeypatch.setattr(train.torchrun, "OTHERS_FIRST_S", 0)
    with train.watch_for_hangs({"dumps": "", "deadline": 8.0}):
        ends[0]()
    assert capsys.readouterr().err == "rank 1 has taken no step for 8 s\n" and codes == [1]


@pytest.mark.extended
def test_under_torchrun(tmp_path):
    shape = ["--tokens", "256", "--steps", "4", "--rounds", "2", "--save", tmp_path / "run"]
    program = [PROGRAM, "--engine", "9", "--png", tmp_path / "losses.png"]
    done = test_bench.under_torchrun(tmp_path, *shape, program=program, command=())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch fully_shard") == 1, "only rank 0 prints"
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["step"] == 4
