"""Submissions with links, devices, odd archives and other unusual files."""

from __future__ import annotations

import os
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from brigade.course.table.modules import ROOT
from hostile import MODULE_1, ONE, Hostile, reference, write

SOLUTION = ROOT / "solutions" / MODULE_1.path
TEXT = SOLUTION.read_text()
MISSING, OUTSIDE, EMPTY = "module 1 is missing", "outside of the submission", "The submission has no file"
DAMAGED = "is damaged"


def make_module_file(what: Callable[[Path], None]) -> Callable[[Path], None]:
    """Make a directory in which `what` creates module 1's file."""

    def make(directory: Path) -> None:
        path = directory / MODULE_1.path
        path.parent.mkdir(parents=True)
        what(path)

    return make


def make_text_file(content: str | bytes) -> Callable[[Path], None]:
    return make_module_file(lambda path: write(path, content))


def make_zip(
    *members: tuple[str, bytes], change: Callable[[bytes], bytes] = bytes, **options: int
) -> Callable[[Path], None]:
    """Make a zip of these members in the directory, changed by `change`."""

    def make(directory: Path) -> None:
        archive = directory / "submission.zip"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name that is there twice
            with zipfile.ZipFile(archive, "w", **{"compression": zipfile.ZIP_DEFLATED, **options}) as bundle:
                for name, content in members:
                    bundle.writestr(name, content)
        archive.write_bytes(change(archive.read_bytes()))

    return make


def write_large_file(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(100_000_000)


def link_inside(directory: Path) -> None:
    write(directory / "my answer.py", TEXT)
    directory.joinpath(MODULE_1.path.name).symlink_to("my answer.py")


def write_odd_names(directory: Path) -> None:
    """Write the submission to a directory beside one with a name that is not UTF-8."""
    reference("")(directory / "Zoë Ångström – 提交 (2)")
    os.mkdir(os.fsencode(directory) + b"/\xff\xfe\n\x1b[2J")


def make_read_only(directory: Path) -> None:
    reference("")(directory)
    for path in (directory / MODULE_1.path, directory / MODULE_1.package, directory):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


NAME = str(MODULE_1.path)

CASES = [
    Hostile("a link to the reference", make_module_file(lambda path: path.symlink_to(SOLUTION)), 0, OUTSIDE),
    Hostile("a link to a secret", make_module_file(lambda path: path.symlink_to("/etc/shadow")), 0, OUTSIDE),
    Hostile("a link to itself", make_module_file(lambda path: path.symlink_to(path.name)), 0, MISSING),
    Hostile("a link inside the submission", link_inside, 2, checks=ONE),
    Hostile("a pipe", make_module_file(os.mkfifo), 0, MISSING),
    Hostile(
        "a device", make_module_file(lambda path: os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))), 0, MISSING
    ),
    Hostile("a link to a device", make_module_file(lambda path: path.symlink_to("/dev/zero")), 0, MISSING),
    Hostile("a directory", make_module_file(os.mkdir), 0, EMPTY),
    Hostile("a hundred megabytes", make_module_file(write_large_file), 0, "larger than"),
    Hostile("spaces, accents, and names that are no text", write_odd_names, 2, checks=ONE),
    Hostile("read-only", make_read_only, 2, checks=ONE),
    Hostile(
        "a byte order mark and Windows lines",
        make_text_file(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()),
        2,
        checks=ONE,
    ),
    Hostile(
        "as many small lists as fit",
        make_text_file(TEXT + "x = [" + "[]," * 80_000 + "]\n"),
        2,
        checks=ONE,
        is_long=True,
    ),
    Hostile("zip: a hundred megabytes of nothing", make_zip((NAME, bytes(100 << 20))), 0, "larger than"),
    Hostile(
        "zip: a file that is a directory too",
        make_zip((NAME, TEXT.encode()), (f"{NAME}/naive_ddp.py", b"")),
        2,
        checks=ONE,
    ),
    Hostile("zip: 1500 directories in each other", make_zip(("d/" * 1500 + NAME, TEXT.encode())), 2, checks=ONE),
    Hostile("zip: cut off", make_zip((NAME, TEXT.encode()), change=lambda data: data[:-30]), 0, DAMAGED),
    Hostile(
        "zip: damaged inside",
        make_zip((NAME, TEXT.encode()), change=lambda data: data.replace(data[60:90], bytes(30), 1)),
        0,
        DAMAGED,
    ),
    Hostile("zip: not one", lambda directory: write(directory / "submission.zip", b"PK\3\4" + bytes(100)), 0, DAMAGED),
    Hostile("nothing", lambda directory: None, 0, EMPTY),
]
