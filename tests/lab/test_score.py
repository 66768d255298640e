"""`brigade score`: everybody gets the same numbers, those of the board, and no entry wins by cheating."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from brigade.course.cli.main import main
from brigade.course.table.modules import get_module
from brigade.course.table.submission import read
from brigade.lab import score
from brigade.lab.cli import score as command
from brigade.lab.ladder import get_variant, read_reference
from brigade.ranks.errors import UserError
from tools import board

ENTRY = get_module(4)
FILE = f"{ENTRY.package}.{ENTRY.name}"
LAUNCH = "            self.handle = dist.all_reduce(self.flat, group=self.process_group, async_op=True)\n"
LAUNCH = LAUNCH.removeprefix("    ")
WAIT = "        self.handle.wait()\n"
# What an entry could do where nobody looks at numbers, and what is said.
CHEATS = {
    "launches nothing without memory": (
        LAUNCH,
        "        self.handle = dist.all_reduce(self.flat[:1] if self.flat.is_meta else self.flat, "
        "group=self.process_group, async_op=True)\n",
        r".*all_reduce #0 of 4 B.*all_reduce #0 of \d",
    ),
    "waits for nothing without memory": (
        WAIT,
        "        self.flat.is_meta or self.handle.wait()\n",
        r".*backward of parameter \d+.*all_reduce",
    ),
    "launches less for a large model": (
        LAUNCH,
        "        small = self.flat[:1] if self.flat.numel() > 1_000_000 else self.flat\n"
        "        self.handle = dist.all_reduce(small, group=self.process_group, async_op=True)\n",
        r".*[\d.,]+ MB .*gradients have [\d.,]+ MB",
    ),
}


def change(old, new):
    """Return the reference's modules with another text in module 4."""
    sources = dict(read("solutions", ENTRY.number))
    path, text = sources[FILE]
    assert text.count(old) == 1
    return sources | {FILE: (path, text.replace(old, new))}


@pytest.mark.parametrize("name", CHEATS)
def test_an_entry_that_does_something_else_in_the_plan_has_no_score(name, monkeypatch):
    old, new, pattern = CHEATS[name]
    sources, variant = change(old, new), get_variant(ENTRY)
    monkeypatch.setattr(score, "PROBLEMS", [replace(score.PROBLEMS[0], model="small")])
    with pytest.raises(UserError, match=f"^4 BucketedDDP .*: {pattern}"):
        score.verify(variant, sources)
        score.plan_rows([variant], sources)


def test_a_launch_that_nobody_uses_does_not_help(monkeypatch):
    """It is planned like any other, so the step is not shorter and sends more."""
    twice = LAUNCH + "        dist.all_reduce(self.flat.clone(), group=self.process_group, async_op=True).wait()\n"
    variant = get_variant(ENTRY)
    monkeypatch.setattr(score, "PROBLEMS", [replace(score.PROBLEMS[0], model="small")])
    score.verify(variant, change(LAUNCH, twice))
    [[plain], [padded]] = (
        score.plan_rows([variant], sources)[variant.label] for sources in (None, change(LAUNCH, twice))
    )
    assert padded.exposed_s > plain.exposed_s and padded.sent_bytes == pytest.approx(2 * plain.sent_bytes)


@pytest.mark.parametrize("number", [8, 9, 11])
def test_real_ranks_do_what_is_planned(number):
    score.verify(get_variant(get_module(number)), read_reference())


@pytest.mark.extended
def test_the_board_is_what_the_command_prints():
    """`python -m tools.board` writes the rows again, from the code as it is now."""
    assert board.make_board() == board.BOARD.read_text()


def test_the_score_comes_after_the_checks(monkeypatch, capsys):
    """A failed check has a seed, with which it can be repeated."""
    monkeypatch.setattr(command, "run_check", lambda *_, **__: SimpleNamespace(status="failed"))
    assert main(["score", "1", "--target", "solutions"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"`brigade check 1 --target solutions --seed \d+`", said)


@pytest.mark.extended
def test_the_command_prints_a_table_for_each_problem(monkeypatch, capsys):
    monkeypatch.setattr(command, "run_check", lambda *_, **__: SimpleNamespace(status="passed"))
    assert main(["score", "4", "--target", "solutions", "--torch"]) == 0
    said, page = capsys.readouterr().out, board.BOARD.read_text()
    rows = [line for line in said.splitlines() if line.startswith(("| 4 ", "| torch DDP |"))]
    assert len(rows) == 2 * len(score.PROBLEMS) and all(row in page for row in rows), "everybody gets the same numbers"


def test_a_module_that_trains_nothing_has_no_score(refuse):
    assert "module 13" in refuse("score", 13, "--target", "solutions")
