"""The messages when a module passes, or when it fails because of an earlier module."""

from __future__ import annotations

import re

import pytest

from brigade.course.cli import check, progress_file
from brigade.course.table.modules import CORE_MODULES, MODULES, ROOT, get_module
from brigade.course.table.submission import read

FIRST, SECOND = get_module(1), get_module(2)

pytestmark = pytest.mark.usefixtures("few_cases")


@pytest.fixture(autouse=True)
def progress(tmp_path_factory, monkeypatch):
    """Use a new progress file, and do not compare modules with their predecessors."""
    monkeypatch.setattr(progress_file, "PROGRESS", tmp_path_factory.mktemp("progress") / "progress.json")
    monkeypatch.setattr(check, "compare", lambda *_: None)


@pytest.fixture
def lessons(tmp_path):
    """Return a directory with correct answers to modules 1 and 2."""
    for entry in (FIRST, SECOND):
        (tmp_path / entry.package).mkdir()
        (tmp_path / entry.path).write_text((ROOT / "solutions" / entry.path).read_text())
    return tmp_path


def change(lessons, entry, old, new):
    file = lessons / entry.path
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))


def find_sentence(done):
    """Return the line about an earlier module, or "" if there is none."""
    return next((line.strip() for line in done.stdout.splitlines() if re.search("(start|look) there", line)), "")


def test_an_earlier_module_that_fails_is_named(brigade, lessons, snapshot):
    change(lessons, FIRST, "tensor.detach().copy_(whole)", "tensor.detach().mul_(1)")  # transposed tensors only
    done = brigade("check", 2, "--target", lessons)
    assert done.returncode == 1
    brigade("check", 1, "--target", lessons)
    failed = brigade("check", 2, "--target", lessons)
    snapshot("earlier.failed", f"{find_sentence(done)}\n{find_sentence(failed)}\n")
    assert brigade("check", 2, "--target", lessons, "--prior", "reference").returncode == 0


def test_an_earlier_module_that_cannot_be_used_is_named(brigade, lessons, snapshot):
    sentences = []
    for text in ("x = (\n", (ROOT / "lessons" / FIRST.path).read_text()):
        (lessons / FIRST.path).write_text(text)
        sentences.append(find_sentence(brigade("check", 2, "--target", lessons)))
    snapshot("earlier.unusable", "".join(f"{sentence}\n" for sentence in sentences))


def test_no_earlier_module_is_blamed_if_this_one_is_not_written(brigade, lessons):
    (lessons / SECOND.path).write_text((ROOT / "lessons" / SECOND.path).read_text())
    change(lessons, FIRST, "tensor.detach().copy_(whole)", "tensor.detach().mul_(1)")
    done = brigade("check", 2, "--target", lessons)
    assert done.returncode == 1 and not find_sentence(done) and "Another style" not in done.stdout


def test_after_full_points_another_style_is_explained():
    found = {entry.number: check.list_next_steps(entry, ROOT / "solutions")[1] for entry in MODULES}
    assert all(re.fullmatch(r"Another style that passes: [A-Z][^#]{80,400}\.", text) for text in found.values()), found
    assert len({*found.values()}) == len(MODULES)


def test_the_last_module_of_the_core_closes_it():
    target = ROOT / "solutions"
    for entry in CORE_MODULES:
        assert "all 8 modules" not in check.list_next_steps(entry, target)[0]
        key = progress_file.hash_submission(entry, read(target, entry.number))
        progress_file.remember("passed", entry.package, key)
    text = " ".join(check.list_next_steps(entry, target))
    assert "all 8 modules" in text and "`brigade submit`" in text


def test_a_module_that_passes_names_the_hints_that_nobody_asked_for():
    progress_file.remember("hints", FIRST.package, {"a": 1})
    [*_, sentence] = check.list_next_steps(FIRST, ROOT / "solutions")
    assert sentence.startswith("You needed no hints for b") and f"`brigade hint {FIRST.number} b`" in sentence
    progress_file.remember("hints", FIRST.package, dict.fromkeys("abcdefgh", 3))
    assert "hint" not in " ".join(check.list_next_steps(FIRST, ROOT / "solutions"))
