"""`brigade bench`: its options, its output and files, incomplete submissions, and ranks from torchrun."""

import argparse
import contextlib
import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
from lab_files import make_submission, png_size

from brigade.checks.tiny_lm import SIZES, TinyLM
from brigade.cli import lab
from brigade.cli import main as cli
from brigade.course.measurements import MAX_BYTES, read_measurements
from brigade.course.modules import CORE_MODULES, ROOT, TRAINING_MODULES, CourseError, get_module
from brigade.lab import bench, ladder, links, on_ranks, torchrun
from brigade.progress import RankRecord
from brigade.rank.emulated_link import Link, Pace

SMALL = ("--rounds", 7, "--batch", 2, "--time", 8)  # of the tiny model
EMULATED = ("--modules", "1,8", *SMALL, "--comm-ratio", 0.5, "--latency-ratio", 0.01)


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    for name in torchrun.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def brigade(brigade):
    """Return a function that runs `brigade bench` in this process, and returns its exit status, output and errors."""
    return functools.partial(brigade, "bench", "--target", "solutions")


# ---- links


def test_named_links_are_what_they_are_said_to_be():
    backward_s = 4 * 1_998_235_200 * 32_768 / (0.4 * 989.4e12)
    assert links.BACKWARD_S == pytest.approx(backward_s) == pytest.approx(0.6618, abs=1e-4)
    with torch.device("meta"):
        parameters = list(TinyLM(SIZES["xl"]).parameters())
    assert sum(parameter.numel() for parameter in parameters) == links.PARAMETERS
    rates = {"nvlink4": 450e9, "pcie4": 31.508e9, "100gbe": 12.5e9, "10gbe": 1.25e9}
    latencies = {"nvlink4": 3.4e-6, "pcie4": 5.7e-6, "100gbe": 14e-6, "10gbe": 14e-6}
    assert list(links.NAMED) == list(rates)
    for name, link in links.NAMED.items():
        for ranks in (2, 8):
            pace = link.make_pace(ranks)
            sent = 4 * 1_998_235_200 * 2 * (ranks - 1) / ranks
            assert pace.comm_ratio == pytest.approx(sent / rates[name] / backward_s, rel=1e-3)
            assert pace.latency_ratio == pytest.approx(2 * (ranks - 1) * latencies[name] / backward_s)
            # In the setup itself, the pace gives the link again.
            again = pace.link(backward_s, 4 * 1_998_235_200, ranks)
            assert again.bytes_per_s == pytest.approx(link.bytes_per_s)
            assert again.latency_s == pytest.approx(link.latency_s)


def options(*arguments):
    parser = argparse.ArgumentParser()
    lab.add_link_arguments(parser, "no link is emulated")
    return parser.parse_args([str(argument) for argument in arguments])


def test_two_ways_to_say_which_link():
    assert lab.choose_link(options(), 2) is None
    assert lab.choose_link(options("--comm-ratio", 0.8), 2) == Pace(0.8, links.LATENCY_RATIO)
    assert lab.choose_link(options("--comm-ratio", 2, "--latency-ratio", 0), 2) == Pace(2, 0)
    assert lab.choose_link(options("--link", "10gbe"), 4) == links.NAMED["10gbe"].make_pace(4)
    assert ladder.EMULATED.link == Pace(0.8, links.LATENCY_RATIO)


def test_on_two_links_the_outer_one_carries_a_fraction(brigade, tmp_path):
    """Module 14 and torch's two-dimensional mesh keep twice the weights in two nodes, and send the same bytes."""
    file = tmp_path / "bench.json"
    shape = ("--ranks", 4, "--nodes", 2, "--comm-ratio", 0.5, "--slowdown", 2, "--rounds", 7, "--batch", 4, "--time", 8)
    done = brigade("--modules", "11,14", *shape, "--json", file)
    assert done.returncode == 0, done
    assert "14 HybridShardedDDP relative to torch fully_shard 2-D: step time" in done.stdout
    results = bench.load_json(file)
    assert results.link.outer.latency_s == 2 * results.link.latency_s and results.link.node_size == 2
    fully, hybrid, *_, torch_fully, torch_hybrid = bench.make_rows(results)
    assert fully.outer_mb == fully.sent_mb == pytest.approx(torch_fully.outer_mb)
    halves = fully.sent_mb / 3 / (3 / 4) / 2  # module 11 sends 3 (N - 1) / N of the weights, but the root only 2
    assert hybrid.outer_mb == pytest.approx(torch_hybrid.outer_mb) == pytest.approx(halves, rel=0.1)
    assert hybrid.param_mb == pytest.approx(2 * fully.param_mb, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--link", "10gbe", "--comm-ratio", 1], "--link and --comm-ratio cannot be used together"),
        (["--latency-ratio", 1], "--latency-ratio needs --comm-ratio"),
        (["--comm-ratio", 0], "--comm-ratio 0: expected a number above 0"),
        (["--comm-ratio", "nan"], "--comm-ratio nan: expected a number above 0"),
        (["--comm-ratio", 1, "--latency-ratio", -1], "--latency-ratio -1: expected a number that is not negative"),
        (["--comm-ratio", 1, "--ranks", 1], "an emulated link needs at least two ranks"),
        (["--comm-ratio", 1, "--nodes", 3], "--nodes 3: 2 ranks do not form 3 equal nodes"),
        (["--nodes", 2, "--slowdown", 4], "--slowdown needs --nodes and an emulated link"),
        (["--ranks", 0], "--ranks 0: expected at least one rank"),
        (["--ranks", 3], "3 ranks cannot split a batch of 8 sequences equally: change --batch"),
        (["--rounds", 6], "--rounds 6: use at least 7, because the first 5 are not timed"),
        (["--time", 0], "--time 0: a sequence needs at least one token"),
        (["--bucket-mb", 0], "--bucket-mb 0: expected a number above 0"),
        (["--deadline", -1], "--deadline -1: expected a number above 0"),
        (["--modules", "99"], "there is no module"),
        (["--sweep", "1,x"], "--sweep 1,x: write sizes in MiB, such as 0.1,1,10"),
        (["--sweep", "--modules", 3], "--sweep compares bucket sizes, but module 3 has no buckets"),
        (["--target", "does/not/exist"], "there is no directory does/not/exist"),
        (["--target", "lessons", "--modules", "1-2"], "Module 2 is left out: module 2, part (a) is not written yet."),
        (["--json", "does/not/exist.json"], "there is no directory"),
        (["--save"], "--save works only with your own modules, not with --target solutions"),
    ],
)
def test_wrong_input_gets_one_line(brigade, arguments, sentence):
    done = brigade(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.startswith("brigade: ") and done.stderr.count("\n") == 1, done


def test_a_link_is_not_emulated_on_nccl():
    with pytest.raises(CourseError, match="an emulated link needs the backend gloo"):
        ladder.run_benchmark(ladder.EMULATED, [ladder.TORCH_DDP], backend="nccl")


def test_nccl_is_the_default_where_every_rank_has_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [lab.default_backend(ranks) for ranks in (1, 2, 3)] == ["gloo", "nccl", "gloo"]
    for name, value in zip(torchrun.VARIABLES, ("5", "8", "1", "2", "localhost", "0")):
        monkeypatch.setenv(name, value)
    assert lab.choose_world_size(None) == 8
    assert lab.default_backend(8) == "nccl", "two of eight ranks are on this machine"
    with pytest.raises(CourseError, match="--ranks 2: torchrun has started 8"):
        lab.choose_world_size(2)


# ---- what it prints and writes


def test_save_writes_the_numbers_that_are_handed_in(tmp_path, brigade):
    submission = make_submission(tmp_path)
    path = submission / "measurements.json"
    path.write_text("the numbers of an earlier run")
    done = brigade("--target", submission, "--modules", 1, *SMALL, "--comm-ratio", 0.5, "--save")
    assert done.returncode == 0 and "measurements.json written; `brigade submit` includes it" in done.stdout
    raw, content = read_measurements(path)
    assert len(raw) < MAX_BYTES / 10
    labels = [row["variant"] for row in content["rows"]]
    assert labels == ["1 NaiveDDP", *(variant.label for variant in ladder.TORCH)]
    spread = content["rows"][0]["step_ms"]
    assert 0 < spread["lower"] <= spread["median"] <= spread["upper"]
    assert content["made_with"]["cores"] == os.cpu_count() and content["made_with"]["torch"] == torch.__version__
    assert content["workload"]["link"]["comm_ratio"] == 0.5 and content["link"]["all_reduce_ms"] > 0
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert "results cannot be written to or through a link" in brigade("--target", submission, "--save").stderr


@pytest.fixture(scope="module")
def written_files(tmp_path_factory):
    """Return the files and the text that `brigade bench --modules 1,8` with an emulated link wrote and printed."""
    directory = tmp_path_factory.mktemp("bench")
    paths = {kind: directory / f"bench.{kind}" for kind in ("json", "png")}
    arguments = [*EMULATED, *(word for kind, path in paths.items() for word in (f"--{kind}", path))]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["bench", "--target", "solutions", *map(str, arguments)]) == 0
    return SimpleNamespace(**paths, printed=printed.getvalue())


def test_the_json_is_complete_and_can_be_read_again(written_files, tmp_path):
    content = json.loads(written_files.json.read_text())
    assert content["made_with"]["torch"] == torch.__version__
    results = bench.load_json(written_files.json)
    assert results.workload == replace(
        ladder.EMULATED, rounds=7, batch_size=2, time=8, link=Pace(comm_ratio=0.5, latency_ratio=0.01)
    )
    assert (results.world_size, results.backend) == (2, "gloo")
    again = tmp_path / "again.json"
    bench.save_json(results, again)
    assert json.loads(again.read_text()) == content
    assert bench.load_json(again) == results
    assert [row["variant"] for row in content["rows"]] == [row.variant for row in bench.make_rows(results)]


def test_the_numbers_of_a_row_are_those_of_the_run(written_files):
    results = bench.load_json(written_files.json)
    naive, zero, ddp, sharded = bench.make_rows(results)
    assert [row.variant for row in bench.make_rows(results)] == [
        "1 NaiveDDP",
        "8 ZeroOptimizer",
        "torch DDP",
        "torch DDP + ZeRO",
    ]
    steps, torch_steps, alone = (
        variant.step_ms for variant in (*(results.variants[index] for index in (0, 2)), results.computation)
    )
    assert len(steps) == 2
    assert naive.step_ms.median == pytest.approx(sum(steps) / 2)
    assert naive.step_ms.lower == pytest.approx(min(steps) + abs(steps[0] - steps[1]) / 4)
    assert naive.ratio.median == pytest.approx(sum(a / b for a, b in zip(steps, torch_steps)) / 2)
    assert naive.exposed_ms.median == pytest.approx(sum(a - b for a, b in zip(steps, alone)) / 2)
    nbytes = results.model_bytes
    assert nbytes == 4 * sum(p.numel() for p in TinyLM(SIZES["tiny"]).parameters())
    assert naive.param_mb == naive.grad_mb == naive.state_mb == nbytes / 1e6  # SGD keeps one momentum per parameter
    assert ddp.grad_mb == 2 * nbytes / 1e6  # and the buckets
    assert nbytes / 2e6 <= zero.state_mb <= 0.51 * nbytes / 1e6
    assert 0.45 * nbytes / 1e6 <= sharded.state_mb <= 0.55 * nbytes / 1e6
    assert naive.sent_mb == nbytes / 1e6
    for row, buckets in ((naive, 0), (zero, 0), (ddp, nbytes)):
        assert (row.peak_param_mb, row.peak_state_mb) == (row.param_mb, row.state_mb)
        least = (nbytes + buckets) / 1e6
        largest_mb = 4 * 256 * 128 / 1e6  # the embedding's gradient, before it is added to a buffer
        assert least <= row.peak_grad_mb <= least + 2 * largest_mb


def test_the_link_has_the_ratio_that_was_asked_for(written_files):
    results = bench.load_json(written_files.json)
    assert results.link_s == pytest.approx(0.51 * results.backward_s)
    naive = results.get_measurement("1 NaiveDDP")
    least_s = naive.collectives * results.link.seconds("all_reduce", 0, 2) + 0.5 * results.backward_s
    assert all(1e3 * least_s <= step for step in naive.compute_exposed_ms(results.computation))


def test_what_is_printed_fits_a_pipe_and_says_which_link_it_is(written_files):
    tables = written_files.printed.split("The link is emulated")[0].splitlines()
    assert max(map(len, tables)) <= 80
    link = bench.load_json(written_files.json).link
    assert f"The link is emulated, {link.description}: " in written_files.printed
    assert "All losses equal that of one process" in written_files.printed
    assert written_files.png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_emulation_is_trusted_up_to_a_fifth(written_files):
    results = bench.load_json(written_files.json)

    def remarks(share, **changes):
        return bench.list_remarks(replace(results, real_s=share * results.link_s, **changes))

    assert "20 % of the emulated time." in remarks(0.199)[1] and "trust" not in remarks(0.199)[1]
    assert remarks(0.21)[1].startswith("Do not trust these times: the real all-reduce takes")
    assert remarks(0.1)[2].startswith("8 ZeroOptimizer relative to torch DDP + ZeRO: step time ")
    fast = remarks(0.1, link=Link(latency_s=0, bytes_per_s=125e9))[0]
    assert fast.startswith("The link is emulated, 0.0 µs per message and 1e+03 Gbit/s in each direction: ")


def test_what_is_no_bench_is_refused(tmp_path, written_files):
    for text in ("", "{}", "[1]", json.dumps(json.loads(written_files.json.read_text()) | {"ladder": {}})):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(CourseError, match="x.json is not a file that `brigade bench --json` wrote"):
            bench.load_json(tmp_path / "x.json")


def test_a_sweep_compares_sizes_in_one_run(brigade, tmp_path):
    paths = {kind: tmp_path / f"sweep.{kind}" for kind in ("json", "png")}
    done = brigade("--sweep", "4,0.3", "--modules", "4,5", *SMALL, "--json", paths["json"], "--png", paths["png"])
    assert done.returncode == 0, done
    results = bench.load_json(paths["json"])
    labels = [
        f"{name}, {size} MiB" for name in ("4 BucketedDDP", "5 BufferedDDP", "torch DDP") for size in ("0.3", "4")
    ]
    rows = bench.make_rows(results)
    assert [row.variant for row in rows] == labels
    assert [row.bucket_mb for row in rows] == [0.3, 4.0] * 3
    assert [row.ratio.median for row in rows[4:]] == [1.0, 1.0]  # torch DDP, to itself with the same buckets
    assert all(few.collectives == 1 < many.collectives for many, few in zip(rows[::2], rows[1::2]))
    assert png_size(paths["png"])[0] == 900
    table = done.stdout.split("No link is emulated")[0]
    assert all(label in table for label in labels) and max(map(len, table.splitlines())) <= 80


# ---- submissions


def test_what_is_not_written_is_left_out(tmp_path):
    make_submission(tmp_path, [(5, r"\Z", '\nraise NotImplementedError("module 5, part (b)")\n')], modules=range(1, 7))
    (tmp_path / get_module(2).path).write_text("def (\n")
    chosen, sources, sentences = bench.select_written(str(tmp_path), CORE_MODULES)
    assert [entry.number for entry in chosen] == [1, 3, 4]
    assert len(sources) == 5
    assert sentences == [
        "Module 2 is left out: flat_ddp.py, line 1: invalid syntax: def (.",
        "Module 5 is left out: module 5, part (b) is not written yet.",
        "Module 6 is left out: module 5, part (b) is not written yet.",
        "Module 7 is left out: module 7 is missing.",
        "Module 8 is left out: module 8 is missing.",
    ]


def test_all_of_the_solutions_are_written():
    chosen, sources, sentences = bench.select_written("solutions", CORE_MODULES)
    assert (chosen, len(sources), sentences) == (
        list(CORE_MODULES),
        sum(len(entry.paths) for entry in TRAINING_MODULES),
        [],
    )


def test_a_submission_that_trains_otherwise_fails(brigade, tmp_path):
    done = brigade("--target", make_submission(tmp_path, [(1, r"parameter\.grad /= .*", "pass")]), *SMALL)
    assert done.returncode == 1
    assert "Module 3 is left out: module 3 is missing." in done.stdout
    assert "1 NaiveDDP does not train as one process does: rank 1 has a loss of" in done.stdout


def test_a_submission_that_deadlocks_is_stopped_soon(brigade, tmp_path):
    mistake = r"\1if dist.get_rank(self.process_group) == 0:\n\1    \2"
    pattern = r"( +)(dist\.all_reduce\(.*\))"
    done = brigade("--target", make_submission(tmp_path, [(1, pattern, mistake)]), "--modules", 1, *SMALL)
    assert done.returncode == 1
    assert re.match("brigade: (deadlock|rank . launched)", done.stderr), done.stderr


# ---- ranks of torchrun


def under_torchrun(tmp_path, *arguments, timeout=60):
    """Run `brigade bench` on two ranks that torchrun starts. Return its exit status, output and errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    (tmp_path / "tmp").mkdir()  # torchrun leaves a directory there when a rank fails
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "brigade.cli", "bench", "--target", "solutions", *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    left = [
        process.pid
        for process in psutil.process_iter()
        if str(tmp_path) in " ".join([*cmdline(process), process_environment(process)])
    ]
    assert not left, "a process has outlived the run"
    return done


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def process_environment(process):
    try:
        return process.environ().get("TMPDIR", "")
    except (psutil.Error, OSError):
        return ""


def test_torchrun_gives_the_losses_of_a_local_run(written_files, tmp_path):
    given = tmp_path / "given.json"
    done = under_torchrun(tmp_path, "--modules", "1,8", *SMALL, "--json", given, timeout=120)
    assert done.returncode == 0, done.stderr
    results, local = bench.load_json(given), bench.load_json(written_files.json)
    assert [variant.losses for variant in results.variants] == [one.losses for one in local.variants]
    assert [row.collectives for row in bench.make_rows(results)] == [row.collectives for row in bench.make_rows(local)]
    assert len(results.variants[0].marks) == 2, "one for each rank"
    assert done.stdout.count("Step time: 2 ranks (gloo)") == 1, "only rank 0 prints"
    assert done.stdout.count("No link is emulated") == 1
    assert all(path.name.startswith("torchelastic_") for path in (tmp_path / "tmp").iterdir()), "the shared files stay"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "emulate"}, "leave out the options of an emulated link"),
        ({"backend": "nccl", "share_gpu": True}, "--share-gpu needs all ranks on one machine"),
    ],
)
def test_under_torchrun_some_options_are_refused(options, said, monkeypatch):
    for name, value in zip(torchrun.VARIABLES, ("0", "2", "0", "1", "localhost", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(CourseError, match=said):
        torchrun.run_on_torchrun(on_ranks.train, {}, [], **options)


@pytest.mark.extended
def test_under_torchrun_an_error_is_one_sentence(tmp_path):
    done = under_torchrun(tmp_path, *SMALL, "--batch", 5)
    assert done.returncode != 0
    assert done.stderr.count("brigade: 2 ranks cannot split a batch of 5 sequences equally") == 1
    assert "brigade/cli/main.py" not in done.stderr  # no traceback of ours; torchrun shows its own


@pytest.mark.extended
def test_under_torchrun_a_rank_that_fails_says_why(tmp_path):
    raising = r"\1if dist.get_rank() == 1:\n\1    raise ValueError('no more')\n\1\2"
    target = make_submission(tmp_path, [(1, r"( +)(dist\.all_reduce\(.*\))", raising)])
    done = under_torchrun(tmp_path, "--target", target, "--modules", 1, *SMALL)
    assert done.returncode != 0
    assert re.search(r"^brigade: rank 1 on .* raised ValueError: no more\n  naive_ddp.py, line ", done.stderr, re.M)
    assert done.stderr.count("brigade: ") == 1, "only the rank that failed prints"


@pytest.mark.extended
def test_under_torchrun_a_peer_that_hangs_is_not_waited_for(tmp_path):
    hanging = r"\1if dist.get_rank() == 1:\n\1    __import__('time').sleep(1000)\n\1\2"
    target = make_submission(tmp_path, [(1, r"( +)(dist\.all_reduce\(.*\))", hanging)])
    done = under_torchrun(tmp_path, "--target", target, "--modules", 1, *SMALL, "--deadline", 8)
    assert done.returncode != 0
    where = r", at naive_ddp\.py:\d+ in finish_grad_sync$"
    for rank, what in ((0, "waits in all_reduce #"), (1, "is in ")):
        assert re.search(rf"^brigade: stopped after 8 s: rank {rank} on .* {what}.*{where}", done.stderr, re.M)


@pytest.mark.extended
def test_under_torchrun_a_peer_that_cannot_be_reached_is_named(tmp_path):
    """The test itself is rank 1. It joins the store through which the ranks meet, but never connects to rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "brigade.cli", "bench", "--target", "solutions", "--modules", "1", *SMALL]
    process = subprocess.Popen(
        [*map(str, command), "--deadline", "10"],
        cwd=ROOT,
        env=os.environ | variables | {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        torch.distributed.TCPStore("127.0.0.1", port, world_size=2, is_master=False, timeout=timedelta(seconds=60))
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert re.search(r"^brigade: stopped after 10 s: rank 0 on .*: a peer could not be reached: set GLOO_S", err, re.M)


@pytest.mark.parametrize(
    "message, said",
    [
        (
            "Gloo connectFullMesh failed with [pair.cc:152] timed out: Connection refused",
            "a peer could not be reached:",
        ),
        (
            "[pair.cc:534] Connection closed by peer [127.0.0.1]:12345",
            "lost a peer; it is busy and has launched",
        ),
        ("no more", "raised RuntimeError: no more"),
    ],
)
def test_a_broken_connection_differs_from_one_that_never_existed(message, said, monkeypatch):
    monkeypatch.setattr(torchrun, "OTHERS_FIRST_S", 0.0)
    description = {"message": message, "type": "RuntimeError", "frames": []}
    assert said in str(torchrun.make_failure(RuntimeError(message), description, 0, RankRecord()))
