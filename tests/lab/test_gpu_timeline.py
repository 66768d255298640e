"""The timeline of a GPU shows what the profiler recorded: which kernel ran when, on which stream, and what hid what.

`make_profile` writes the part of torch's format (`torch.profiler.profile.export_chrome_trace`) that is read.
"""

import json
import re
from itertools import pairwise

import matplotlib.colors
import matplotlib.image
import pytest

from brigade.course.checks.tiny_lm import Size
from brigade.course.table.modules import ROOT, get_module
from brigade.lab import gpu_timeline, ladder, timeline_plot
from brigade.lab.profiled_step import MARK
from brigade.ranks.errors import UserError

SNAPSHOTS = ROOT / "tests" / "support" / "snapshots"
BASE_US = 1_790_857_026_000_000
START_US = 5_000.0  # of the first rank's step, since the base
MARKS_US = (-90.0, 0.0, 1000.0, 3000.0, 3500.0, 9000.0)  # since the start of the step
COMPUTES, NCCL = 7, 20  # streams
GEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
WORK_US = (  # (name, category, stream, launched, start, end), since the start of the step
    (ALL_REDUCE, "kernel", NCCL, -300, -290, -100),  # the barrier
    (ALL_GATHER, "kernel", NCCL, -50, -40, 400),  # of the step before
    (GEMM, "kernel", COMPUTES, 100, 500, 1500),
    ("Memset (Device)", "gpu_memset", COMPUTES, 1100, 1500, 1510),
    (GEMM, "kernel", COMPUTES, 1200, 1515, 3515),
    (ALL_REDUCE, "kernel", NCCL, 1300, 2000, 3000),
    (ALL_REDUCE, "kernel", NCCL, 1400, 3000, 4515),
    (ADD, "kernel", COMPUTES, 3100, 4515, 4615),
    ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", COMPUTES, 4000, 4700, 4800),
    (ALL_GATHER, "kernel", 24, 8000, 8100, 9500),  # of another group; the step does not wait for it
)


def make_profile(start_us=START_US, work=WORK_US):
    """Return a profile of one rank. As in torch's, each kernel of NCCL also has an annotation on its stream."""

    def make_event(category, name, start, end, **args):
        times = {"ts": start_us + start, "dur": float(end - start)}
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 0, **times, "args": args}

    events = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": start_us, "args": {"name": "python"}}]
    for number, end in enumerate(MARKS_US):
        events.append(make_event("user_annotation", MARK, end - 5, end))
        events.append(make_event("gpu_user_annotation", MARK, 100 * number, 100 * number + 50, stream=COMPUTES))
    for number, (name, category, stream, launched, start, end) in enumerate(work):
        call = ("cuda_driver", "cuLaunchKernelEx") if number % 2 else ("cuda_runtime", "cudaLaunchKernel")
        events.append(make_event(*call, launched, launched + 4, correlation=number))
        events.append(make_event(category, name, start, end, stream=stream, correlation=number))
        if stream == NCCL:
            events.append(make_event("gpu_user_annotation", "nccl:all_reduce", start, end, stream=stream))
    return {"schemaVersion": 1, "baseTimeNanoseconds": 1000 * BASE_US, "traceEvents": events[::-1]}


def write(*profiles):
    return [json.dumps(profile).encode() for profile in profiles]


@pytest.fixture
def without_gpus(monkeypatch):
    monkeypatch.setattr(gpu_timeline, "count_gpus", lambda: 0)


def test_a_kernel_has_the_phase_in_which_it_was_launched_or_its_operation():
    start_us, end_us, kernels = gpu_timeline.read_profile(1, make_profile())
    assert start_us == pytest.approx(BASE_US + START_US, abs=1)
    assert end_us - start_us == pytest.approx(MARKS_US[-1], abs=1)
    assert all(kernel.rank == 1 for kernel in kernels)
    assert [(one.kind, one.number, one.stream, one.row) for one in kernels] == [
        ("all_gather", 0, NCCL, 0),
        ("forward", 0, COMPUTES, 0),
        ("backward", 0, COMPUTES, 0),
        ("backward", 1, COMPUTES, 0),
        ("all_reduce", 0, NCCL, 0),
        ("all_reduce", 1, NCCL, 0),
        ("finish", 0, COMPUTES, 0),
        ("step", 0, COMPUTES, 0),
        ("all_gather", 1, 24, 1),
    ]
    assert [one.title for one in kernels if one.is_nccl][1:3] == ["all-reduce 0", "all-reduce 1"]
    times = [(one.launched_ms, one.start_ms, one.end_ms) for one in kernels]
    for given, (*_, launched, start, end) in zip(times, WORK_US[1:], strict=True):
        assert given == pytest.approx((1e-3 * launched, 1e-3 * start, 1e-3 * end), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        (ALL_REDUCE, "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWork)", "reduce_scatter"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", "all_gather"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ],
)
def test_the_operation_is_in_the_name_of_the_kernel(name, operation):
    assert gpu_timeline.find_operation(name) == operation


def test_only_communication_beside_no_computation_is_a_wait(without_gpus):
    [line] = gpu_timeline.make_timelines({"3 OverlappedDDP": write(make_profile())})
    spans = [(one.kind, one.start_ms, one.end_ms) for one in line.spans]
    assert spans == [
        (kind, pytest.approx(start, abs=1e-3), pytest.approx(end, abs=1e-3))
        for kind, start, end in [
            ("forward", 0.5, 1.5),
            ("backward", 1.5, 3.515),  # a memset and a kernel 5 µs later
            ("finish", 4.515, 4.615),
            ("step", 4.7, 4.8),
            ("wait", -0.04, 0.4),
            ("wait", 3.515, 4.515),
            ("wait", 8.1, 9.0),
        ]
    ]
    assert line.compute_exposed_ms(0) == pytest.approx(0.44 + 1.1 + 0.9, abs=1e-2)
    assert line.count == "4 NCCL kernels"
    assert line.note == gpu_timeline.SHARED


def test_the_ranks_of_a_step_have_one_clock(without_gpus, monkeypatch):
    monkeypatch.setattr(gpu_timeline, "count_gpus", lambda: 2)
    [line] = gpu_timeline.make_timelines({"": write(make_profile(START_US + 250), make_profile())})
    first, second = (next(one for one in line.spans if one.rank == rank) for rank in range(2))
    assert first.start_ms - second.start_ms == pytest.approx(0.25, abs=1e-3)
    assert not line.note, "each rank has its own GPU"


def test_a_recorded_profile_shows_what_overlaps(without_gpus):
    """A step of module 3 on two ranks that shared an H200, without the events of the CPU's operations."""
    recorded = [(SNAPSHOTS / f"h200_module_3_rank{rank}.json").read_bytes() for rank in range(2)]
    [line] = gpu_timeline.make_timelines({"": recorded})
    assert line.count == "21 NCCL kernels"
    for rank in range(2):
        nccl, others = (
            [one for one in line.kernels if one.rank == rank and one.is_nccl == is_nccl] for is_nccl in (True, False)
        )
        assert {one.kind for one in nccl} == {"all_reduce"}
        assert ({one.stream for one in nccl}, {one.stream for one in others}) == ({16}, {7})
        assert all(one.end_ms <= after.start_ms for one, after in pairwise(nccl)), "they run one after the other"
        backward = [one for one in others if one.kind == "backward"]
        assert len(backward) == 121 and max(one.launched_ms for one in nccl) < backward[-1].end_ms
        beside = [
            one for one in backward for other in nccl if one.start_ms < other.end_ms and other.start_ms < one.end_ms
        ]
        assert len(beside) > 100
        assert 150 < line.compute_exposed_ms(rank) < nccl[-1].end_ms - nccl[0].start_ms


def test_a_profile_without_kernels_is_explained():
    """Without CUPTI, as on a simulated device, the profiler records what the CPU does, and nothing else."""
    with pytest.raises(UserError, match=r"profiler .*\brank 1\b"):
        gpu_timeline.make_timelines({"": write(make_profile(), make_profile(work=()))})


def test_the_chrome_trace_has_a_thread_for_each_stream(without_gpus):
    lines = gpu_timeline.make_timelines({label: write(make_profile(), make_profile()) for label in "ab"})
    content = json.loads(json.dumps(gpu_timeline.make_chrome_trace(lines)))
    events = content["traceEvents"]
    assert content["otherData"] == {"note": gpu_timeline.SHARED}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads.values()) == {"stream 7", "stream 20, NCCL", "stream 24, NCCL"} and len(threads) == 3 * 4
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 4 * 9 and {event["name"] for event in slices} >= {GEMM, ADD, "all-reduce 1"}
    assert all((event["pid"], event["tid"]) in threads for event in slices)
    assert {event["args"]["kernel"] for event in slices if event["name"] == "all-reduce 1"} == {ALL_REDUCE}


SIZE = Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256)
WORKLOAD = ladder.Workload(size=SIZE, batch_size=4, time=8, rounds=3, bucket_mb=0.01)


@pytest.mark.extended
def test_the_ranks_profile_one_step_of_each_variant():
    """On the CPU, a profile has no kernels, but everything else."""
    variants = [ladder.get_variant(get_module(number)) for number in (3, 9)]
    profiles = gpu_timeline.record_profiles(variants, workload=WORKLOAD, backend="gloo")
    assert [*profiles] == [variant.label for variant in variants]
    for of_ranks in profiles.values():
        for profile in map(json.loads, of_ranks):
            marks = [event for event in profile["traceEvents"] if event["name"] == MARK]
            assert len(marks) == len(MARKS_US) and profile["baseTimeNanoseconds"] > 0
            assert {event["cat"] for event in marks} == {"user_annotation"}
    with pytest.raises(UserError, match=r"profiler .*\brank 0\b"):
        gpu_timeline.make_timelines(profiles)
    with pytest.raises(UserError, match=r"\b3 ranks .*\b4 sequences"):
        gpu_timeline.record_profiles(variants, workload=WORKLOAD, world_size=3, backend="gloo")


@pytest.mark.extended
def test_the_command_writes_a_picture_a_trace_and_the_profiles(monkeypatch, without_gpus, brigade, tmp_path):
    seen = []

    def run(function, workload, variants, **how):
        seen.append((workload["bucket_mb"], workload["batch_size"], how["backend"], how["share_gpu"]))
        profile = json.dumps(make_profile()).encode()
        return [{variant["label"]: profile for variant in variants}] * how["world_size"]

    monkeypatch.setattr(gpu_timeline, "run_ranks", run)
    options = ("--backend", "nccl", "--share-gpu", "--torch", "--out", tmp_path)
    status, out, err = brigade("trace", 3, "--target", "solutions", *options)
    assert status == 0 and not err
    assert seen == [(25.0, gpu_timeline.WORKLOAD.batch_size, "nccl", True)]
    assert re.search(r"3 OverlappedDDP: .*\b9 ms, 2 ms .*\b4 NCCL", out)
    assert gpu_timeline.SHARED in out and "emulated" not in out
    names = [f"profile-{name}-rank{rank}.json" for name in ("3-overlappedddp", "torch-ddp") for rank in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "trace-3.json", "trace-3.png"]
    assert json.loads((tmp_path / names[0]).read_text()) == make_profile()
    drawn = {
        matplotlib.colors.to_hex(pixel) for row in matplotlib.image.imread(tmp_path / "trace-3.png") for pixel in row
    }
    assert {timeline_plot.COLOURS[kind] for kind in ("forward", "backward", "collective")} <= drawn
    assert len(json.loads((tmp_path / "trace-3.json").read_text())["traceEvents"]) > 4 * 9


def test_a_notebook_shows_the_kernels_or_says_why_not(monkeypatch, capsys):
    """One GPU is shared by two ranks; several have a rank each. On simulated devices, the profiler records nothing."""
    seen, work = [], list(WORK_US)

    def run(function, workload, variants, **how):
        seen.append((how["world_size"], how["share_gpu"], workload["batch_size"], workload["rounds"]))
        profile = json.dumps(make_profile(work=work)).encode()
        return [{variant["label"]: profile for variant in variants}] * how["world_size"]

    monkeypatch.setattr(gpu_timeline, "run_ranks", run)
    variants = [ladder.get_variant(get_module(3))]
    for gpus, expected in ((1, (2, True, 8, 7)), (4, (4, False, 16, 7))):
        monkeypatch.setattr(gpu_timeline, "count_gpus", lambda gpus=gpus: gpus)
        figure = gpu_timeline.show_on_gpus(variants, rounds=7)
        assert seen.pop() == expected
        [(label, length_ms)] = figure.values.items()
        assert label.startswith("3 OverlappedDDP, 4 ") and length_ms == pytest.approx(9.0, abs=1e-2)
        assert (gpu_timeline.SHARED in figure.get_suptitle()) == (gpus == 1)
    assert not capsys.readouterr().out
    work.clear()
    assert gpu_timeline.show_on_gpus(variants) is None
    assert "rank 0" in capsys.readouterr().out
    monkeypatch.setattr(gpu_timeline, "count_gpus", lambda: 0)
    assert gpu_timeline.show_on_gpus(variants) is None
    assert "no GPU" in capsys.readouterr().out


def test_profiles_are_kept_if_they_cannot_be_drawn(monkeypatch, without_gpus, brigade, tmp_path):
    def run(function, workload, variants, **how):
        return [{variant["label"]: json.dumps(make_profile(work=())).encode() for variant in variants}] * 2

    monkeypatch.setattr(gpu_timeline, "run_ranks", run)
    status, _, err = brigade("trace", 3, "--target", "solutions", "--backend", "nccl", "--out", tmp_path)
    assert status == 2
    assert err.startswith("brigade: ") and "rank 0" in err and err.count("\n") == 1
    assert len([*tmp_path.glob("profile-3-overlappedddp-rank*.json")]) == 2


@pytest.mark.parametrize("option", [["--memory"], ["--comm-ratio", "1"], ["--latency-ratio", "0.1"]])
def test_what_is_emulated_does_not_go_with_gpus(refuse, option):
    refusal = refuse("trace", 3, "--target", "solutions", "--backend", "nccl", *option)
    assert "--backend nccl" in refusal and "--memory" in refusal
