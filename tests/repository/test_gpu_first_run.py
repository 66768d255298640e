"""`tools/gpu_first_run.py`, which `make gpu-check` runs, and its experiments, tried on the CPU."""

import json
import re
import sys

import hang_guard
import pytest

from brigade.course.table.modules import MODULES, ROOT
from tools import gpu_first_run
from tools.gpu_first_run import FirstRun, Step


def run_text(name, text, limit_s=600, **options):
    """Return a step that runs a program."""
    return Step(name, limit_s, "a.log", [sys.executable, "-c", text], **options)


def test_every_result_is_in_the_report(tmp_path, monkeypatch, snapshot):
    monkeypatch.setattr(gpu_first_run, "LEAST_S", 0)
    run = FirstRun(tmp_path, minutes=60)
    steps = [
        run_text("good", "print('8 of 8 points')", expects=r"(\d+) of \1 points"),
        run_text("fewer points", "print('7 of 8 points')", expects=r"(\d+) of \1 points"),
        run_text("bad", "print('no | more'); raise SystemExit(3)"),
        run_text("hangs", "import time; time.sleep(1000)", limit_s=2),
        Step("missing", 600, "a.log", ["/no/such/command"]),
    ]
    run.run_all(steps, jobs=1)
    run.ends_at = run.began
    monkeypatch.setattr(gpu_first_run, "LEAST_S", 8)
    run.run_all([run_text("late", "print('never')")], jobs=1)
    snapshot("gpu_report", re.sub(r"\| [\d.]+ \|", "| (s) |", (tmp_path / "report.md").read_text()))
    assert not run.is_good
    assert "7 of 8 points\n" in (tmp_path / "a.log").read_text()
    assert len((tmp_path / "facts.jsonl").read_text().splitlines()) == 6


def test_the_report_names_no_host_and_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_first_run.socket, "gethostname", lambda: "vm")
    run = FirstRun(tmp_path, minutes=60)
    run.run_all([run_text("a", f"print('vm:12 vmware {tmp_path}/trace/a.json')")], jobs=1)
    assert "HOST:12 vmware trace/a.json" in (tmp_path / "report.md").read_text()


def test_a_later_run_adds_to_the_report(tmp_path):
    for name, text in (("first", "raise SystemExit(1)"), ("second", "pass"), ("first", "print('now')")):
        run = FirstRun(tmp_path, minutes=60)
        run.run_all([run_text(name, text)], jobs=1)
    report = (tmp_path / "report.md").read_text()
    assert "| first | passed |" in report
    assert "| second | passed |" in report
    assert run.is_good, "only the results of this run count"


def test_some_steps_run_side_by_side(tmp_path):
    """Each of two steps waits for the other. A step that may not run beside others starts after both."""
    meet = "open({own!r}, 'w'); import os\nwhile not os.path.exists({other!r}): pass"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run = FirstRun(tmp_path / "out", minutes=60)
    both = [
        run_text(name, meet.format(own=own, other=other), beside=True)
        for name, own, other in (("a", a, b), ("b", b, a))
    ]
    run.run_all([*both, run_text("alone", f"open({a!r}); open({b!r})")], jobs=2)
    assert run.is_good


def test_every_module_is_checked_and_skip_counts_on(tmp_path):
    steps = gpu_first_run.list_steps(tmp_path, "nccl")
    for entry in MODULES:
        assert any(str(entry.checks) in step.command for step in steps), entry.package
    assert all("--share-gpu" in step.command for step in steps if "pytest" in step.command)


def test_few_files_come_back(tmp_path):
    """A machine that is lent may give back only eight files; the terminal's output is one of them."""
    steps = [*gpu_first_run.list_opening_steps(tmp_path, "nccl"), *gpu_first_run.list_steps(tmp_path, "nccl")]
    assert len({step.log for step in steps} | {"report.md", "facts.jsonl"}) <= 7


@pytest.mark.extended
def test_the_facts_become_sentences(tmp_path):
    command = [sys.executable, "-m", "tools.gpu_probes", str(tmp_path), "machine", "sums", "--backend", "gloo"]
    done = hang_guard.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in (tmp_path / "facts.jsonl").read_text().splitlines()]
    assert [fact["fact"] for fact in facts] == ["machine", "sums", "sums"]
    report = gpu_first_run.format_report(facts)
    assert "| torch | " in report
    assert re.search(r" 3 ranks .*bfloat16", report)
    assert report.count("same bits") == 6


@pytest.mark.extended
def test_the_missing_launch_is_named(tmp_path):
    command = [sys.executable, "-m", "tools.gpu_probes", str(tmp_path), "missing-launch", "--backend", "gloo"]
    done = hang_guard.run(command, cwd=ROOT, capture_output=True, text=True)
    assert len(re.findall(r"rank 0 .*\ball_reduce #4 .*\brank 1\b", done.stdout)) == 2, done


@pytest.mark.extended
def test_the_hang_under_torchrun_is_named(tmp_path):
    command = [sys.executable, "-m", "tools.gpu_probes", str(tmp_path), "torchrun", "--backend", "gloo"]
    done = hang_guard.run(command, cwd=ROOT, capture_output=True, text=True)
    [fact] = map(json.loads, (tmp_path / "facts.jsonl").read_text().splitlines())
    assert "all_reduce #" in fact["says"][0], done


def test_a_machine_without_gpus_is_refused(tmp_path):
    command = [sys.executable, "tools/gpu_first_run.py", str(tmp_path)]
    done = hang_guard.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--backend nccl" in done.stdout


def test_the_documents_quote_the_reports():
    """Every number with a unit in the section about measurements is in a report, which this program has written."""
    text = (ROOT / "docs" / "gpus.md").read_text()
    [section] = re.findall(r"^## Measured on GPUs\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    reports = [*(ROOT / "docs" / "gpu_runs").glob("*.md")]
    measured = " ".join(path.read_text() for path in reports)
    quoted = re.findall(r"[\d.]*\d (?:ms|s|MiB|NCCL events)\b", " ".join(section.split()))
    assert len(quoted) > 5
    in_tables = {f"{seconds} s" for seconds in re.findall(r"\| ([\d.]+) \|", measured)}
    assert [quote for quote in quoted if f" {quote}" not in measured and quote not in in_tables] == []
    assert [path.name for path in reports if f"`docs/gpu_runs/{path.name}`" not in text] == []
    assert all("`tools/gpu_first_run.py`" in path.read_text() for path in reports)
