"""A submission is found in any layout. Odd or hostile trees and archives take bounded time and memory."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from brigade.course.modules import MODULES, CourseError, get_module
from brigade.course.submission import find
from brigade.grade import incoming

FIRST, SECOND = get_module(1), get_module(2)
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


def make_tar(files: dict, mode: str = "w:gz", form: int = tarfile.PAX_FORMAT) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode, format=form) as bundle:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            content = content.encode() if isinstance(content, str) else content
            info.size = len(content)
            bundle.addfile(info, io.BytesIO(content))
    return data.getvalue()


def read_modules(path: Path) -> tuple[dict[int, str], str]:
    """Return the text of each module that was found, and the notes."""
    with incoming.open_submission(path) as found:
        files = {entry.number: find(found.directory, entry) for entry in MODULES}
        return {number: file.read_text() for number, file in files.items() if file}, "\n".join(found.notes)


ALL = {entry.number: f"own {entry.number}" for entry in MODULES}
FLAT = {entry.path.name: f"own {entry.number}" for entry in MODULES}
CLONE = {**list_below("lessons"), **list_below("solutions", dict.fromkeys(LESSONS, "theirs"))}
LAYOUTS = {
    "lessons": LESSONS,
    "flat files": FLAT,
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
    "a tar.gz": {"submission.tar.gz": make_tar(list_below("./work"))},
    "a tgz in GNU's format": {"submission.tgz": make_tar(list_below("long" * 40), form=tarfile.GNU_FORMAT)},
    "a tar with long paths": {"submission.tar": make_tar(list_below("long" * 40), "w")},
    "a tar of the oldest kind": {"submission.tar": make_tar(LESSONS, "w", tarfile.USTAR_FORMAT)},
}


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_modules_are_found_wherever_they_lie(tmp_path, files):
    modules, notes = read_modules(lay(tmp_path / "Jane Doe_98765_assignsubmission_file", files))
    assert modules == ALL and notes == ""


@pytest.mark.parametrize(("name", "mode"), [("h.tar.gz", "w:gz"), ("h.tgz", "w:gz"), ("h.tar", "w"), ("h.zip", "")])
def test_an_archive_itself(tmp_path, name, mode):
    assert read_modules(lay(tmp_path, {name: make_tar(LESSONS, mode) if mode else make_zip(LESSONS)}) / name) == (
        ALL,
        "",
    )


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
    "a name in capital letters": (
        {"naive_ddp.py": "own", "hw/Flat_DDP.py": ""},
        {1: "own"},
        "Ignored, because module files have names in small letters: hw/Flat_DDP.py",
    ),
    "what could meddle, in a zip": (
        {"submission.zip": make_zip({"naive_ddp.py": "own", "a/torch/__init__.py": "", "conftest.py": ""})},
        {1: "own"},
        "Ignored, and worth a look: a/torch, conftest.py",
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


def test_two_archives_are_a_question(tmp_path):
    lay(tmp_path, {"one.zip": make_zip(LESSONS), "two.tar.gz": make_tar(LESSONS)})
    assert get_refusal(tmp_path) == "found no module file, but 2 archives: one.zip, two.tar.gz; hand in only one"


def test_an_archive_in_an_archive_is_no_empty_submission(tmp_path):
    lay(tmp_path, {"one.zip": make_zip({"a/two.zip": make_zip(LESSONS)})})
    assert get_refusal(tmp_path) == (
        "one.zip cannot be unpacked: it contains an archive instead of module files: a/two.zip"
    )


# ---- hostile


def make_special_tar(kind: bytes, **fields) -> bytes:
    """Return a tar with a member of this kind named like a module, followed by module 2."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as bundle:
        info = tarfile.TarInfo(FIRST.path.name)
        info.type = kind
        for name, value in fields.items():
            setattr(info, name, value)
        bundle.addfile(info)
        info = tarfile.TarInfo(SECOND.path.name)
        info.size = 5
        bundle.addfile(info, io.BytesIO(b"own 2"))
    return data.getvalue()


SPECIAL = {
    "a link": make_special_tar(tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": make_special_tar(tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": make_special_tar(tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a pipe": make_special_tar(tarfile.FIFOTYPE),
    "a directory": make_special_tar(tarfile.DIRTYPE),
}


@pytest.mark.parametrize("data", SPECIAL.values(), ids=SPECIAL.keys())
def test_of_a_tar_only_ordinary_files_are_taken(tmp_path, data):
    assert read_modules(lay(tmp_path, {"submission.tgz": data}))[0] == {2: "own 2"}


@pytest.mark.parametrize("place", ["..", "../..", "a/../..", "/tmp/was-here", ""])
@pytest.mark.parametrize("pack", [make_zip, make_tar])
def test_paths_that_lead_out_are_not_taken(tmp_path, place, pack):
    modules, notes = read_modules(lay(tmp_path, {"submission.zip": pack(list_below(place))}))
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


def header(kind: bytes, size: int, name: str = FIRST.path.name) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


class Zeros(io.BytesIO):
    """A stream of `first` and then endless zeros: more than a test should write to a file."""

    def read(self, size: int) -> bytes:
        return super().read(size).ljust(size, b"\0")


HUGE = 50 << 30


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (header(tarfile.REGTYPE, HUGE), "contains more than 300000000 bytes"),
        (header(tarfile.REGTYPE, HUGE, "data.bin"), "contains more than 300000000 bytes"),
        (header(tarfile.XHDTYPE, HUGE), "headers take more than 10000000 bytes"),
        (header(tarfile.GNUTYPE_LONGNAME, HUGE), "headers take more than 10000000 bytes"),
        (header(tarfile.XHDTYPE, 1024) + b"x" * 1024, "subsection not found"),
        (header(tarfile.XHDTYPE, 512) + b"9999 path=a\n".ljust(512, b"\0"), "one of its headers is damaged"),
        (header(tarfile.DIRTYPE, 0) * (incoming.MOST_MEMBERS + 1), "more than 50000 members"),
        (b"no tar" * 100, "invalid header"),
        (b"", "its end is missing"),
    ],
)
def test_bombs_are_bounded(first, line):
    """Time and memory are bounded for any header and any amount of data."""
    started = time.monotonic()
    stream = Zeros(first) if first else io.BytesIO()
    with pytest.raises((ValueError, tarfile.TarError)) as caught:
        for _, read in incoming.iterate_tar(stream):
            assert len(read(1000)) == 1000
    assert line in str(caught.value) and time.monotonic() - started < 60


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
    with incoming.open_submission(tmp_path / "handed in.zip") as found:
        assert sorted(path.name for path in found.directory.rglob("*.py")) == sorted(files.values())
        assert not found.notes
