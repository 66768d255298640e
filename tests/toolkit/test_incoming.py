"""A submission is found in any layout. Odd or hostile trees and archives take bounded time and memory."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from pathlib import Path

import pytest

from brigade.course.modules import MODULES, CourseError, get_module
from brigade.course.submission import MAX_SOURCE_BYTES, find, read_text
from brigade.grade import incoming

FIRST = get_module(1)
LESSONS = {entry.path.as_posix(): f"own {entry.number}" for entry in MODULES}


def lay(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def list_below(place: str, files: dict = LESSONS) -> dict:
    return {f"{place}/{name}": content for name, content in files.items()}


def make_zip(files: dict) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(name, content)
    return data.getvalue()


def read_modules(path: Path) -> tuple[dict[int, str], str]:
    """Return the text of each module that was found, and the notes."""
    with incoming.open_submission(path) as (directory, notes):
        files = {entry.number: find(directory, entry) for entry in MODULES}
        return {number: file.read_text() for number, file in files.items() if file}, "\n".join(notes)


ALL = {entry.number: f"own {entry.number}" for entry in MODULES}
FLAT = {entry.path.name: f"own {entry.number}" for entry in MODULES}
CLONE = {**list_below("lessons"), **list_below("solutions", dict.fromkeys(LESSONS, "theirs"))}
LAYOUTS = {
    "lessons": LESSONS,
    "flat files": FLAT,
    "flat files in lessons": list_below("lessons", FLAT),
    "a clone": CLONE,
    "the student edition": {**list_below("lessons"), **list_below("skeletons", dict.fromkeys(LESSONS, "theirs"))},
    "a clone in a directory": list_below("repository", CLONE),
    "deep": list_below("deep/a/b/lessons"),
    "flat and deep": list_below("a/b/c", FLAT),
    "Moodle, a zip": {"submission.zip": make_zip(LESSONS)},
    "Moodle, a zip of a directory": {"Submission.ZIP": make_zip(list_below("my work/lessons"))},
    "a zip from Windows": {
        "submission.zip": make_zip({n.replace("/", "\\"): t for n, t in list_below("work").items()})
    },
    "a zip from a Mac": {"submission.zip": make_zip({**LESSONS, **list_below("__MACOSX", LESSONS)})},
    "a zip in a directory": {"a/b/submission.zip": make_zip(LESSONS), "a/report.pdf": b"%PDF"},
}


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_modules_are_found_wherever_they_lie(tmp_path, files):
    modules, notes = read_modules(lay(tmp_path / "Jane Doe_98765_assignsubmission_file", files))
    assert modules == ALL and notes == ""


def test_a_zip_itself(tmp_path):
    assert read_modules(lay(tmp_path, {"h.zip": make_zip(LESSONS)}) / "h.zip") == (ALL, "")


NONE = "No module file such as naive_ddp.py was found. Found instead: "
NOTES = {
    "a notebook only": ({"work/a.ipynb": "{}", "report.pdf": ""}, {}, NONE + "report.pdf, work/a.ipynb"),
    "nothing": ({}, {}, NONE + "nothing"),
    "many files": ({f"{n}.txt": "" for n in range(9)}, {}, NONE + "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 4 more"),
    "a zip without modules": ({"submission.zip": make_zip({"notes.txt": ""})}, {}, NONE + "notes.txt"),
    "a name that commands a terminal": ({"\x1b[2J\n.txt": ""}, {}, NONE + "?[2J?.txt"),
    "several places": (
        {"week1/naive_ddp.py": "old", "week2/naive_ddp.py": "new", "week2/flat_ddp.py": "new"},
        {1: "new", 2: "new"},
        "Module files are in several places. Graded: week2. Not graded: week1/naive_ddp.py",
    ),
    "a zip beside modules": (
        {"naive_ddp.py": "own", "old.zip": make_zip(LESSONS)},
        {1: "own"},
        "Not unpacked, because the submission has module files outside archives: old.zip",
    ),
}


@pytest.mark.parametrize(("files", "modules", "note"), NOTES.values(), ids=NOTES.keys())
def test_what_an_instructor_should_know_is_noted(tmp_path, files, modules, note):
    (tmp_path / "handed in").mkdir()
    assert read_modules(lay(tmp_path / "handed in", files)) == (modules, note)


def get_refusal(path: Path) -> str:
    with pytest.raises(CourseError) as caught, incoming.open_submission(path):
        pass
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"one.zip": make_zip(LESSONS), "two.zip": make_zip(LESSONS)},
            "found no module file, but 2 archives: one.zip, two.zip; hand in only one",
        ),
        (
            {"one.zip": make_zip({"a/two.zip": make_zip(LESSONS)})},
            "one.zip cannot be unpacked: it contains an archive instead of module files: a/two.zip",
        ),
        ({"work.tar.gz": b""}, "unreadable: .gz; hand in .zip or a directory (work.tar.gz)"),
        ({"work.zip": b"no zip"}, "work.zip cannot be unpacked: File is not a zip file"),
    ],
)
def test_an_archive_that_cannot_be_read_is_no_empty_submission(files, message, tmp_path):
    assert get_refusal(lay(tmp_path, files)) == message


# ---- hostile


@pytest.mark.parametrize("place", ["..", "../..", "a/../..", "/tmp/was-here", ""])
def test_paths_that_lead_out_are_not_taken(tmp_path, place):
    modules, notes = read_modules(lay(tmp_path, {"submission.zip": make_zip(list_below(place))}))
    assert modules == {} and notes.startswith("No module file such as")
    assert [path.name for path in tmp_path.rglob("*")] == ["submission.zip"]
    assert not Path("/tmp/was-here").exists()


def test_a_link_in_a_zip_is_not_taken(tmp_path):
    info = zipfile.ZipInfo(FIRST.path.name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "submission.zip", "w") as bundle:
        bundle.writestr(info, "/etc/passwd")
    assert read_modules(tmp_path)[0] == {}


def test_an_archive_that_is_a_link_or_a_pipe_is_not_opened(tmp_path):
    """A link could lead to another student's submission."""
    lay(tmp_path / "bob", {"submission.zip": make_zip(LESSONS)})
    for name, make in (("ada", lambda path: path.symlink_to("../bob/submission.zip")), ("carl", os.mkfifo)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "submission.zip")
        assert "submission.zip cannot be unpacked" in get_refusal(tmp_path / name)


def test_a_bomb_is_bounded(tmp_path):
    """A huge module file is unpacked up to its limit and then refused."""
    zeros = make_zip({FIRST.path.name: b"\0" * 100_000_000})
    with incoming.open_submission(lay(tmp_path, {"submission.zip": zeros})) as (directory, _):
        file = find(directory, FIRST)
        assert file.stat().st_size == MAX_SOURCE_BYTES + 1
        with pytest.raises(CourseError, match="is larger than"):
            read_text(file, directory)


def test_a_tree_with_too_many_entries_is_searched_from_above(tmp_path, monkeypatch):
    monkeypatch.setattr(incoming, "LOOKED_AT", 50)
    lay(tmp_path, {f"data/{n}": "" for n in range(200)} | {FIRST.path.as_posix(): "own 1"})
    modules, _ = read_modules(tmp_path)
    assert modules == {1: "own 1"} and len(incoming.walk(tmp_path)) <= 50


def test_links_are_not_followed(tmp_path):
    (tmp_path / "handed in").mkdir()
    lay(tmp_path / "elsewhere", LESSONS)
    (tmp_path / "handed in" / "lessons").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "handed in" / "loop").symlink_to(".")
    assert incoming.walk(tmp_path / "handed in") == ["lessons", "loop"]


@pytest.mark.parametrize("place", ["", "lessons/m11_fully_sharded/"])
def test_further_files_of_a_module_come_with_its_main_file(tmp_path, place):
    """A file with such a name elsewhere is no part of the submission, and no note mentions it."""
    files = {f"{place}{path.name}": path.name for path in get_module(11).paths}
    (tmp_path / "handed in.zip").write_bytes(make_zip(files | {"tools/plan.py": "mine"}))
    with incoming.open_submission(tmp_path / "handed in.zip") as (directory, notes):
        assert sorted(path.name for path in directory.rglob("*.py")) == sorted(files.values())
        assert not notes
