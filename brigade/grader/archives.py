"""Read files of an archive into memory: of a zip, or of a tar file that may be compressed with gzip, bzip2 or xz.

Nothing is unpacked to a path that an archive names. Only ordinary members with wanted names are read, so an archive may
be large. The limits are on what reading it costs: the entries, the bytes to decompress and the bytes to keep.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from brigade.course.table.submission import MAX_SOURCE_BYTES, open_no_follow
from brigade.grader.formats import make_line

# A virtual environment with torch has 46,000 files, and a zip's directory needs about 150 bytes for each.
MOST_ENTRIES = 100_000
MOST_DIRECTORY_BYTES = 20_000_000  # of a zip; of a tar file, the paths of all files together
MOST_TAR_BYTES = 2_500_000_000  # to decompress until the end of a tar file
MOST_KEPT_BYTES = 50_000_000  # of all wanted files, compressed or not, also of those that are damaged
LONGEST_PATH = 4_000  # characters; no system has longer ones
MOST_XZ_BYTES = 150_000_000  # of memory; xz -9 needs 65 MB
MOST_AT_ONCE = 1_000_000  # bytes that a header of a tar file may ask for
MOST_READS = 100  # one after the other, for the header of one member
MOST_RECORDS = 1_000_000  # of all extended headers of a tar file; a member has about 10
MOST_GLOBAL_RECORDS = 100  # of all global ones, because tarfile copies them for each member
MOST_DIGITS = 40  # in a row, in an extended header
CHUNK = 100_000

DIRECTORY_ENTRY = b"PK\x01\x02"
NUMBER, RECORD = re.compile(rb"\d+"), re.compile(rb"(\d+) ")
KINDS = {b"Rar!": "a .rar file", b"7z\xbc\xaf": "a .7z file", b"\x28\xb5\x2f\xfd": "a .zst file"}  # are not unpacked
COMPRESSIONS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lambda file: io.BufferedReader(XzReader(file)),
}


class Refused(Exception):
    """An archive that cannot be read. The message is the second half of a sentence that begins with its name."""


@dataclass
class Contents:
    """What an archive contains: the paths of all files, the bytes of the wanted ones, and why others were not read.

    The bytes end one after the maximum size of a module, so that a longer file is refused when it is used.
    """

    files: list[str] = field(default_factory=list)
    wanted: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # reasons by the names of wanted members


READ_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz")


def read_archive(path: Path, is_wanted: Callable[[str], bool], skipped: frozenset[str]) -> Contents:
    """Return the contents of the archive, without directories named in `skipped`. Raise Refused if it is unreadable.

    If it contains nothing that is wanted but one archive, as a zip of a zip does, return the contents of that one.
    """
    try:
        # Reading a zip closes its file.
        with open(path, "rb", opener=open_no_follow) as file, os.fdopen(os.dup(file.fileno()), "rb") as again:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refused("is not a file")
            if not status.st_size:
                raise Refused("is empty (0 bytes)")
            contents = read_members(file, is_wanted, skipped)
            inner = [name for name in contents.files if name.lower().endswith(READ_ARCHIVES)]
            if contents.wanted or contents.refused or len(inner) != 1:
                return contents
            again.seek(0)
            return read_inner(again, inner[0], is_wanted, skipped)
    except OSError as error:
        reason = "is a link" if path.is_symlink() else f"could not be opened ({error.strerror})"
        raise Refused(reason) from None


def read_inner(
    file: io.BufferedReader, inner: str, is_wanted: Callable[[str], bool], skipped: frozenset[str]
) -> Contents:
    """Return the contents of the archive `inner` in an archive."""
    found = read_members(file, inner.rpartition("/")[2].__eq__, skipped, MOST_KEPT_BYTES + 1, "in another archive")
    shown = make_line(inner[-100:])
    if inner not in found.wanted:
        raise Refused(f"contains {shown}, which {found.refused[inner]}")
    try:
        return read_members(io.BufferedReader(io.BytesIO(found.wanted[inner])), is_wanted, skipped)  # type: ignore[arg-type]
    except Refused as refusal:
        raise Refused(f"contains {shown}, which {refusal}") from None


def read_members(
    file: io.BufferedReader,
    is_wanted: Callable[[str], bool],
    skipped: frozenset[str],
    most: int = MAX_SOURCE_BYTES + 1,
    what: str = "of modules",
) -> Contents:
    """Return the contents of an archive, whose first bytes say what it is, and at most `most` bytes of each member."""
    start = file.read(512)
    file.seek(0)
    if kind := next((name for magic, name in KINDS.items() if start.startswith(magic)), ""):
        raise Refused(f"is {kind}, which the grader cannot unpack")
    compressed = next((way for magic, way in COMPRESSIONS.items() if start.startswith(magic)), None)
    list_members: Callable[[Any], Iterator[Member]] = list_tar if compressed or start[257:262] == b"ustar" else list_zip
    contents, size, count, length = Contents(), 0, 0, 0
    try:
        for name, problem, cost, read in list_members(compressed(file) if compressed else file):
            count, length = count + 1, length + len(name)
            if count > MOST_ENTRIES or length > MOST_DIRECTORY_BYTES:
                raise Refused(f"contains more than {MOST_ENTRIES:,} files")
            if len(name) > LONGEST_PATH:
                raise Refused(f"contains a path of more than {LONGEST_PATH:,} characters")
            parts = [part for part in name.replace("\\", "/").split("/") if part != "."]
            if not skipped.isdisjoint(parts) or problem == "is a directory":
                continue
            if not {"", ".."}.isdisjoint(parts):
                problem = "its path leads out of the archive"
            shown = "/".join(parts)
            if not is_wanted(parts[-1]):
                contents.files += [] if problem else [shown]
            elif problem:
                contents.refused[shown] = problem
            else:
                try:
                    contents.wanted[shown] = read(most)
                    contents.files.append(shown)
                    size += max(cost, len(contents.wanted[shown]))
                except DAMAGED:
                    contents.refused[shown] = "is damaged"
                    size += max(cost, MAX_SOURCE_BYTES)
                if size > MOST_KEPT_BYTES:
                    raise Refused(f"contains more than {MOST_KEPT_BYTES // 10**6} MB {what}")
    except Refused:
        raise
    except Exception:  # zipfile and tarfile report a damaged file in many ways
        raise Refused("is damaged, or was not uploaded completely") from None
    return contents


DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)  # a member of a zip
# The name, why it cannot be read, the compressed bytes that reading it takes, and a function that reads it.
Member = tuple[str, str, int, Callable[[int], bytes]]


class DirectoryLimit(io.BufferedReader):
    """A zip whose directory, which zipfile reads at once, has a bounded size."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MOST_DIRECTORY_BYTES:
            raise Refused(f"contains more than {MOST_ENTRIES:,} files")
        data = super().read(size)
        if data.count(DIRECTORY_ENTRY) > MOST_ENTRIES:
            raise Refused(f"contains more than {MOST_ENTRIES:,} files")
        return data


def list_zip(file: io.BufferedReader) -> Iterator[Member]:
    """Yield the members of a zip. Decompress only with methods that need little memory."""
    with zipfile.ZipFile(DirectoryLimit(file.raw)) as bundle:
        for info in bundle.infolist():
            problem = ""
            if info.is_dir():
                problem = "is a directory"
            elif stat.S_ISLNK(info.external_attr >> 16):
                problem = "is a link"
            elif info.flag_bits & 1:
                problem = "is encrypted"
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                problem = "is compressed with an unusual method"

            def read(size: int, info: zipfile.ZipInfo = info) -> bytes:
                with bundle.open(info) as source:
                    return source.read(size)

            yield info.filename, problem, info.compress_size, read


def list_tar(file: BinaryIO) -> Iterator[Member]:
    """Yield the members of a tar file."""
    reader: Any = ForwardReader(file)  # has only what tarfile uses
    bundle: Any = tarfile.TarFile(fileobj=reader, tarinfo=TarMember)  # `members` is not documented
    with bundle:
        while info := bundle.next():
            bundle.members.clear()  # TarFile would keep all of them
            reader.num_reads = 0
            problem = ""
            if info.isdir():
                problem = "is a directory"
            elif not info.isreg():
                problem = "is a link" if info.issym() or info.islnk() else "is not an ordinary file"
            elif info.issparse():
                problem = "is a sparse file"

            def read(size: int, info: tarfile.TarInfo = info) -> bytes:
                return bundle.extractfile(info).read(size)

            yield info.name, problem, 0, read


class TarMember(tarfile.TarInfo):
    """A member of a tar file, whose extended header is examined before tarfile reads it."""

    def _proc_pax(self, bundle: Any) -> tarfile.TarInfo:  # not documented, as `members`
        bundle.fileobj.expect_records(is_global=self.type == tarfile.XGLTYPE)
        return super()._proc_pax(bundle)  # type: ignore[misc]


class ForwardReader:
    """The bytes of a tar file, which tarfile reads in order.

    A header can ask for any number of bytes, and lead to any position. Refuse what an honest tar file does not need.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._position, self.num_reads = file, 0, 0
        self._num_records, self._num_global = 0, 0  # of the extended headers so far
        self._expected: str = ""  # "global" or "own" if the next read gets an extended header

    def expect_records(self, is_global: bool) -> None:
        """Let the next read examine what it gets, because that is an extended header."""
        self._expected = "global" if is_global else "own"

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise tarfile.ReadError("a member begins inside of another one")
        while self._position < position and self._read(min(CHUNK, position - self._position)):
            pass
        self.num_reads = 0

    def read(self, size: int) -> bytes:
        self.num_reads += 1
        if size > MOST_AT_ONCE or self.num_reads > MOST_READS:
            raise tarfile.ReadError("a header is too long")
        data = self._read(size)
        if self._expected:
            num_records = count_records(data)
            self._num_records += num_records
            self._num_global += num_records * (self._expected == "global")
            self._expected = ""
            if self._num_records > MOST_RECORDS or self._num_global > MOST_GLOBAL_RECORDS:
                raise tarfile.ReadError("the headers have too many records")
        return data

    def _read(self, size: int) -> bytes:
        if self._position > MOST_TAR_BYTES:
            raise Refused(f"contains more than {MOST_TAR_BYTES // 10**6:,} MB")
        data = self._file.read(size)
        self._position += len(data)
        return data


def count_records(header: bytes) -> int:
    """Return the number of records, such as b"11 path=ab\\n", in an extended header. The number is the length.

    Raise ReadError for a header with which tarfile may take quadratic time: it looks for the sign = of a record also
    behind its end, and for a record at each digit of a long number.
    """
    if max(map(len, NUMBER.findall(header)), default=0) > MOST_DIGITS:
        raise tarfile.ReadError("a header has a number that is too long")
    count = place = 0
    while match := RECORD.match(header, place):
        end = place + int(match[1])
        if header.find(b"=", match.end(), end) < 0:
            raise tarfile.ReadError("a header has a record without a value")
        count, place = count + 1, end
    return count


class XzReader(io.RawIOBase):
    """The decompressed bytes of an xz file. lzma.open has no limit on memory, which the file's own header chooses."""

    def __init__(self, file: BinaryIO):
        self._file, self._decompressor = file, lzma.LZMADecompressor(memlimit=MOST_XZ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data and not self._decompressor.eof:
            chunk = self._file.read(CHUNK) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not chunk:
                raise EOFError("the file ends too early")
            data = self._decompressor.decompress(chunk, len(buffer))
        buffer[: len(data)] = data
        return len(data)
