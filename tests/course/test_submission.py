"""Reading a submission: it is found in any layout, refused with one sentence, and imported only in ranks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from in_ranks import basics as functions

from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.course.table.submission import MAX_SOURCE_BYTES, list_names, read, select_files, select_named
from brigade.ranks import syntax
from brigade.ranks.errors import UserError
from brigade.ranks.runner.ranks import RankFailure, run_ranks
from brigade.ranks.texts import is_sealed, prepare_for_ranks

FIRST, SECOND, THIRD, SHARDED = map(get_module, (1, 2, 3, 11))
NAIVE = "m01_naive_ddp.naive_ddp"
REFUSALS = "m01_naive_ddp.refusals"  # a given file: it is there even if a submission lacks it
FLAT = "m02_flat_ddp.flat_ddp"


def lay(directory: Path, text: str = "answer = 'own'\n", *entries) -> Path:
    """Write modules (default: all) with this text, in the layout of a lessons directory."""
    for entry in entries or MODULES:
        path = directory / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def get_refusal(target: Path | str, number: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        read(target, number)
    message = str(caught.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


def import_in_ranks(target: Path, number: int, name: str) -> dict:
    packages = {"submission": read(target, number)}
    [result] = run_ranks(functions.import_by_name, f"submission.{name}", world_size=1, packages=packages)
    return result


# ---- where it is


def test_a_submission_in_any_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    lay(tmp_path / "clone" / "lessons")
    (tmp_path / "clone" / FIRST.path.name).write_text("answer = 'a stray copy'\n")
    lay(tmp_path / "lessons")
    (tmp_path / "flat").mkdir()
    for entry in MODULES:
        (tmp_path / "flat" / entry.path.name).write_text("answer = 'own'\n")
    for target in (tmp_path / "clone", tmp_path / "lessons", tmp_path / "flat", "~/lessons"):
        sources = read(target, 3)
        assert list(sources) == ["m03_overlapped_ddp.overlapped_ddp", NAIVE, REFUSALS, FLAT], "no later module is read"
        assert {text for name, (_, text) in sources.items() if name != REFUSALS} == {"answer = 'own'\n"}
    assert list(read(tmp_path / "lessons" / FIRST.package, 1)) == [NAIVE, REFUSALS]


def test_earlier_modules_are_the_submissions_or_the_references(tmp_path):
    lay(tmp_path, text := f"from ..{FIRST.package} import {FIRST.name}\n")
    own, reference = read(tmp_path, 2), read(tmp_path, 2, "reference")
    assert own[NAIVE][1] == text
    assert reference[NAIVE][1] == (ROOT / "solutions" / FIRST.path).read_text()
    assert reference[FLAT] == own[FLAT], "the module itself is the submission's in any case"


def test_of_the_reference_only_what_is_named_is_read(tmp_path):
    """A reference module is read only if the module, its checks or another reference module that is read names it."""

    def list_packages(number: int) -> set[str]:
        return {name.partition(".")[0] for name in read(tmp_path, number, "reference")}

    lay(tmp_path)
    assert list_packages(4) == {get_module(4).package}
    assert get_module(7).package in list_packages(8), "its checks wrap their models in module 7's class"
    lay(tmp_path, f"from ..{SECOND.package} import {SECOND.name}\n", get_module(4))
    assert list_packages(4) == {m.package for m in (get_module(4), SECOND, FIRST)}, "module 2 names module 1"


def test_earlier_modules_that_are_missing_or_broken_raise_the_reason(tmp_path):
    lay(tmp_path, f"from ..{FIRST.package}.{FIRST.name} import broken\n", THIRD)
    lay(tmp_path, "def broken(:\n", FIRST)
    sources = read(tmp_path, 3)
    assert sources[NAIVE][0] == sources[FLAT][0] == ""
    assert "naive_ddp.py, line 1: " in sources[NAIVE][1] and str(SECOND.path) in sources[FLAT][1]
    with pytest.raises(RankFailure) as caught:
        import_in_ranks(tmp_path, 3, "m03_overlapped_ddp.overlapped_ddp")
    assert caught.value.error == "ImportError" and caught.value.message == sources[NAIVE][1]
    assert len(caught.value.lines) == 1, "only the student's line"


# ---- what is refused


def test_a_target_or_module_that_is_missing(tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "nowhere") in get_refusal(tmp_path / "nowhere")
    assert str(tmp_path / "file") in get_refusal(tmp_path / "file")
    (tmp_path / FIRST.path).mkdir(parents=True)
    assert "m01_naive_ddp/naive_ddp.py" in get_refusal(tmp_path, 1), "a directory of that name is none"


BROKEN = {
    "syntax": (b"x = 1\ndef f(:\n", "naive_ddp.py, line 2: "),
    "null bytes": (b"x = 1\0\n", "naive_ddp.py"),
    "not UTF-8": (b"x = '\xff\xfe'\n", "naive_ddp.py"),
    "an unknown encoding": (b"# -*- coding: rot13 -*-\nk = 1\xff\n", "naive_ddp.py"),
    "deep brackets": (b"(" * 100_000, "naive_ddp.py"),
    "deep brackets that close": (b"(" * 50_000 + b"1" + b")" * 50_000, "naive_ddp.py"),
    "deep signs": (b"-" * 100_000 + b"1", "naive_ddp.py"),
    "a deep attribute": (b"a" + b".b" * 100_000, "naive_ddp.py"),
    "too many dots": (b"import a" + b".a" * 30_000, "file: parsing takes too much memory"),
    "too large": (b"#" * (MAX_SOURCE_BYTES + 1), "larger than"),
}


@pytest.mark.parametrize("content, words", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_is_not_python(tmp_path, content, words):
    lay(tmp_path)
    (tmp_path / FIRST.path).write_bytes(content)
    message = get_refusal(tmp_path)
    assert words in message and len(message) < 300
    assert "None" not in message, "a line number that is not known is not given"


def test_only_a_short_text_is_parsed_in_this_process(tmp_path, monkeypatch):
    lay(tmp_path, "answer = 1\n" * 3_000)
    monkeypatch.setattr(syntax.ast, "parse", lambda *_, **__: pytest.fail("parsed here"))
    assert read(tmp_path, 1)[NAIVE][1] == "answer = 1\n" * 3_000
    (tmp_path / FIRST.path).write_text("answer = 1\n" * 3_000 + "one two\n")
    assert "naive_ddp.py, line 3001: " in get_refusal(tmp_path)


def test_threads_may_parse_at_the_same_time():
    """Python 3.11 cannot do this: a thread that collects garbage in the parser may give way to another."""

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            time.sleep(0)

    def work(_: int) -> None:
        for _ in range(200):
            garbage.append([Garbage() for _ in range(20)])
            garbage.pop()
            syntax.parse_tree("x = [((1, 2), {3: 4})] * 5\n" * 50)

    garbage: list[list[Garbage]] = []
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [None, None]


# ---- how it is imported


def test_modules_import_each_other_relatively(tmp_path):
    (tmp_path / FIRST.path.name).write_text("answer = 'own'\n")
    importing = f"from ..{FIRST.package}.{FIRST.name} import answer\nfrom .. import {FIRST.package}\n"
    (tmp_path / SECOND.path.name).write_text(importing)
    assert import_in_ranks(tmp_path, 2, FLAT) == {"answer": "own"}


@pytest.mark.parametrize(
    "name", ["solutions", "tests", "lessons", "mutants", FIRST.package, "helper", f"submission.{FLAT}"]
)
def test_only_the_submissions_modules_up_to_this_one_are_found(tmp_path, name):
    lay(tmp_path, f"import {name}\n")
    (tmp_path / FIRST.package / "helper.py").write_text("answer = 1\n")
    failure = pytest.raises(RankFailure, import_in_ranks, tmp_path, 1, NAIVE).value
    assert failure.error == "ModuleNotFoundError" and failure.rank == 0
    assert failure.lines == [f"  naive_ddp.py, line 1, in <module>: import {name}"]


def test_the_courses_own_files_travel_as_code():
    """Only the course's own files are sent as compiled code. A rank compiles a student's text itself."""
    sources = read("solutions", 2) | {"mine": ("/home/ada/mine.py", "answer = 1\n")}
    sent = prepare_for_ranks(sources, {})
    assert sent.pop("mine") == ("/home/ada/mine.py", "answer = 1\n", None)
    for name, (path, text, code) in sent.items():
        words = [line.strip() for line in sources[name][1].splitlines() if line.strip().startswith("#")]
        assert words and not text and not [line for line in words if line.encode() in code], "a comment is in the code"
        assert path == sources[name][0]


# ---- a module with several files


def lay_files(directory: Path, **texts: str) -> dict[str, tuple[str, str]]:
    """Write the named files of module 11 side by side, as in a flat upload, and return its sources by file."""
    for stem, text in texts.items():
        (directory / f"{stem}.py").write_text(text)
    sources = select_files(SHARDED, read(directory, 11))
    return {name.partition(".")[2]: source for name, source in sources.items()}


def test_the_files_that_the_main_file_imports_belong_to_it(tmp_path):
    main = "from .flat_shard import FlatShard\nfrom .checkpoint import ShardedCheckpoints\n"
    sources = lay_files(tmp_path, fully_sharded=main, flat_shard="from .plan import x\n", plan="x = 'own'\n")
    assert (sources["plan"][1], sources["fully_sharded"][1]) == ("x = 'own'\n", main)
    given = ROOT / "solutions" / SHARDED.package / "checkpoint.py"
    assert sources["checkpoint"][1] == given.read_text() and not is_sealed(sources["checkpoint"][0]), "a given file"


def test_a_main_file_with_everything_needs_no_other_file(tmp_path):
    """The skeletons that are still beside it do not count, not even if they are broken. What is given stays."""
    everything = "plan = 'an ordinary name'\n"
    files = lay_files(tmp_path, fully_sharded=everything, plan="def broken(", checkpoint="1")
    assert set(files) == {"fully_sharded", "checkpoint", "unit_hooks"}


def test_a_given_file_is_there_for_later_modules(tmp_path):
    """Module 1 is in another style, and imports nothing. Module 2 is the skeleton, which imports the given file."""
    (tmp_path / "naive_ddp.py").write_text("def broadcast_module_state(module, process_group=None): ...\n")
    (tmp_path / "flat_ddp.py").write_text((ROOT / "solutions" / get_module(2).path).read_text())
    import_in_ranks(tmp_path, 2, "m02_flat_ddp.flat_ddp")


@pytest.mark.parametrize(("texts", "reason"), [({}, "cannot be read"), ({"plan": "def broken("}, "plan.py, line 1")])
def test_a_further_file_that_is_missing_or_broken_is_named(tmp_path, texts, reason):
    lay_files(tmp_path, fully_sharded="from .plan import plan_units\n", **texts)
    failure = pytest.raises(RankFailure, import_in_ranks, tmp_path, 11, "m11_fully_sharded.fully_sharded").value
    assert failure.error == "ImportError" and reason in str(failure)


def test_only_imports_and_names_in_strings_choose_earlier_modules(tmp_path):
    """A word in a comment or a docstring imports nothing."""
    sources = read(lay(tmp_path), 3)
    text = f"'Like {FIRST.package}.'\n# from ..{FIRST.package} import x\n"
    assert select_named(list_names(text), sources) == {}
    for text in (f"from ..{FIRST.package} import (\n    naive_ddp,\n)\n", f"x = '..{FIRST.package}.x'\n"):
        assert [*select_named(list_names(text), sources)] == [NAIVE, REFUSALS]
