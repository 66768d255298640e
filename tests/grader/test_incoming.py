"""A submission is found in any layout. Odd or hostile trees and archives take bounded time and memory."""

from __future__ import annotations

import io
import lzma
import os
import re
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest

from brigade.course.table.modules import MODULES, get_module
from brigade.course.table.submission import MAX_SOURCE_BYTES, find
from brigade.grader import archives, incoming
from brigade.ranks.errors import UserError

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


def make_tar(files: dict, mode: str = "w:gz") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as bundle:
        for name, content in files.items():
            add_member(bundle, name, content.encode() if isinstance(content, str) else content)
    return data.getvalue()


def add_member(bundle: tarfile.TarFile, name: str, content: bytes = b"", **fields) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    bundle.addfile(info, io.BytesIO(content))


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
    "a tar with gzip": {"submission.tar.gz": make_tar(list_below("./my work/lessons"))},
    "a tar with xz": {"submission.txz": make_tar(CLONE, "w:xz")},
    "a tar with bzip2": {"submission.TAR.BZ2": make_tar(LESSONS, "w:bz2")},
    "a plain tar": {"submission.tar": make_tar(LESSONS, "w")},
    "a tar of a Mac": {"submission.tgz": make_tar({**LESSONS, "._m01_naive_ddp/._naive_ddp.py": "a resource"})},
    "a tar whose name says zip": {"submission.zip": make_tar(LESSONS)},
    "a zip in a zip": {"one.zip": make_zip({"a/Two.ZIP": make_zip(list_below("work/lessons")), "a/x.txt": ""})},
    "a zip in a tar": {"one.tgz": make_tar({"two.zip": make_zip(LESSONS)})},
    "capital letters": {
        name.replace("ddp", "DDP").upper().replace(".PY", ".py"): text for name, text in LESSONS.items()
    },
    "capital letters in a zip": {"one.zip": make_zip({f"Work/Lessons/{n.title()}": t for n, t in LESSONS.items()})},
    "a tar with long names": {"submission.tar": make_tar(list_below("a/" * 150 + "lessons"), "w")},
}


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_modules_are_found_wherever_they_lie(tmp_path, files):
    modules, notes = read_modules(lay(tmp_path / "Jane Doe_98765_assignsubmission_file", files))
    assert modules == ALL and notes == ""


def test_a_zip_itself(tmp_path):
    assert read_modules(lay(tmp_path, {"h.zip": make_zip(LESSONS)}) / "h.zip") == (ALL, "")


NOTES = {
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
    "a second download and a helper": (
        {"naive_ddp.py": "skeleton", "naive_ddp (1).py": "answer", "helpers.py": "", "._naive_ddp.py": "", "a.txt": ""},
        {1: "skeleton"},
        "Ignored, because only the course's files are read: helpers.py, naive_ddp (1).py",
    ),
    "scripts of the course and an editor's": (
        {
            **list_below("lessons"),
            "lessons/m02_flat_ddp/launches.py": "",
            "lessons/m02_flat_ddp/mine.py": "",
            "x.py": "",
        },
        ALL,
        "Ignored, because only the course's files are read: lessons/m02_flat_ddp/mine.py",
    ),
}


@pytest.mark.parametrize(("files", "modules", "note"), NOTES.values(), ids=NOTES.keys())
def test_what_an_instructor_should_know_is_noted(tmp_path, files, modules, note):
    (tmp_path / "handed in").mkdir()
    assert read_modules(lay(tmp_path / "handed in", files)) == (modules, note)


def test_what_is_no_text_for_the_course_is_noted_or_refused(tmp_path):
    """A file that nobody can read is no wrong answer: it gets no score instead of 0."""
    odd = {"naive_ddp.py": "own 1".encode("utf-16"), "flat_ddp.py": b"\xe9"}
    reasons = "naive_ddp.py is saved as UTF-16; save it as UTF-8", "flat_ddp.py is not UTF-8: line 1 has a byte 0xe9"
    with pytest.raises(incoming.Unreadable, match=reasons[0]):
        read_modules(lay(tmp_path / "all", odd))
    with incoming.open_submission(lay(tmp_path / "some", odd | {"bucketed_ddp.py": "own 4"})) as (_, notes):
        assert all(note.startswith(f"Not read: {reason}") for note, reason in zip(notes, reasons, strict=True))


def test_of_two_files_the_one_with_the_courses_name_counts(tmp_path):
    files = {"Naive_DDP.py": "old", "naive_ddp.py": "new", "Naive_ddp.py": "older"}
    note = "Ignored, because only the course's files are read: Naive_DDP.py, Naive_ddp.py"
    assert read_modules(lay(tmp_path / "handed in", files)) == ({1: "new"}, note)


def get_refusal(*paths: Path) -> str:
    with pytest.raises(incoming.Unreadable) as caught, incoming.open_submission(*paths):
        pass
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    assert message.endswith(f"; {incoming.REMEDY}")
    return message.removesuffix(f"; {incoming.REMEDY}")


def encrypt(data: bytes) -> bytes:
    """Set the bit of encryption in a zip of one member, in its header and in the directory."""
    for magic, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        place += data.index(magic)
        data = data[:place] + struct.pack("<H", struct.unpack_from("<H", data, place)[0] | 1) + data[place + 2 :]
    return data


NONE = "No module file such as naive_ddp.py was found, but "
DAMAGED = "is damaged, or was not uploaded completely"
RAR = b"Rar!\x1a\x07\0"
REFUSED = {
    "a notebook only": ({"work/a.ipynb": "{}", "report.pdf": "", ".DS_Store": ""}, NONE + "report.pdf, work/a.ipynb"),
    "nothing": ({}, "The submission has no file"),
    "many files": ({f"{n}.txt": "" for n in range(9)}, NONE + "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 4 more"),
    "a name that commands a terminal": ({"\x1b[2J\n.txt": ""}, NONE + "?[2J?.txt"),
    "a zip without modules": ({"a.zip": make_zip({"notes.txt": ""})}, "In a.zip: " + NONE + "notes.txt"),
    "two zips": (
        {"one.zip": make_zip(LESSONS), "two.zip": make_zip(LESSONS)},
        "Found no module file, but 2 archives (one.zip, two.zip)",
    ),
    "two zips in a zip": (
        {"one.zip": make_zip({"a/two.zip": make_zip(LESSONS), "three.zip": make_zip(LESSONS)})},
        "one.zip contains archives instead of modules (a/two.zip, three.zip)",
    ),
    "a zip in a zip in a zip": (
        {"one.zip": make_zip({"two.zip": make_zip({"three.zip": make_zip(LESSONS)})})},
        "one.zip contains archives instead of modules (three.zip)",
    ),
    "rar in a zip": (
        {"one.zip": make_zip({"two.zip": RAR})},
        "one.zip contains two.zip, which is a .rar file, which the grader cannot unpack",
    ),
    "rar": ({"work.rar": RAR}, "work.rar is a .rar file, which the grader cannot unpack"),
    "rar with another name": ({"work.zip": RAR}, "work.zip is a .rar file, which the grader cannot unpack"),
    "gzip without tar": ({"work.py.gz": b"\x1f\x8b"}, "work.py.gz is a .gz file, which the grader cannot unpack"),
    "an empty file": ({"work.zip": b""}, "work.zip is empty (0 bytes)"),
    "no zip": ({"work.zip": b"no zip"}, "work.zip " + DAMAGED),
    "half a zip": ({"work.zip": make_zip(LESSONS)[:500]}, "work.zip " + DAMAGED),
    "half a tar": ({"work.tgz": make_tar(LESSONS)[:200]}, "work.tgz " + DAMAGED),
    "half an xz": ({"work.txz": make_tar(LESSONS, "w:xz")[:200]}, "work.txz " + DAMAGED),
    "encrypted": ({"work.zip": encrypt(make_zip({"naive_ddp.py": "x"}))}, "naive_ddp.py in work.zip is encrypted"),
}


@pytest.mark.parametrize(("files", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_graded_gets_one_sentence_with_a_remedy(files, message, tmp_path):
    (tmp_path / "handed in").mkdir()
    assert get_refusal(lay(tmp_path / "handed in", files)) == message


def test_single_module_files_are_one_submission(tmp_path):
    """Canvas appends -1 to the name of the next upload, and a browser (1)."""
    names = ["ada_naive_ddp.py", "ada_124_3_naive_ddp-2.py", "ada_124_9_naive_ddp-10.py", "flat_ddp (1).py"]
    lay(tmp_path, {name: name for name in names} | {"ada_plan.py": "further", "ada_fully_sharded.py": "\xff"})
    paths = [tmp_path / name for name in names]
    with incoming.open_submission(*paths) as (directory, notes):
        assert {path.name: path.read_text() for path in directory.iterdir()} == {
            "naive_ddp.py": names[2],
            "flat_ddp.py": names[3],
        }
    [note] = notes
    assert note.endswith(f": {names[0]}, {names[1]}")
    with incoming.open_submission(tmp_path / "ada_plan.py", tmp_path / "ada_fully_sharded.py") as (directory, _):
        assert sorted(path.name for path in directory.iterdir()) == ["fully_sharded.py", "plan.py"]
    assert get_refusal(lay(tmp_path / "x", {"essay.pdf": "%PDF"}) / "essay.pdf") == NONE + "essay.pdf"


# ---- hostile


@pytest.mark.parametrize("pack", [make_zip, make_tar])
@pytest.mark.parametrize("place", ["..", "../..", "a/../..", "/tmp/was-here", ""])
def test_paths_that_lead_out_are_not_taken(tmp_path, place, pack):
    lay(tmp_path, {"submission.zip": pack(list_below(place))})
    assert re.search(r"ring\.py .*submission\.zip .*\bpath\b", get_refusal(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["submission.zip"]
    assert not Path("/tmp/was-here").exists()


def test_a_link_in_a_zip_is_not_taken(tmp_path):
    info = zipfile.ZipInfo(FIRST.path.name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "submission.zip", "w") as bundle:
        bundle.writestr(info, "/etc/passwd")
    assert re.search(r"naive_ddp\.py .*submission\.zip .*\blink\b", get_refusal(tmp_path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "link"),
        ({"type": tarfile.LNKTYPE, "linkname": "other.py"}, "link"),
        ({"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "file"),
        ({"type": tarfile.FIFOTYPE}, "file"),
    ],
)
def test_a_tar_is_taken_member_by_member(fields, reason, tmp_path):
    """A link or a device takes the place of one module. The other module is graded, and a note names the first."""
    with tarfile.open(tmp_path / "work.tar", "w") as bundle:
        add_member(bundle, "other.py", b"secret")
        add_member(bundle, "naive_ddp.py", **fields)
        add_member(bundle, "flat_ddp.py", b"own")
    modules, notes = read_modules(tmp_path / "work.tar")
    assert modules == {2: "own"} and re.search(rf"naive_ddp\.py .*\b{reason}$", notes)


def make_sparse_tar() -> bytes:
    """Return a tar file with a header of old GNU tar whose map of a sparse file never ends."""
    header = bytearray(tarfile.TarInfo("naive_ddp.py").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[482] = b"S", 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    block = bytearray(b"00000000001\0" * 42 + bytes(8))
    block[504] = 1
    return bytes(header) + bytes(block) * 5000


def make_pax_tar() -> bytes:
    """Return a tar file whose header announces 2 GB of further fields."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 2_000_000_000
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(5_000_000)


def make_xz_tar() -> bytes:
    """Return an xz file that needs 1.5 GB of memory to decompress."""
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    data = bytearray(lzma.compress(make_tar(LESSONS, "w"), filters=filters))
    place = data.index(b"\x21\x01", 12)  # the filter LZMA2, and the length of its property, the dictionary's size
    data[place + 2] = 39
    header_end = 12 + (data[12] + 1) * 4
    data[header_end - 4 : header_end] = struct.pack("<I", zlib.crc32(data[12 : header_end - 4]))
    return bytes(data)


@pytest.mark.parametrize("make", [make_sparse_tar, make_pax_tar, make_xz_tar])
def test_a_header_cannot_ask_for_memory_without_end(make, tmp_path):
    """Reading the tar file must not allocate what its header announces."""
    (tmp_path / "work.tar").write_bytes(make())
    tracemalloc.start()
    try:
        assert get_refusal(tmp_path / "work.tar") == "work.tar " + DAMAGED
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_entries_and_bytes_are_bounded_and_the_size_of_the_file_is_not(tmp_path, monkeypatch):
    """A clone of 200 MB is graded, of which a few modules are read."""
    large = {f"{place}/{n}.bin": b"0" for place in (".git/objects", ".venv/lib") for n in range(50)}
    with open(tmp_path / "clone.zip", "wb") as file:
        file.seek(200_000_000)  # a hole, which needs no space on the disk; the zip begins behind it
        file.write(make_zip(list_below("clone", large | CLONE)))
    assert read_modules(tmp_path / "clone.zip") == (ALL, "")
    (tmp_path / "clone.tar").write_bytes(make_tar(large | CLONE, "w"))
    assert read_modules(tmp_path / "clone.tar") == (ALL, "")
    monkeypatch.setattr(archives, "MOST_ENTRIES", 99)
    for name in ("clone.zip", "clone.tar"):
        assert re.fullmatch(rf"{name} .* 99 files", get_refusal(tmp_path / name))
    monkeypatch.setattr(archives, "MOST_ENTRIES", 1000)
    monkeypatch.setattr(archives, "MOST_TAR_BYTES", 50_000)
    assert re.fullmatch(r"clone\.tar .* 0 MB", get_refusal(tmp_path / "clone.tar"))
    monkeypatch.setattr(archives, "MOST_KEPT_BYTES", 10)
    assert re.fullmatch(r"clone\.zip .* 0 MB .*modules", get_refusal(tmp_path / "clone.zip"))
    monkeypatch.setattr(archives, "MOST_DIRECTORY_BYTES", 1000)
    assert re.fullmatch(r"clone\.zip .* 1,000 files", get_refusal(tmp_path / "clone.zip"))


def test_an_archive_that_is_a_link_or_a_pipe_is_not_opened(tmp_path):
    """A link could lead to another student's submission."""
    lay(tmp_path / "bob", {"submission.zip": make_zip(LESSONS)})
    for name, make in (("ada", lambda path: path.symlink_to("../bob/submission.zip")), ("carl", os.mkfifo)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "submission.zip")
        problem = "is a link" if name == "ada" else "is not a file"
        assert get_refusal(tmp_path / name) == f"submission.zip {problem}"


@pytest.mark.parametrize("pack", [make_zip, make_tar])
def test_a_bomb_is_bounded(tmp_path, pack):
    """A huge module file is unpacked up to its limit and then refused."""
    zeros = pack({FIRST.path.name: b"\0" * 100_000_000})
    with incoming.open_modules(lay(tmp_path, {"submission.zip": zeros})) as (directory, _):
        assert find(directory, FIRST).stat().st_size == MAX_SOURCE_BYTES + 1
    with pytest.raises(UserError, match="larger"), incoming.open_submission(tmp_path):
        pass


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
