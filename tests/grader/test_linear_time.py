"""The grader's own process stays quick with any text, archive or record that a student or a rank can make.

No deadline ends a search in the grader. Each input has the largest size that is permitted. It is made for one mistake:
time that grows with the square of the size, which would be minutes or hours here instead of a fraction of a second.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from brigade.course.checks.diagnose.evidence import (
    explain_refusal,
    find_leftover,
    find_repeated_reduction,
    find_skipped_call,
)
from brigade.course.checks.diagnose.exceptions import explain_exception
from brigade.course.checks.render import blur
from brigade.course.table import written
from brigade.course.table.modules import MODULES, get_module
from brigade.course.table.submission import MAX_SOURCE_BYTES, read_module
from brigade.grader import archives, formats, incoming, similarity, tables, uploads
from brigade.grader.witness.switch import Call, Switch
from brigade.ranks.progress import Progress, RankRecord
from brigade.ranks.runner import monitor
from brigade.ranks.runner.failure import MESSAGE_LIMIT, RankFailure, make_exception_failure, remove_jargon
from brigade.ranks.runner.monitor import MOST_EVENTS, Monitor
from brigade.ranks.runner.options import RunOptions
from brigade.ranks.runner.process import OUTPUT_LIMIT
from brigade.ranks.runner.server import SERVER
from brigade.ranks.runner.witness import Refused
from brigade.ranks.sandbox import enter

CPU_S = 5  # of processor time for one input, whatever else the machine does; none needs a tenth of it
MARKS = "\u0301\u0316"  # accents that NFC and NFKC must exchange
LARGEST = MAX_SOURCE_BYTES - 100


@pytest.fixture(autouse=True)
def too_long() -> Iterator[None]:
    """Fail a test that uses CPU_S seconds of the processor. No `except Exception` stops this."""

    def fail(*_: Any) -> None:
        pytest.fail(f"more than {CPU_S} s of processor time")

    limits, usage = resource.getrlimit(resource.RLIMIT_CPU), resource.getrusage(resource.RUSAGE_SELF)
    handler = signal.signal(signal.SIGXCPU, fail)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + CPU_S, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CPU, limits)
    signal.signal(signal.SIGXCPU, handler)


def fill(text: str, size: int = LARGEST) -> str:
    """Return copies of a text, one after the other, up to a size."""
    return (text * (size // len(text) + 1))[:size]


# ---- texts


def explain(text: str = "", message: str = "", line: str = "") -> None:
    frames = [("f.py", 1, "f", line[:MESSAGE_LIMIT])] * 3
    failure = RankFailure("exception", "", [], 0, "TypeError", message=message[:MESSAGE_LIMIT], frames=frames, own=True)
    explain_exception(failure, {"m.f": ("/somewhere/f.py", text)})


TEXTS: dict[str, tuple[Callable[..., Any], Any]] = {
    "open strings": (lambda text: similarity.find_runs({"x.py": text}), fill("'\"\n", 30_000)),
    "lines": (lambda count: similarity.format_lines([("x.py", 2 * n) for n in range(count)]), LARGEST // 4),
    "return": (explain, fill("return")),
    "calls": (explain, fill("=all_reduce(")),
    "dots": (explain, fill("=a.")),
    "pieces of one string": (lambda text: explain(text, "'NoneType'"), f"f'{fill('{a}')}'"),
    "a type's accents": (lambda text: explain(f"{text} = 1", "'NoneType'"), "x" + fill(MARKS, LARGEST // 2)),
    "registered": (lambda text: explain(line=text), fill("register_", MESSAGE_LIMIT)),
    "arguments": (lambda text: explain(message=text), fill("takes ", MESSAGE_LIMIT)),
    "gradients": (lambda text: explain(message=text), fill("assign a gradient", MESSAGE_LIMIT)),
    "logged": (remove_jargon, fill("[I0000 ", OUTPUT_LIMIT)),
    "enforced": (remove_jargon, fill("[enforce fail at ", OUTPUT_LIMIT)),
    "groups": (remove_jargon, fill("<brigade.", OUTPUT_LIMIT)),
    "numbers": (blur, fill("1, .")),
    "question": (written.split_answers, "## Question " + fill("1")),
    "questions": (written.parse_questions, "## Question 1 (" + fill("a ")),
    "empty answers": (written.split_answers, "## Question 1\n" + fill("\n")),
    "formula": (tables.escape, fill("\t") + "x"),
    "spaces": (tables.escape, fill("; ") + "x"),
    "a name's accents": (lambda name: incoming.format_names([name]), fill(MARKS, 65_535)),
    "owner": (uploads.find_owner, fill("a_1_assignsubmission_", 255)),
    "number": (uploads.sort_key, fill("-1", 255)),
    "values": (formats.clean, fill("\0", monitor.MOST_SENT)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name):
    function, text = TEXTS[name]
    function(text)


@pytest.mark.parametrize("text", [fill("\n"), fill("\n", LARGEST // 2) + "'''from " + fill("x ", LARGEST // 3) + "'''"])
def test_imports(text, tmp_path):
    entry = get_module(11)
    (tmp_path / entry.path.name).write_text(text)
    assert len(read_module(tmp_path, entry)) == 3, "the main file, and two that are given"


def test_metadata(tmp_path):
    (tmp_path / uploads.METADATA).write_text("upload:\n  :created_at: 1 " + fill("1"))
    assert uploads.read_metadata(tmp_path) == {}


# ---- archives


def make_tar(header: bytes, kind: bytes = tarfile.XHDTYPE, times: int = 1) -> bytes:
    """Return a tar file with a module behind an extended header, `times` times."""
    content, parts = io.BytesIO(), []
    for name, data, type_ in (("x", header, kind), (MODULES[1].path.name, b"a = 1", tarfile.REGTYPE)):
        info = tarfile.TarInfo(name)
        info.size, info.type = len(data), type_
        parts.append(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
    content.write(b"".join(parts) * times + bytes(1024))
    return content.getvalue()


def make_record(key: str, value: str) -> bytes:
    """Return a record of an extended header, which begins with its own length."""
    rest = f" {key}={value}\n".encode()
    length = next(n for n in range(len(rest), len(rest) + 10) if n == len(rest) + len(str(n)))
    return str(length).encode() + rest


def make_zip(count: int, empty: int = 0, is_damaged: bool = False) -> bytes:
    """Return a zip whose directory names one member `count` times, which begins with so many empty blocks."""
    content = io.BytesIO()
    name = MODULES[1].path.name
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(name, bytes(1 if empty else MAX_SOURCE_BYTES))
        info = bundle.getinfo(name)
    packed = content.getvalue()
    begin, end = 30 + len(name), 30 + len(name) + info.compress_size
    body = b"\0\0\0\xff\xff" * empty + packed[begin:end]
    directory = bytearray(packed[packed.index(archives.DIRECTORY_ENTRY) : -22])
    struct.pack_into("<II", directory, 16, info.CRC ^ is_damaged, len(body))
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory) * count, begin + len(body), 0)
    return packed[:begin] + body + bytes(directory) * count + last


TOO_MUCH, DAMAGED = "contains more than 50 MB of modules", "is damaged, or was not uploaded completely"
ARCHIVES: dict[str, tuple[Callable[..., bytes], tuple, str]] = {
    "digits.tar": (make_tar, (fill("1", 900_000).encode(),), DAMAGED),
    "records.tar": (make_tar, (fill("2 ", 900_000).encode() + b"=",), DAMAGED),
    "keys.tar": (make_tar, (b"".join(make_record(f"{n}", "") for n in range(200)), tarfile.XGLTYPE, 3), DAMAGED),
    "accents.tar": (make_tar, (make_record("path", fill(MARKS, 400_000) + "/x.py"),), "contains a path of more than"),
    "bombs.zip": (make_zip, (1_000, 0, True), TOO_MUCH),
    "blocks.zip": (make_zip, (1_000, 1_000_000), TOO_MUCH),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive(name, tmp_path):
    make, arguments, reason = ARCHIVES[name]
    (tmp_path / name).write_bytes(make(*arguments))
    with pytest.raises(incoming.Unreadable) as caught:
        incoming.unpack(tmp_path / name, tmp_path)
    assert str(caught.value).startswith(f"{name} {reason}")


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_an_archive_of_the_same_form_is_read(make, tmp_path):
    """The archives above are refused for what they contain, and not because these functions make no archives."""
    (tmp_path / "work").write_bytes(make(make_record("mtime", "1700000000.5")) if make is make_tar else make(1))
    assert MODULES[1].path.name in archives.read_archive(tmp_path / "work", bool, frozenset()).wanted


# ---- records


def launch(index: int, group: str = "g", **fields: Any) -> dict[str, Any]:
    fields = {"op": "all_reduce", "phase": "backward", "name": "w", "memory": "gradient"} | fields
    fields |= dict.fromkeys(("dtype", "reduce_op", "root", "peer", "line", "caller"))
    fields |= {"kind": "launch", "time": 0.0, "group": group, "ranks": [0, 1], "sync": False, "index": index}
    return fields | {"numel": 64, "nbytes": 256, "parts": 1}


def begin(step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "time": 0.0, "phase": "setup", "step": step} | fields


def ready(name: str) -> dict[str, Any]:
    return {"kind": "ready", "time": 0.0, "phase": "backward", "name": name}


def enter_backward() -> dict[str, Any]:
    return {"kind": "phase", "time": 0.0, "phase": "backward"}


def look_for_a_lost_launch(count: int) -> None:
    progress, ranks = Progress(2), [0, 1, *range(2, 100)]
    for index in range(count):
        progress.add(0, launch(index) | {"ranks": [*ranks]})
        progress.add(0, {"kind": "called", "time": 0.0, "phase": "backward", "index": index})
        progress.add(1, launch(index))
    assert progress.find_lost_launch(0, settled=[1]) is None


def match_messages(count: int) -> None:
    """Rank 0 posts receives from rank 1, and rank 2 sends to rank 0."""
    switch = Switch([RankRecord() for _ in range(3)], [[], [], []])
    for rank, op, peer in [(0, "recv", 1)] * count + [(2, "send", 0)] * count:
        switch._match(Call(rank, op, "g", (0, 1, 2), "int8", [1], [1], None, None, peer, 0, [], b"a"))


FEW = MOST_EVENTS // 8
LAUNCHES = [launch(index) for index in range(2 * FEW)]
RECORDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "steps": (find_leftover, [begin(step) for step in range(MOST_EVENTS)]),
    "one step again and again": (
        find_leftover,
        [begin(0), *LAUNCHES[:FEW], begin(1), *LAUNCHES[FEW:], *[begin(1)] * FEW],
    ),
    "gradients": (
        find_leftover,
        [*(begin(0), *[ready("w")] * FEW, *LAUNCHES[:FEW]), *(begin(1), *[ready("w")] * FEW, *LAUNCHES[FEW:])],
    ),
    "reductions": (
        lambda record: find_repeated_reduction(record, None),
        [event for index in range(4 * FEW) for event in (launch(index), ready("v"), ready("w"))],
    ),
    "refusal": (
        explain_refusal,
        [
            *map(begin, range(MOST_EVENTS)),
            begin(MOST_EVENTS, unsynced=True),
            enter_backward(),
            launch(0),
            enter_backward(),
        ],
    ),
    "refusal after many backward passes": (
        explain_refusal,
        [
            *(event for step in range(4 * FEW) for event in (begin(step), enter_backward())),
            begin(MOST_EVENTS, unsynced=True),
            enter_backward(),
            launch(0),
            enter_backward(),
        ],
    ),
    "groups": (
        lambda record: find_skipped_call([record, record], "deadlock"),
        [launch(index, f"{index}") for index in range(3 * FEW)],
    ),
    "lost launches": (look_for_a_lost_launch, MOST_EVENTS // 4),
    "messages": (match_messages, MOST_EVENTS // 2),
}


@pytest.mark.parametrize("name", RECORDS)
def test_record(name):
    function, record = RECORDS[name]
    function(record)


def test_the_line_of_a_frame_is_a_number():
    """Python 3.10.6 takes minutes to convert a million digits."""
    error = {"type": "E", "message": "", "frames": [["f.py", fill("1", 4_000_000), "f"]], "own": True}
    with pytest.raises(ValueError, match="is not a number"):
        make_exception_failure(0, error, {})


@pytest.mark.parametrize("is_isolated", [True, False])
def test_an_isolated_rank_may_report_so_many_events(is_isolated, monkeypatch):
    """Elsewhere, a student's own program may report more, for example in a notebook."""
    monkeypatch.setattr(SERVER, "sandbox", enter.Sandbox(uid=1, reservation=0) if is_isolated else None)
    monkeypatch.setattr(monitor, "MOST_EVENTS", 3)
    run = Monitor(RunOptions(world_size=1), {}, [{"calls": [[]], "borders": []}])
    batch = json.dumps([begin(0)] * 3).encode()
    with suppress(OSError):
        run._handle_message(run.ranks[0], b"E", batch)
        if is_isolated:
            with pytest.raises(Refused, match="more than 3 events"):
                run._handle_message(run.ranks[0], b"E", batch)
        else:
            run._handle_message(run.ranks[0], b"E", batch)
    for rank in run.ranks:
        rank.close()
