"""One verdict says whether the machine was quiet, and one definition says how much communication a step exposes.

All measurements are given here, so nothing depends on the machine that runs these tests.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from brigade.course.table.modules import get_module
from brigade.lab import bench, comparison, ladder, plots
from brigade.lab.emulated_link import Link
from brigade.lab.noise import FEWEST_ROUNDS, LEAST_CPU_SHARE, MAX_REAL_SHARE, MAX_SPREAD, Verdict, judge_machine
from brigade.lab.notebook_plots import draw_step_times, draw_timelines
from brigade.lab.timeline import Span, Timeline, make_chrome_trace

BUSY = "This machine was busy: do not compare these times"
QUIET = Verdict(num_rounds=8, spread=0.05, cpu_share=0.98, real_share=0.1)
STATE = {"parameters": 1, "gradients": 1, "optimizer state": 2_000_000}
# In the second round, the machine was slow. The differences of the rounds are 20, 30, 40 and 50 ms.
ALONE = [100.0, 190.0, 100.0, 100.0]
NAIVE = [120.0, 220.0, 140.0, 150.0]


def measure(label: str, step_ms: list[float]) -> ladder.Measurement:
    """Return the measurement of a variant with these step times on both ranks."""
    marks = [[[0.0, 0.0, 0.0, 0.0, 1e-3 * ms] for ms in step_ms]] * 2
    return ladder.Measurement(label, marks, 39, 3_480_000, 0, [3.0, 3.0], STATE, STATE)


def make_ladder(cpu_share: float = 0.98, alone: list[float] = ALONE, **variants: list[float]) -> ladder.Ladder:
    """Return the results of a run on a link on which an all-reduce takes 80 ms, and really 8."""
    steps = {"naive": NAIVE, **variants, "torch DDP": NAIVE}
    link = Link(latency_s=0, bytes_per_s=12.5e6)  # of 1 MB
    shares = [[cpu_share] * len(alone)] * 2
    rows, computation = [measure(*row) for row in steps.items()], measure("computation alone", alone)
    return ladder.Ladder(ladder.EMULATED, 2, "gloo", 3.0, rows, computation, link, 0.1, 8e-3, 10**6, shares)


def show(*parts: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("spread", "cpu_share", "real_share"),
    [  # that were measured: alone three times, then evenly busy machines
        (0.09, 0.972, 0.088),
        (0.058, 0.972, 0.096),
        (0.166, 0.99, 0.136),
        (0.02, 0.562, 0.077),
        (0.057, 0.497, 0.044),
        (0.05, 0.246, 0.024),
    ],
)
def test_an_evenly_busy_machine_is_noticed(spread: float, cpu_share: float, real_share: float) -> None:
    verdict = judge_machine([spread], 8, [[cpu_share] * 8] * 2, real_share)
    assert verdict.is_quiet == (cpu_share > 0.9) != verdict.is_busy
    assert ("machine was quiet" in verdict.sentence) == verdict.is_quiet != verdict.sentence.startswith(BUSY)
    assert f" {100 * cpu_share:.0f} % " in verdict.sentence


@pytest.mark.parametrize(
    ("change", "limit", "is_busy"),
    [
        ("cpu_share", LEAST_CPU_SHARE, True),
        ("spread", MAX_SPREAD, True),
        ("real_share", MAX_REAL_SHARE, False),
        ("num_rounds", FEWEST_ROUNDS, False),
    ],
)
def test_each_number_alone_decides(change: str, limit: float, is_busy: bool) -> None:
    beyond = 1 if change == "num_rounds" else 0.01 if change in ("spread", "real_share") else -0.01
    beyond = limit - beyond if change == "num_rounds" else limit + beyond
    assert replace(QUIET, **{change: limit}).is_quiet
    verdict = replace(QUIET, **{change: beyond})
    assert not verdict.is_quiet and verdict.is_busy == is_busy and len(verdict.reasons) == 1
    assert verdict.sentence == f"{BUSY if is_busy else 'Do not compare these times'} ({verdict.reasons[0]})."


def test_the_rank_with_the_least_and_half_of_the_variants_count() -> None:
    verdict = judge_machine([0.1, 0.9, 0.2], 2, [[1.0, 0.5], [0.6, 1.0]])
    assert verdict == Verdict(2, spread=0.2, cpu_share=0.55)
    assert judge_machine([0.1], 4) == Verdict(4, 0.1), "nothing but step times: one rank, or GPUs"
    assert json.loads(json.dumps(verdict.describe()))["cpu_share"] == 0.55


def test_a_run_is_judged_by_what_it_recorded() -> None:
    """The quartiles of NAIVE are 135 and 167.5, its median is 145. The spread of ALONE is 0.225."""
    verdict = make_ladder().verdict
    assert verdict.real_share == pytest.approx(0.1) and verdict.cpu_share == pytest.approx(0.98)
    assert verdict.spread == pytest.approx(32.5 / 145)
    assert replace(make_ladder(), link=None).verdict.real_share is None


# ---- exposed time


def test_the_exposed_time_is_the_median_difference_of_the_rounds_everywhere(tmp_path, monkeypatch) -> None:
    results = make_ladder()
    assert results.variants[0].median_ms - results.computation.median_ms == 45, "not the difference of the medians"
    assert results.compute_exposed(results.variants[0]) == ladder.Spread(35, 27.5, 42.5)
    [row] = [line for line in show(plots.make_time_table(results)).splitlines() if line.startswith("naive")]
    assert row.split()[-1] == "35.0"
    bench.save(results, tmp_path / "bench.json")
    content = json.loads((tmp_path / "bench.json").read_text())
    saved, alone = content["rows"][0], content["computation"]
    pairs = zip(saved["rounds_ms"], alone["rounds_ms"], strict=True)
    assert sorted(whole - computation for whole, computation in pairs) == pytest.approx([20, 30, 40, 50])
    assert saved["exposed_ms"] == {"median": 35, "lower": 27.5, "upper": 42.5} and alone["step_ms"]["median"] == 100
    [axes] = draw_step_times(results, "Step times").axes
    assert [bar.get_width() for bar in axes.patches[:: len(results.variants)]] == pytest.approx([145 - 35, 35])
    assert [text.get_text() for text in axes.texts][0] == "110 + 35"
    assert " 35  28 to 42 " in show(comparison.make_table(results, previous=0))


def test_a_bar_is_as_long_as_its_step() -> None:
    results = make_ladder(fast=[80.0, 75.0, 84.0, 80.0])
    figure = draw_step_times(results, "Step times")
    assert figure.values == {"naive": 145, "fast": 80, "torch DDP": 145}
    [axes] = figure.axes
    [medians] = [line for line in axes.lines if line.get_marker() == "D"]
    assert medians.get_xydata().tolist() == [[145, 0], [80, 1], [145, 2]]
    hidden, exposed = axes.patches[:3], axes.patches[3:]
    assert [bar.get_width() for bar in exposed] == pytest.approx([35, 0, 35]), (
        "it was faster than without communication"
    )
    assert [end.get_x() + end.get_width() for end in exposed] == pytest.approx([145, 80, 145])
    assert [bar.get_x() for bar in hidden] == [0, 0, 0]


# ---- where the verdict is shown


@pytest.mark.parametrize("cpu_share", [0.98, 0.5])
def test_table_chart_file_and_comparison_show_the_same_verdict(cpu_share: float, tmp_path) -> None:
    results = make_ladder(cpu_share)
    verdict = results.verdict
    assert verdict.is_quiet == (cpu_share > 0.9)
    printed = show(plots.make_time_table(results))
    assert " ".join(printed.split()).endswith(verdict.sentence) and max(map(len, printed.splitlines())) <= 80
    bench.save(results, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text())["quiet"] == verdict.describe()
    spans = [Span(rank, kind, 0, 1) for rank in range(2) for kind in ("forward", "backward", "finish", "step")]
    timelines = [Timeline("naive", 2, spans, [], Link(0, 1), 1.0, verdict)]
    for figure in (draw_step_times(results, "Step times"), draw_timelines(timelines, ["naive"])):
        assert (figure.get_suptitle() == BUSY) != verdict.is_quiet
        _, metadata = figure._repr_png_()
        assert metadata["quiet"] == verdict.describe() and metadata["values"] == figure.values
    assert json.loads(json.dumps(make_chrome_trace(timelines)))["otherData"] == {"quiet": verdict.describe()}
    doubts = comparison.describe_doubts(results)
    assert (verdict.sentence in doubts) != verdict.is_quiet
    counts = show(comparison.make_table(results, previous=0)).splitlines()[-2].split()
    assert counts[1:3] == ["39", "3.48"] and counts[-1] == "2.00", "launches and bytes are shown on any machine"


def test_significance_is_stated_only_for_a_quiet_machine(snapshot: Callable[[str, str], None]) -> None:
    results = make_ladder()
    assert "not significant" not in comparison.describe_doubts(make_ladder(0.5))
    different = make_ladder(slow=[3 * ms for ms in NAIVE])
    assert comparison.describe_doubts(replace(different, variants=different.variants[:2])) == ""
    noisy = make_ladder(fast=[80.0, 75.0, 84.0, 180.0])
    snapshot("doubts", "".join(f"{comparison.describe_doubts(doubtful)}\n" for doubtful in (results, noisy)))


def test_ranks_report_how_long_they_had_a_core() -> None:
    """Every rank reports one share for each timed round. Alone, a rank is never timed together with others."""
    workload = ladder.Workload(batch_size=2, time=8, rounds=5, warmup=2)
    results = ladder.run_benchmark(workload, [ladder.get_variant(get_module(1))], checks_losses=False)
    assert [len(shares) for shares in results.cpu_shares] == [3, 3]
    assert all(math.isfinite(share) and share >= 0 for shares in results.cpu_shares for share in shares)
    alone = ladder.run_benchmark(workload, [ladder.get_variant(get_module(1))], checks_losses=False, world_size=1)
    assert alone.cpu_shares == [[]] and alone.verdict.cpu_share is None
