"""`brigade bench`: its options, its output and files, incomplete submissions, and ranks from torchrun."""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import socket
import sys
from dataclasses import asdict, replace

import hang_guard
import psutil
import pytest
import torch
from given_clock import give_clock
from in_ranks import little_memory
from lab_files import make_submission

from brigade.course.checks.tiny_lm import SIZES, TinyLM, make_tiny_lm
from brigade.course.cli import main as cli
from brigade.course.table.modules import CORE_MODULES, ROOT, get_module
from brigade.course.table.submission import read
from brigade.lab import bench, ladder, plots, timed_step, torchrun
from brigade.lab.cli import lab
from brigade.lab.emulated_link import Link
from brigade.ranks.errors import UserError
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner import machine
from brigade.ranks.runner.failure import RankFailure
from brigade.ranks.runner.ranks import run_ranks

SMALL = ("--rounds", 7, "--batch", 2, "--time", 8)  # of the tiny model
ALL_REDUCE = r"( +)(dist\.all_reduce\(.*\))"
NO_GRADIENTS = {"parameters": 1, "gradients": 1, "optimizer state": 1}


@pytest.fixture
def brigade(brigade):
    """Return a function that runs `brigade bench` in this process, and returns its exit status, output and errors."""
    return functools.partial(brigade, "bench", "--target", "solutions")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--latency-ratio", 1], "--latency-ratio needs --comm-ratio"),
        (["--comm-ratio", "nan"], "--comm-ratio nan: expected a number above 0"),
        (["--comm-ratio", 1, "--ranks", 1], "an emulated link needs at least two ranks"),
        (["--comm-ratio", 1, "--backend", "nccl"], "an emulated link needs the backend gloo"),
        (["--comm-ratio", 1, "--nodes", 3], "--nodes 3: 2 ranks do not form 3 equal nodes"),
        (["--ranks", 0], "--ranks 0: expected at least 1"),
        (["--ranks", 3, "--batch", 8], "3 ranks cannot split a batch of 8 sequences equally"),
        (["--rounds", 6], "--rounds 6: expected at least 7, because 5 are not timed"),
        (["--bucket-mb", 1, 0], "--bucket-mb 0: expected a number above 0"),
        (["--target", "does/not/exist"], "there is no directory does/not/exist"),
        (["--target", "lessons", "--modules", 2], ": Module 2 is left out: module 2, part (a) is not written yet."),
        (["--target", "lessons"], "1, part (a) is not written yet. 7 others are left out, too. --target solutions"),
        (["--json", "does/not/exist.json"], "there is no directory"),
        (["--save"], "--save works only with your own modules, not with --target solutions"),
    ],
)
def test_wrong_input_gets_one_line(brigade, arguments, sentence):
    done = brigade(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.startswith("brigade: ") and done.stderr.count("\n") == 1, done


@pytest.mark.parametrize("wrong", [["--rounds", "6"], ["--size", "huge"]])
def test_only_rank_0_of_torchrun_says_what_is_wrong(wrong, monkeypatch, capfd):
    monkeypatch.setattr(cli, "OTHERS_FIRST_S", 0)
    for name, value in zip(machine.TORCHRUN, ("1", "2", "1", "2", "localhost", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *wrong])
    assert capfd.readouterr() == ("", "")


def test_variables_of_a_cluster_do_not_silence_a_command(refuse, monkeypatch):
    """Some clusters set these four in each container, for whatever runs there."""
    for name, value in {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert "--rounds 6" in refuse("bench", "--rounds", 6)


def test_nccl_is_the_default_where_every_rank_has_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    wanted = [argparse.Namespace(ranks=ranks, backend=None) for ranks in (1, None, 3)]
    assert [lab.choose_ranks(one) for one in wanted] == [(1, "nccl"), (2, "nccl"), (3, "gloo")]
    for name, value in zip(machine.TORCHRUN, ("5", "8", "1", "2", "localhost", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert lab.choose_ranks(wanted[1]) == (8, "nccl"), "two of eight ranks are on this machine"
    with pytest.raises(UserError, match="--ranks 3: torchrun has started 8"):
        lab.choose_ranks(wanted[2])


DOCUMENTS = [*sorted((ROOT / "tools/slurm").iterdir()), *sorted((ROOT / "docs").glob("*.md"))]
NUMBER_OF_RANKS = {
    r"--nproc-per-node (\d+)": r"--nnodes (\d+)",
    r"#SBATCH --gpus-per-node=(\d+)": r"#SBATCH --nodes=(\d+)",
    r"brigade bench .*--ranks (\d+)": "nothing else",
}


def find_world_sizes(text):
    """Return the numbers of ranks that the commands of a document or of a Slurm script run a benchmark with."""
    commands = [text] if text.startswith("#!") else re.sub(r"\\\n", "", text).splitlines()
    return [
        int(own[1]) * int(others[1] if (others := re.search(nodes, command)) else 1)
        for command in commands
        for ranks, nodes in NUMBER_OF_RANKS.items()
        if " bench " in command and (own := re.search(ranks, command))
    ]


def test_the_default_batch_fits_all_ranks_that_the_documents_start():
    sizes = {path.name: find_world_sizes(path.read_text()) for path in DOCUMENTS}
    assert sizes["bench.sbatch"] == [16]
    assert sizes["gpus.md"] == [8, 8, 8, 16]
    for world_size in {*range(1, 65), *(size for found in sizes.values() for size in found)}:
        for workload in (ladder.Workload(), ladder.EMULATED):
            batch_size = ladder.fit_batch(workload, world_size).batch_size
            assert batch_size % world_size == 0
            assert workload.batch_size <= batch_size < workload.batch_size + world_size


@pytest.mark.parametrize(("options", "batch_size"), [((), 9), (("--batch", 6), 6), (("--comm-ratio", 1), 24)])
def test_the_command_runs_with_any_number_of_ranks(options, batch_size, brigade, monkeypatch):
    def run(workload, variants, sources, **how):
        raise UserError(f"a batch of {workload.batch_size} on {how['world_size']} ranks")

    monkeypatch.setattr(ladder, "run_benchmark", run)
    assert brigade("--ranks", 3, *options).stderr == f"brigade: a batch of {batch_size} on 3 ranks\n"


def test_the_sizes_that_the_page_recommends_fit():
    """A row names the largest size that fits with 10 % to spare, and what it takes."""
    text = (ROOT / "docs" / "gpus.md").read_text()
    cell = r"\| (\w+): ([\d.]+) GB "
    table = re.findall(rf"^\| (\d+) GB \(.*\) {cell * 3}\|$", text, re.MULTILINE)
    numels = {name: sum(weight.numel() for weight in make_tiny_lm(name, "meta").parameters()) for name in SIZES}
    assert len(table) == 5
    for room, *cells in table:
        for num_models, name, stated in zip((12, 5, 3), cells[::2], cells[1::2], strict=True):
            taken = {size: 16e-9 * num_models * numel for size, numel in numels.items()}
            assert [size for size in taken if taken[size] <= 0.9 * int(room)][-1] == name
            assert float(stated) == pytest.approx(taken[name], abs=0.051)
    assert len(ladder.add_torch_variants(ladder.get_course_variants())) + 2 == 12


def test_the_slurm_scripts_ask_for_cores_and_memory_and_bind_nothing():
    """With one task per node, Slurm gives a task one core by default, and binds all ranks to it."""
    for script in (ROOT / "tools/slurm").iterdir():
        text = script.read_text()
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
        gpus = int(asked.get("gpus-per-node", 4))  # grade.sbatch has none, but its comment has 4
        assert int(asked["cpus-per-task"]) >= 2 * gpus, "each rank has the autograd thread, too"
        assert "mem" in asked
        for call in re.findall(r"^srun (?:.*\\\n)*.*", text, re.MULTILINE):
            assert "--cpu-bind=none" in call
            assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in call, "srun does not inherit it (Slurm 22.05)"


# A line is one write: `print` of several words makes one for each if PYTHONUNBUFFERED is set, and ranks' lines mix.
RANK = "import os, sys; sys.stdout.write(' '.join(os.environ[name] for name in sys.argv[1:]) + '\\n')"


def start_ranks(place, count, program, *arguments, node=0):
    """Run a program on the ranks of one of two nodes of a Slurm job, with a program of Slurm in `place`."""
    scontrol = place / "scontrol"
    scontrol.write_text("#!/bin/sh\ntest \"$*\" = 'show hostnames n[1-2]' && printf 'n1\\nn2\\n'\n")
    scontrol.chmod(0o755)
    job = {"SLURM_NODEID": str(node), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "20007"}
    job |= {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{place}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "tools.ranks_of_node", count, "-c", program, *arguments]
    return hang_guard.run(command, cwd=ROOT, env=os.environ | job, capture_output=True, text=True)


def test_a_node_of_a_slurm_job_starts_its_ranks(tmp_path):
    done = start_ranks(tmp_path, 3, RANK, *machine.TORCHRUN, node=1)
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [f"{3 + index} 6 {index} 3 n1 20007" for index in range(3)]


def test_the_rank_that_fails_ends_the_others_of_its_node_and_only_it_speaks(tmp_path):
    program = "import os, signal, sys; os.environ['RANK'] == '1' and sys.exit('I failed'); signal.pause()"
    done = start_ranks(tmp_path, 2, program)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "I failed\n")


# ---- what it prints and writes


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the content of the JSON file, the text, and the submission, of `brigade bench --modules 1,8 --save`.

    The link is emulated. The submission has the reference's modules, and the measurements of an earlier run.
    """
    directory = make_submission(tmp_path_factory.mktemp("bench"), modules=range(1, 9))
    printed = directory / "printed.txt"
    (directory / "measurements.json").write_text("the numbers of an earlier run")
    files = [word for kind in ("json", "png") for word in (f"--{kind}", directory / f"bench.{kind}")]
    arguments = ["--modules", "1,8", *SMALL, "--comm-ratio", 0.5, "--latency-ratio", 0.01, "--save", *files]
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        assert cli.main(["bench", "--target", str(directory), *map(str, arguments)]) == 0
    assert (directory / "bench.png").stat().st_size > 10_000
    return json.loads((directory / "bench.json").read_text()), printed.read_text(), directory


def test_the_numbers_are_those_of_the_run(measured):
    content, printed, _ = measured
    naive, zero, ddp, sharded = rows = content["rows"]
    assert [row["variant"] for row in rows] == ["1 NaiveDDP", "8 ZeroOptimizer", "torch DDP", "torch DDP + ZeRO"]
    steps, torch_steps = naive["rounds_ms"], ddp["rounds_ms"]
    assert len(steps) == 2 and naive["step_ms"]["median"] == pytest.approx(sum(steps) / 2)
    assert naive["step_ms"]["lower"] == pytest.approx(min(steps) + abs(steps[0] - steps[1]) / 4)
    assert naive["ratio"]["median"] == pytest.approx(sum(a / b for a, b in zip(steps, torch_steps, strict=True)) / 2)
    assert ddp["ratio"] == {"median": 1, "lower": 1, "upper": 1}
    mb = 4 * sum(p.numel() for p in TinyLM(SIZES["tiny"]).parameters()) / 1e6
    assert naive["sent_mb"] == mb and set(naive["kept_mb"].values()) == {mb}  # SGD keeps one momentum per parameter
    assert ddp["kept_mb"]["gradients"] == 2 * mb  # and the buckets
    assert all(0.45 * mb <= row["kept_mb"]["optimizer state"] <= 0.55 * mb for row in (zero, sharded))
    for row, buckets_mb in ((naive, 0), (zero, 0), (ddp, mb)):
        assert row["peak_mb"]["parameters"] == row["kept_mb"]["parameters"]
        largest_mb = 4 * 256 * 128 / 1e6  # the embedding's gradient, before it is added to a buffer
        assert mb + buckets_mb <= row["peak_mb"]["gradients"] <= mb + buckets_mb + 2 * largest_mb
    # The link has the ratio that was asked for.
    assert content["link"]["all_reduce_ms"] == pytest.approx(0.51 * content["backward_ms"])
    least_ms = 2e3 * naive["collectives"] * content["link"]["latency_s"] + 0.5 * content["backward_ms"]
    assert least_ms <= min(steps), "its all-reduces are synchronous and inside the step"
    tables, link, remarks = printed.partition("The link is emulated, ")
    assert max(map(len, tables.splitlines())) <= 80
    assert link and "8 ZeroOptimizer relative to torch DDP + ZeRO: step time " in remarks
    assert "All losses equal that of one process" in remarks


@pytest.mark.extended
def test_on_two_links_the_outer_one_carries_a_fraction(brigade, tmp_path):
    """Module 14 keeps twice the weights in two nodes."""
    file = tmp_path / "bench.json"
    shape = ("--ranks", 4, "--nodes", 2, "--comm-ratio", 0.5, "--rounds", 7, "--batch", 4, "--time", 8)
    done = brigade("--modules", "11,14", *shape, "--json", file)
    assert done.returncode == 0, done
    assert "14 HybridShardedDDP relative to 11 FullyShardedDDP: step time" in done.stdout
    content = json.loads(file.read_text())
    assert content["link"]["outer"]["latency_s"] == pytest.approx(lab.SLOWDOWN * content["link"]["latency_s"])
    fully, hybrid, *_, torch_fully = content["rows"]
    assert fully["outer_mb"] == fully["sent_mb"] == pytest.approx(torch_fully["outer_mb"])
    halves = fully["sent_mb"] / 3 / (3 / 4) / 2  # module 11 sends 3 (N - 1) / N of the weights, but the root only 2
    assert hybrid["outer_mb"] == pytest.approx(halves, rel=0.1)
    assert hybrid["kept_mb"]["parameters"] == pytest.approx(2 * fully["kept_mb"]["parameters"], rel=0.01)


def test_the_emulation_is_trusted_up_to_a_fifth():
    marks = [[[0.0, 1.0, 2.0, 3.0, 4.0]]] * 2
    alone = ladder.Measurement("alone", marks, 1, 1, 0, [3.0, 3.0], NO_GRADIENTS, NO_GRADIENTS)
    link = Link(latency_s=0, bytes_per_s=125e9)
    results = ladder.Ladder(ladder.EMULATED, 2, "gloo", math.nan, [], alone, link, 1.0, 0.0, 10**9)
    first, within = bench.list_remarks(replace(results, real_s=0.199 * results.link_s))
    assert first.startswith("The link is emulated, 0.0 µs per message and 1e+03 Gbit/s in each direction: ")
    assert (
        within.endswith("20 % of the emulated time.")
        and replace(results, real_s=0.199 * results.link_s).verdict.real_share < 0.2
    )
    beyond = replace(results, real_s=0.21 * results.link_s)
    assert "choose a slower link or a larger workload" in bench.list_remarks(beyond)[2]
    assert "a real all-reduce takes 21 % of the emulated time" in beyond.verdict.sentence


@pytest.mark.extended
def test_several_bucket_sizes_are_compared_in_one_run(brigade, tmp_path):
    done = brigade("--bucket-mb", 0.3, 4, "--modules", "4,5", *SMALL, "--json", tmp_path / "sizes.json")
    assert done.returncode == 0, done
    rows = json.loads((tmp_path / "sizes.json").read_text())["rows"]
    labels = [f"{name}, {mb} MiB" for name in ("4 BucketedDDP", "5 BufferedDDP", "torch DDP") for mb in ("0.3", "4")]
    assert [row["variant"] for row in rows] == labels and [row["bucket_mb"] for row in rows] == [0.3, 4.0] * 3
    assert [row["ratio"]["median"] for row in rows[4:]] == [1.0, 1.0]  # torch DDP, to itself with the same buckets
    assert all(few["collectives"] == 1 < many["collectives"] for many, few in zip(rows[::2], rows[1::2], strict=True))
    table = done.stdout.split("No link is emulated")[0]
    assert all(label in table for label in labels) and max(map(len, table.splitlines())) <= 80


@pytest.mark.extended
def test_parameters_may_have_16_bits(brigade, tmp_path):
    """The model has half of the bytes. Losses differ by rounding, so they are not compared."""
    file = tmp_path / "bench.json"
    done = brigade("--modules", "2,5", *SMALL, "--dtype", "bfloat16", "--json", file)
    assert done.returncode == 0, done
    assert "The losses are not compared with those of one process." in done.stdout
    content = json.loads(file.read_text())
    assert content["expected_loss"] is None
    weights = sum(parameter.numel() for parameter in TinyLM(SIZES["tiny"]).parameters())
    kept = {row["variant"]: row["kept_mb"] for row in content["rows"]}
    assert {name: 1e6 * kind["parameters"] / weights for name, kind in kept.items()} == pytest.approx(
        dict.fromkeys(kept, 2.0)
    )
    gradients = {name: 1e6 * kind["gradients"] / weights for name, kind in kept.items()}
    assert gradients["2 FlatDDP"] == pytest.approx(2.0)
    assert gradients["5 BufferedDDP"] == pytest.approx(4.0 + 2.0, rel=1e-3), "main gradients, and those for SGD"
    assert content["dtype"] == "bfloat16" and "2 ranks (gloo, bfloat16)" in done.stdout


@pytest.mark.parametrize(
    ("name", "latency_us", "gigabytes"),
    [("nvlink4", 3.4, 18 * 20.6), ("pcie4", 5.7, 24), ("100gbe", 14, 12.5), ("40", 14, 5)],
)
def test_a_link_can_be_named(name, latency_us, gigabytes):
    options = argparse.Namespace(link=name, comm_ratio=None, latency_ratio=None, nodes=1)
    link = Link(pytest.approx(1e-6 * latency_us), pytest.approx(1e9 * gigabytes))
    assert lab.choose_link(options, 4, default=0.8) == {"link": link, "node_size": None}
    options.nodes = 2
    between = lab.choose_link(options, 4)["link"].outer
    assert between.latency_s == pytest.approx(lab.SLOWDOWN * link.latency_s.expected)
    assert between.bytes_per_s == pytest.approx(link.bytes_per_s.expected / lab.SLOWDOWN)
    options.comm_ratio = 0.5
    with pytest.raises(UserError, match="--link"):
        lab.choose_link(options, 4)


def test_save_writes_the_numbers_that_are_handed_in(measured, tmp_path, brigade):
    _, printed, submission = measured
    assert "measurements.json written; `brigade submit` includes it" in " ".join(printed.split())
    content = json.loads((submission / "measurements.json").read_text())
    assert content["made_with"]["cores"] == os.cpu_count() and content["made_with"]["torch"] == torch.__version__
    assert content["workload"]["link"]["comm_ratio"] == 0.5 and content["rows"] == measured[0]["rows"]
    (make_submission(tmp_path) / "measurements.json").symlink_to(tmp_path / "elsewhere")
    assert "results cannot be written to or through a link" in brigade("--target", tmp_path, "--save").stderr


# ---- variants that do not fit into memory together


@pytest.mark.parametrize(("free_bytes", "is_enough"), [(222_223, True), (222_222, False), (0, False)])
def test_variants_fit_if_a_tenth_is_spare(free_bytes, is_enough):
    """12 variants of 1000 weights take 192 kB, and a step 8 kB."""
    assert timed_step.fits_in_memory(free_bytes, 8_000, numel=1_000, num_variants=12) == is_enough


def test_a_step_takes_weights_gradients_and_the_activations_of_its_tokens():
    nbytes = sum(parameter.nbytes for parameter in TinyLM(SIZES["tiny"]).parameters())
    few, many = (
        run_ranks(little_memory.measure_step, asdict(ladder.Workload(batch_size=2, time=time)), world_size=2)
        for time in (1, 64)
    )
    assert few[0] == few[1] and 2 * nbytes <= few[0] < 2.1 * nbytes
    logits = 64 * 256 * 4  # of one rank's sequence, in fp32
    assert many[0] - few[0] > 2 * logits


def test_ranks_that_share_a_gpu_are_counted():
    assert list(run_ranks(little_memory.count_with_names, ["a", "b", "a"], world_size=3)) == [2, 1, 2]


def run_with_memory(monkeypatch, train, numbers=(1, 8, 9), **how):
    """Return a short benchmark of modules and torch DDP, in which `train` replaces that of the ladder."""
    monkeypatch.setattr(ladder, "train", train)
    workload = ladder.Workload(batch_size=2, time=8, rounds=4, warmup=1)
    variants = [*(ladder.get_variant(get_module(number)) for number in numbers), ladder.TORCH_DDP]
    return ladder.run_benchmark(workload, variants, **how)


@pytest.mark.extended
def test_variants_that_do_not_fit_run_one_after_the_other(monkeypatch, tmp_path):
    """They train as they do together, and each has its own computation alone. One rank decides for all."""
    steps = []
    together = run_with_memory(monkeypatch, little_memory.train_with_plenty)
    alone = run_with_memory(monkeypatch, little_memory.train_with_little, on_step=lambda: steps.append(1))
    assert together.is_interleaved and not alone.is_interleaved
    assert alone.list_wrong_losses() == []
    assert len(steps) == ladder.count_steps(alone.workload, alone.variants)
    names = ("label", "losses", "collectives", "sent_bytes", "kept_bytes", "peak_bytes", "copied_bytes", "new_views")
    for one, other in zip(
        [*alone.variants, alone.computation], [*together.variants, together.computation], strict=True
    ):
        for name in names:
            assert getattr(one, name) == getattr(other, name), (one.label, name)
        assert len(one.step_ms) == len(other.step_ms) == 3
    computations = [alone.get_computation_ms(one) for one in alone.variants]
    assert computations[0] == alone.computation.step_ms
    assert [len(times) for times in computations] == [3] * 4 and len({*map(tuple, computations)}) == 4
    for results, order in ((together, "interleaved"), (alone, "in sequence")):
        bench.save(results, tmp_path / "bench.json")
        content = json.loads((tmp_path / "bench.json").read_text())
        assert content["interleaved"] == results.is_interleaved == (bench.ONE_AFTER_THE_OTHER not in say(results))
        assert plots.describe_ranks(results).endswith(f" timed steps each, {order}")
        for row in content["rows"]:
            exposed = [a - b for a, b in zip(row["rounds_ms"], row["computation_rounds_ms"], strict=True)]
            assert row["exposed_ms"]["median"] == pytest.approx(sorted(exposed)[1])


def say(results):
    return " ".join(bench.list_remarks(results))


def test_a_gpu_without_memory_is_one_sentence(tmp_path):
    full = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
    submission = make_submission(tmp_path, [(1, ALL_REDUCE, rf"\1{full}")])
    variants = [ladder.get_variant(get_module(1)), ladder.TORCH_DDP]
    with pytest.raises(RankFailure) as caught:
        ladder.run_variants(ladder.Workload(batch_size=2, time=8), variants, read(submission, 1))
    what = "the GPU has too little free memory for 1 NaiveDDP, torch DDP: choose a smaller size or batch"
    assert re.fullmatch(f"rank [01] raised MemoryError: {what}", str(caught.value))


# ---- submissions


def test_what_is_not_written_is_left_out(tmp_path):
    make_submission(tmp_path, [(5, r"\Z", '\nraise NotImplementedError("module 5, part (b)")\n')], modules=range(1, 7))
    (tmp_path / get_module(2).path).write_text("def (\n")
    chosen, _, sentences = bench.select_written(str(tmp_path), CORE_MODULES)
    assert [entry.number for entry in chosen] == [1, 3, 4]
    reasons = [
        "module 2 cannot be imported: flat_ddp.py, line 1: invalid syntax: def (",
        *["module 5, part (b) is not written yet"] * 2,
        *["module 7 cannot be imported: there is no m07_cached_shards/cached_shards.py"] * 2,
    ]
    assert sentences == [
        f"Module {number} is left out: {why}." for number, why in zip((2, 5, 6, 7, 8), reasons, strict=True)
    ]
    assert bench.select_written("solutions", CORE_MODULES)[0] == list(CORE_MODULES)


@pytest.mark.extended
def test_a_submission_that_trains_otherwise_fails(brigade, tmp_path):
    done = brigade("--target", make_submission(tmp_path, [(1, r"parameter\.grad /= .*", "pass")]), *SMALL)
    assert done.returncode == 1
    assert "Module 3 is left out: module 3 cannot be imported" in done.stdout
    assert "1 NaiveDDP does not train as one process does: rank 1 has a loss of" in done.stdout


def test_a_submission_that_deadlocks_is_stopped_soon(brigade, tmp_path):
    mistake = r"\1if dist.get_rank(self.process_group) == 0:\n\1    \2"
    done = brigade("--target", make_submission(tmp_path, [(1, ALL_REDUCE, mistake)]), "--modules", 1, *SMALL)
    assert done.returncode == 1
    assert re.match("brigade: (deadlock|rank . launched)", done.stderr), done.stderr


# ---- ranks of torchrun


def under_torchrun(tmp_path, *arguments, program=("-m", "brigade"), command=("bench",)):
    """Run `brigade bench`, or another program, on two ranks of torchrun. Return its exit status, output and errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    (tmp_path / "tmp").mkdir()  # torchrun leaves a directory there when a rank fails
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = hang_guard.run(
        [*run, *program, *command, "--target", "solutions", *arguments],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    left = [one for one in psutil.process_iter(["environ"]) if str(tmp_path) in str(one.info["environ"])]
    assert not left, "a process has outlived the run"
    return done


@pytest.mark.extended
def test_torchrun_gives_the_losses_of_a_local_run(measured, tmp_path):
    given = tmp_path / "given.json"
    done = under_torchrun(tmp_path, "--modules", "1,8", *SMALL, "--json", given)
    assert done.returncode == 0, done.stderr
    results, local = (content["rows"] for content in (json.loads(given.read_text()), measured[0]))
    for name in ("losses", "collectives"):
        assert [row[name] for row in results] == [row[name] for row in local]
    assert done.stdout.count("Step time: 2 ranks (gloo)") == 1, "only rank 0 prints"
    assert all(path.name.startswith("torchelastic_") for path in (tmp_path / "tmp").iterdir()), "the shared files stay"


LITTLE_MEMORY = """
import sys

from brigade.course.cli import main
from brigade.lab import timed_step

timed_step.measure_free_bytes = lambda: 1
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.extended
def test_under_torchrun_variants_that_do_not_fit_run_one_after_the_other(measured, tmp_path):
    program, file = tmp_path / "program.py", tmp_path / "bench.json"
    program.write_text(LITTLE_MEMORY)
    done = under_torchrun(tmp_path, "--modules", "1,8", *SMALL, "--json", file, program=[program])
    assert done.returncode == 0, done.stderr
    assert bench.ONE_AFTER_THE_OTHER in " ".join(done.stdout.split())
    assert "All losses equal that of one process" in done.stdout
    results, local = (content["rows"] for content in (json.loads(file.read_text()), measured[0]))
    for name in ("variant", "losses", "collectives", "sent_mb", "kept_mb", "peak_mb"):
        assert [row[name] for row in results] == [row[name] for row in local], name


def test_under_torchrun_no_link_is_emulated(monkeypatch):
    for name, value in zip(machine.TORCHRUN, ("0", "2", "0", "1", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="leave out the options of an emulated link"):
        torchrun.run_on_torchrun(timed_step.train, {}, [], mode="emulate")


FAILURES = {  # what rank 1 does before an all-reduce, and what the rank that prints says
    "raise ValueError('no more')": r"rank 1 on .* raised ValueError: no more\n  naive_ddp.py, line ",
    "__import__('time').sleep(1000)": r"rank 0 on .* raised .*imed out.*; it waits in all_reduce #.*\n  naive_ddp",
}


@pytest.mark.extended
@pytest.mark.parametrize("mistake", FAILURES, ids=["raises", "hangs"])
def test_under_torchrun_a_rank_that_fails_says_why(mistake, tmp_path):
    text = rf"\1if dist.get_rank() == 1:\n\1    {mistake}\n\1\2"
    target = make_submission(tmp_path, [(1, ALL_REDUCE, text)])
    done = under_torchrun(tmp_path, "--target", target, "--modules", 1, *SMALL, "--deadline", 25)
    assert done.returncode != 0
    assert done.stderr.count("brigade: ") == 1, "only a rank that failed prints"
    assert re.search(f"^brigade: {FAILURES[mistake]}", done.stderr, re.M)


@pytest.mark.extended
def test_under_torchrun_an_error_is_one_sentence(tmp_path):
    done = under_torchrun(tmp_path, *SMALL, "--batch", 5)
    assert done.returncode != 0
    assert done.stderr.count("brigade: 2 ranks cannot split a batch of 5 sequences equally") == 1
    assert "brigade/course/cli/main.py" not in done.stderr  # no traceback of ours; torchrun shows its own


def test_a_rank_without_progress_gives_up_once(monkeypatch):
    """Under torchrun on NCCL. Every event counts as progress, and nothing happens before the limit."""
    clock = give_clock(monkeypatch, torchrun)
    record, said = RankRecord(), []
    watch = torchrun.ProgressWatch(record, 20.0, lambda: said.append(record.describe_activity()))
    for now, event in ((19.9, "forward"), (39.8, "backward"), (59.7, None), (59.9, None), (80.0, None)):
        clock.now = now
        watch.look()
        if event:
            record.add({"kind": "phase", "time": now, "phase": event})
            watch.look()
        assert bool(said) == (now > 59.8)
    assert said == ["is in backward and has launched nothing"]


def test_a_rank_whose_results_are_complete_does_not_give_up(monkeypatch):
    clock = give_clock(monkeypatch, torchrun)
    watch = torchrun.ProgressWatch(RankRecord(), 20.0, lambda: pytest.fail("gave up"))
    watch.stop()
    clock.now = 100.0
    watch.look()


def test_a_rank_without_progress_says_where_it_is(monkeypatch, capsys):
    """The line is that of the submission, in the main thread."""
    record, statuses = RankRecord(), []
    record.add({"kind": "phase", "time": 0.0, "phase": "finish"})
    monkeypatch.setattr(torchrun, "OTHERS_FIRST_S", 0.0)
    monkeypatch.setattr(torchrun, "exit_process", statuses.append)
    end = functools.partial(torchrun.end_without_progress, 3, record, 20.0)
    names = {"__name__": "submission.m01_naive_ddp.naive_ddp", "end": end}
    exec(compile("\n\nend()", "/elsewhere/naive_ddp.py", "exec"), names)
    end()
    inside, outside = capsys.readouterr().err.splitlines()
    host = socket.gethostname()
    said = f"brigade: rank 3 on {host} has done nothing for 20 s; it is in finish and has launched nothing"
    assert (inside, outside) == (f"{said}, at naive_ddp.py:3", said)
    assert statuses == [1, 1]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Gloo connectFullMesh failed with [pair.cc:152] timed out", "a peer could not be reached:"),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:12345", "lost a peer; it is busy and has launched"),
    ],
)
def test_a_broken_connection_differs_from_one_that_never_existed(message, said, monkeypatch):
    monkeypatch.setattr(torchrun, "OTHERS_FIRST_S", 0.0)
    failure = RankFailure("exception", f"rank 0 raised RuntimeError: {message}", [], 0, "RuntimeError", message=message)
    assert said in str(torchrun.add_place(failure, RankRecord()))


@pytest.mark.extended
def test_two_hosts_train_as_one_process_does(tmp_path):
    """Two network namespaces are joined by a link of a known rate. An all-reduce takes the time of the wire."""
    mbit_per_s, file = 500, tmp_path / "bench.json"
    command = [ROOT / "tests" / "two_hosts.sh", f"{mbit_per_s}mbit", "--modules", "1", *SMALL, "--json", file]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TMPDIR": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = hang_guard.run(command, **how)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0 and done.stdout.count("Step time: 2 ranks (gloo)") == 1, done.stderr
    content = json.loads(file.read_text())
    for row in content["rows"]:
        assert row["losses"] == pytest.approx([content["expected_loss"]] * 2, abs=1e-6), row["variant"]
    transfer_ms = 8e3 * content["rows"][0]["sent_mb"] / mbit_per_s  # module 1 sends all gradients once
    assert 0.9 * transfer_ms <= content["real_all_reduce_ms"]  # tc lets a burst of 256 kB pass immediately
