"""`brigade break`: a known mistake goes into a copy of a module, a check notices it, and only --solve names it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from brigade.course.cli import mistake, progress_file
from brigade.course.cli.main import main
from brigade.course.table.modules import ROOT, Module, get_module
from brigade.course.table.submission import read

ENTRY = get_module(2)
NAMES = re.findall(r"^mutant: (.*)$", (ENTRY.tests / "mutants.diff").read_text(), re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return the folder of the copy, which is new, like the file with the progress."""
    monkeypatch.setattr(mistake, "FOLDER", tmp_path / "break")
    monkeypatch.setattr(progress_file, "PROGRESS", tmp_path / "progress.json")
    return tmp_path / "break"


@pytest.fixture
def own(tmp_path):
    """Return a directory with a student's modules 1 and 2, which are the reference's, with a line more."""
    for number in (1, 2):
        entry = get_module(number)
        (tmp_path / "own" / entry.package).mkdir(parents=True)
        text = (ROOT / "solutions" / entry.path).read_text()
        (tmp_path / "own" / entry.path).write_text(f"{text}OWN = {number}\n")
    return tmp_path / "own"


@pytest.fixture
def passing(own):
    """Return this directory. Module 2 is known to pass."""
    key = progress_file.hash_submission(ENTRY, read(own, ENTRY.number))
    progress_file.remember("passed", ENTRY.package, key)
    return own


@pytest.fixture
def noticed(monkeypatch):
    """Let every check fail, without a run."""
    monkeypatch.setattr(mistake, "run_check", lambda *_: SimpleNamespace(status="failed"))


def test_the_mistake_is_noticed_and_solved(passing, folder, capsys):
    before = {path: path.read_bytes() for path in passing.rglob("*.py")}
    assert main(["break", "2", "--target", str(passing), "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "brigade check 2 --target" in said and "brigade trace 2 --target" in said
    assert not any(name in said for name in NAMES), "the mistake is a secret"
    assert {path: path.read_bytes() for path in passing.rglob("*.py")} == before, "the student's files stay"
    text, broken = ((place / ENTRY.path).read_text().splitlines() for place in (passing, folder))
    assert broken[-1] == "OWN = 2" and broken != text
    assert (folder / get_module(1).path).read_text() == (passing / get_module(1).path).read_text()
    assert main(["break", "2", "--solve"]) == 0
    file, line, name = re.match(r"(\S+):(\d+): (.*)", said := capsys.readouterr().out).groups()
    assert file == ENTRY.path.name and name in NAMES
    changed = [each[4:] for each in said.splitlines() if each.startswith("  + ")]
    assert not changed or broken[int(line) - 1] == changed[0]
    assert any(each[4:] not in broken for each in said.splitlines() if each.startswith("  - "))


def test_a_seed_chooses_the_same_mistake(passing, folder, noticed):
    texts = []
    for seed in (1, 1, 2, 3, 4):
        assert main(["break", "2", "--target", str(passing), "--seed", str(seed)]) == 0
        texts.append((folder / ENTRY.path).read_text())
    assert texts[0] == texts[1] and len(set(texts)) > 1


def test_a_mistake_that_no_check_notices_is_not_chosen(passing, folder, monkeypatch, refuse):
    monkeypatch.setattr(mistake, "run_check", lambda *_: SimpleNamespace(status="passed"))
    assert f" {len(NAMES)} " in refuse("break", 2, "--target", passing)
    assert not folder.exists()


def test_another_text_without_the_lines_of_a_mistake(own, folder, noticed, capsys):
    (own / ENTRY.path).write_text(text := "OTHER = True\n")
    progress_file.remember("passed", ENTRY.package, progress_file.hash_submission(ENTRY, read(own, 2)))
    status = main(["break", "2", "--target", str(own), "--seed", "0"])
    said = capsys.readouterr()
    assert status == 2 and "--target solutions" in said.err
    assert (own / ENTRY.path).read_text() == text


def test_the_reference_gets_a_mistake(folder, noticed):
    assert main(["break", "2", "--target", "solutions", "--seed", "0"]) == 0
    assert (folder / ENTRY.path).read_text() != (ROOT / "solutions" / ENTRY.path).read_text()


def test_only_a_module_that_passes_is_broken(own, folder, refuse):
    assert "`brigade check 2`" in refuse("break", 2, "--target", own)
    assert not folder.exists()


def test_an_edition_without_mutants_says_so(passing, tmp_path, monkeypatch, refuse):
    monkeypatch.setattr(Module, "tests", property(lambda _: tmp_path))
    assert "this edition" in refuse("break", 2, "--target", passing)


def test_there_is_nothing_to_solve(refuse):
    assert "`brigade break 2`" in refuse("break", 2, "--solve")
