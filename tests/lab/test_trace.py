"""A timeline shows the work of the ranks, its files can be read, and `brigade trace` explains its errors."""

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import matplotlib.colors
import matplotlib.pyplot as plt
import pytest
from lab_files import make_submission

from brigade.course.checks.tiny_lm import Size, TinyLM
from brigade.course.table.listing import Part
from brigade.course.table.modules import ROOT, get_module
from brigade.lab import ladder, timeline, timeline_plot
from brigade.lab.emulated_link import Link
from brigade.lab.noise import Verdict
from tools import figures, live_timelines
from tools.for_modules import run_for_modules

SIZE = Size(d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256)
PARAMETERS = dict(TinyLM(SIZE).named_parameters())
LINK = Link(latency_s=0.002, bytes_per_s=1e7)
ROUNDING_MS = 1e-3  # of times that are differences of large numbers
WORKLOAD = ladder.Workload(size=SIZE, batch_size=4, time=8, rounds=9, warmup=1, bucket_mb=0.01, link=LINK, named=True)


@pytest.fixture(scope="module")
def traced():
    """Return a step of each module on an emulated link, by module number; 0 is torch DDP."""
    numbers = (1, 2, 3, 6)
    variants = [*(ladder.get_variant(get_module(number)) for number in numbers), ladder.TORCH_DDP]
    return dict(zip((*numbers, 0), timeline.trace(variants, workload=WORKLOAD), strict=True))


def test_a_timeline_shows_where_the_collectives_are(traced):
    for number, count in ((1, len(PARAMETERS)), (2, 1), (3, len(PARAMETERS))):
        line = traced[number]
        for rank in range(2):
            backward = line.get_span(rank, "backward")
            found = line.get_collectives(rank)
            assert len(found) == count
            assert all((one.launched_ms < backward.end_ms) == (number == 3) for one in found)
    assert traced[0].get_collectives(0)
    assert all(one.row == 0 for line in traced.values() for one in line.launched)


def test_collectives_of_two_links_have_two_rows():
    hybrid = ladder.get_variant(get_module(14))
    link = replace(LINK, outer=LINK, node_size=2)
    [line] = timeline.trace([hybrid], workload=replace(WORKLOAD, link=link, node_size=2), world_size=4)
    found = line.get_collectives(3)
    assert {(one.kind == "all_reduce", one.row) for one in found} == {(False, 0), (True, 1)}
    assert all(len(one.launch.ranks) == 2 for one in found)


def test_communication_after_backward_is_exposed(traced):
    """All collectives of modules 1 and 2 come after backward, so at least their time on the link is exposed."""
    for number in (1, 2):
        for rank in range(2):
            line = traced[number]
            on_link_ms = [1e3 * LINK.seconds("all_reduce", one.launch.nbytes, 2) for one in line.get_collectives(rank)]
            lengths_ms = [one.end_ms - one.start_ms for one in line.get_collectives(rank)]
            assert all(length >= least - ROUNDING_MS for length, least in zip(lengths_ms, on_link_ms, strict=True))
            assert line.compute_exposed_ms(rank) >= sum(on_link_ms) - ROUNDING_MS


def test_torch_waits_before_backward_returns(traced):
    """DDP waits in C++, where no wait is recorded. Its last bucket is launched when no gradient is left to compute."""
    line = traced[0]
    for rank in range(2):
        last = line.get_collectives(rank)[-1]
        assert line.get_span(rank, "backward").end_ms == line.get_span(rank, "finish").start_ms == last.launched_ms
        assert line.compute_exposed_ms(rank) >= 1e3 * LINK.seconds("all_reduce", last.launch.nbytes, 2) - ROUNDING_MS


@pytest.mark.parametrize("variant", [ladder.TORCH_DDP, ladder.TORCH_FSDP, ladder.get_variant(get_module(3))])
def test_the_backward_of_torch_ends_with_its_last_launch(variant):
    launched = [SimpleNamespace(start=start) for start in (10.5, 11.2, 11.7, 13.5)]  # the last one by the optimizer
    edges = timeline.find_edges(variant, [10.0, 11.0, 13.0, 13.25, 14.0], launched)
    assert edges == [10.0, 11.0, 11.7 if variant.wrapper[0] == "torch" else 13.0, 13.25, 14.0]


def test_the_title_gives_the_exposed_time_of_the_step_shown():
    waits = [(0, "wait", 20, 30), (0, "finish", 40, 45), (1, "wait", 40, 50), (1, "finish", 35, 60)]
    spans = [timeline.Span(*span) for span in [*waits, (0, "backward", 10, 40), (1, "step", 60, 60)]]
    line = timeline.Timeline("", 2, spans, [], None, 0.0)
    assert re.findall(r"\d+", line.lengths) == ["60", "15", "25"]
    assert re.findall(r"\d+", replace(line, world_size=1).lengths) == ["60", "15"]


def test_every_kind_of_block_has_its_colour():
    kinds = ("forward", "backward", "wait", "finish", "step")
    spans = [timeline.Span(0, kind, 10.0 * n, 10.0 * n + 10) for n, kind in enumerate(kinds)]
    launch = SimpleNamespace(op="all_reduce", name=None)
    reduction = timeline.Collective(0, "all_reduce", 20.0, 30.0, launch=launch, number=0, launched_ms=12.0)
    figure, axes = plt.subplots()
    timeline_plot.draw_panel(axes, timeline.Timeline("", 1, spans, [reduction], LINK, 10.0))
    drawn = {matplotlib.colors.to_hex(bar.get_facecolor()) for bar in axes.patches}
    assert {timeline_plot.STYLES[kind]["facecolor"] for kind in (*kinds, "exposed", "all_reduce")} <= drawn
    plt.close(figure)


def test_waits_are_inside_of_the_phase_that_waits(traced):
    for number in (1, 2, 3):
        for rank in range(2):
            finish = traced[number].get_span(rank, "finish")
            waits = [span for span in traced[number].spans if span.rank == rank and span.kind == "wait"]
            assert waits
            assert all(finish.start_ms <= span.start_ms < span.end_ms <= finish.end_ms for span in waits)
            assert all(one.waited_ms >= one.end_ms - 0.1 for one in traced[number].get_collectives(rank))


def test_collectives_say_what_they_carry(traced):
    names = {number: [one.launch.name for one in line.get_collectives(0)] for number, line in traced.items()}
    assert names[1] == list(PARAMETERS)
    assert names[2] == [None] and set(names[6]) == {None, "head.weight"}  # of one bucket it is the only one
    halves = [one.title for one in traced[6].get_collectives(0)]
    assert {"reduce-scatter head.weight", "reduce-scatter 1", "all-gather head.weight", "all-gather 1"} <= set(halves)
    assert traced[2].launched[0].launch.nbytes == 4 * sum(parameter.numel() for parameter in PARAMETERS.values())


def test_the_chrome_trace_can_be_read(traced):
    found = json.loads(json.dumps(timeline.make_chrome_trace([*traced.values()])))
    events = found["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(set(processes.values())) == len(processes) == 2 * len(traced)
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    for key, name in threads.items():
        in_thread = [event for event in slices if (event["pid"], event["tid"]) == key]
        if name == "computation":
            assert {event["name"] for event in in_thread} >= {"forward", "backward", "optimizer step"}
        else:
            in_thread.sort(key=lambda event: (event["ts"], event["dur"]))
            assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(in_thread))
            assert all({"bytes", "dtype", "launched"} <= event["args"].keys() for event in in_thread)
    starts, ends = ([event["id"] for event in events if event["ph"] == letter] for letter in "sf")
    assert sorted(starts) == sorted(ends) != []  # module 3 launches while the link is busy


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timeline, "WORKLOAD", WORKLOAD)


def test_the_command_writes_a_picture_and_a_trace(quick, brigade, tmp_path):
    picture, events = (tmp_path / f"trace-2.{kind}" for kind in ("png", "json"))
    options = ("--torch", "--comm-ratio", "2", "--out", tmp_path)
    status, out, err = brigade("trace", 2, "--target", "solutions", *options)
    assert status == 0 and not err
    assert re.search(r"2 FlatDDP: .*\bms exposed, 1 collective\b", out) and "torch DDP: " in out
    assert re.search(r"[\d.]+ µs .*[\d.e+]+ Gbit/s", out), "the link"
    assert str(picture) in out and str(events) in out
    assert re.search(r"^.*\b(machine was|not compare)\b", out, re.MULTILINE), "the verdict"
    drawn = {matplotlib.colors.to_hex(pixel) for row in matplotlib.image.imread(picture) for pixel in row}
    assert {timeline_plot.COLOURS[kind] for kind in ("forward", "backward", "collective")} <= drawn
    assert len(json.loads(events.read_text())["traceEvents"]) > 20


def test_what_is_not_written_yet_is_named(quick, refuse, tmp_path):
    make_submission(tmp_path)
    skeleton = get_module(2)
    (tmp_path / skeleton.package).mkdir()
    (tmp_path / skeleton.path).write_text((ROOT / "lessons" / skeleton.path).read_text())
    refusal = refuse("trace", 2, "--target", tmp_path)
    assert str(Part(2, "a")) in refusal and "`brigade check 2`" in refusal


def test_a_deadlock_is_told_rank_by_rank(quick, brigade, tmp_path):
    only_rank_0 = (2, r"def finish_grad_sync\(self\) -> None:", r"\g<0>\n        if dist.get_rank(): return")
    status, _, err = brigade("trace", 2, "--target", make_submission(tmp_path, [only_rank_0], (1, 2)))
    assert status == 2
    assert err.startswith("brigade: ") and "rank 0" in err and "rank 1" in err


def test_a_collective_that_nobody_waits_for_is_counted(quick, brigade, tmp_path):
    forgets = (3, r"handle\.wait\(\)", "pass")
    target = make_submission(tmp_path, [forgets], (1, 2, 3))
    status, printed, _ = brigade("trace", 3, "--target", target, "--out", tmp_path)
    assert status == 0
    assert f" {2 * len(PARAMETERS)} of {2 * len(PARAMETERS)} " in printed


REFUSED = ("99", "2 --ranks 1", "2 --bucket-mb 0", "2 --comm-ratio -1", "2 --out no/such/place")


def test_wrong_input_gets_one_line(quick, refuse, snapshot):
    refusals = [refuse("trace", *arguments.split(), "--target", "solutions") for arguments in REFUSED]
    snapshot("refusals.trace", "".join(refusals))


def test_one_reading_has_its_picture_redrawn_unless_the_machine_is_busy(traced, monkeypatch, capsys):
    drawn = []
    picture = SimpleNamespace(savefig=drawn.append)
    monkeypatch.setattr(figures, "draw_timelines", lambda timelines, titles: picture)
    monkeypatch.setattr(figures, "store_runs", lambda entry, path: f"runs of {entry.number}")
    monkeypatch.setattr(figures, "store_live_steps", lambda path: None)
    monkeypatch.setattr(sys, "argv", ["figures", "3"])
    for cpu_share in (0.5, 0.98):
        verdict = Verdict(num_rounds=8, spread=0.05, cpu_share=cpu_share)
        line = replace(traced[3], verdict=verdict)
        monkeypatch.setattr(figures, "trace", lambda variants, line=line: [line] * len(variants))
        assert run_for_modules("figures", None, figures.draw_figures) == (not verdict.is_quiet)
        assert ("timeline.png not written" in capsys.readouterr().out) != verdict.is_quiet
    assert drawn == [get_module(3).lesson / "pictures" / "timeline.png"]
    monkeypatch.setattr(sys, "argv", ["figures", "77"])
    assert run_for_modules("figures", None, figures.draw_figures) == 2
    assert capsys.readouterr().err.startswith("figures: ")


def test_a_stored_step_replays_as_it_was_recorded(traced):
    """A slower link makes it longer, unless nothing waits for the link."""
    for number in (1, 2, 3, 6):
        line = traced[number]
        run = json.loads(json.dumps(live_timelines.store(line)))
        step = live_timelines.replay(run, 1)
        assert step["end"] / 1e3 == pytest.approx(line.end_ms, abs=1)
        for rank in range(2):
            assert step["exposed"][rank] / 1e3 == pytest.approx(line.compute_exposed_ms(rank), abs=1)
            launched = [one.launched_ms for one in line.get_collectives(rank)]
            assert [time / 1e3 for time in step["launched"][rank]] == pytest.approx(launched, abs=1)
        assert live_timelines.replay(run, 0.25)["end"] > step["end"] > live_timelines.replay(run, 4)["end"]


def test_the_runs_of_a_busy_machine_never_replace_those_of_a_quiet_one(tmp_path, monkeypatch):
    path, entry = tmp_path / "timeline.json", get_module(4)

    def store(cpu_share):
        verdict = Verdict(num_rounds=8, spread=0.05, cpu_share=cpu_share)
        monkeypatch.setattr(figures, "record_runs", lambda entry: ([{"name": str(cpu_share)}], verdict))
        return figures.store_runs(entry, path)

    assert [store(0.5), store(0.4), store(0.98)] == ["0.5", "0.4", "0.98"]
    with pytest.raises(figures.Doubtful, match="busy"):
        store(0.5)
    assert json.loads(path.read_text()) == {"sentence": "", "warning": "", "runs": [{"name": "0.98"}]}


@pytest.mark.parametrize("number", range(1, 12))
def test_a_live_figure_has_several_runs_of_its_module(number):
    entry = get_module(number)
    listed = live_timelines.list_recorded(entry)
    assert 3 <= len(listed) <= 5 and sum(f"module {number}" in name for name, *_ in listed) >= 2
    stored = json.loads((entry.lesson / "pictures" / "timeline.json").read_text())
    assert [run["name"] for run in stored["runs"]] == [name for name, *_ in listed]
