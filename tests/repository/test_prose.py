"""Links in the documents lead somewhere, and the files, tests, names and options that documents mention exist."""

from __future__ import annotations

import ast
import builtins
import fnmatch
import keyword
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
from documents import documents, find_dead_links, prose

from brigade.course.table.modules import ROOT

PLACES = ("brigade", "docs", "lessons", "notebooks", "solutions", "tests", "tools")
GENERATED = ("lessons/measurements.json",)  # not there until somebody makes it

CODE = ("brigade", "lessons", "site", "solutions", "tests", "tools", ".ci", ".github")
CODE_SUFFIXES = (".cc", ".cpp", ".css", ".diff", ".html", ".js", ".py", ".sh", ".txt", ".yml")
# Names from other programs, in documents that compare the course with them; `docs/claims.md` has many more.
FOREIGN = """
ALLGATHER_COALESCED ALLREDUCE DataParallelNaive LD_PRELOAD Participant_98765_assignsubmission_file SID
ada_naive_ddp average_in_collective bf16_compress_hook broadcast_buffers caching forward_sync_buffers fr_trace nccl2
node1 overlap_grad_reduce overlap_param_gather profiler runLoop toctree --durations --gpus --ipc --native --scope
--shm-size error_file DataParallel GatheredParameters TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC deepspeed spawn
"""
FOREIGN_CLASSES = ("F", "ReduceOp")

every_document = pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())


@every_document
def test_links_lead_somewhere(document):
    """Anchors, and all links between pages, are tested where the site is built."""
    # Documents in `tools/student` are for the top of the student edition.
    assert find_dead_links(document, ROOT if document.parent.name == "student" else document.parent) == []


@cache
def paths() -> list[str]:
    """Return all files of the course."""
    return [path.relative_to(ROOT).as_posix() for place in PLACES for path in (ROOT / place).rglob("*.*")]


@cache
def names_of_tests() -> set[str]:
    """Return the names of all test functions."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_missing(code: str) -> bool:
    """Return whether inline code names a file, a test, or something in `brigade` or `torch` that does not exist."""
    if re.fullmatch(rf"(?:{'|'.join(PLACES)})/[\w./*-]*", code) and code not in GENERATED:
        pattern = code.replace("NN", "*")  # as in `lessons/mNN/README.md`
        return not (fnmatch.filter(paths(), pattern) if "*" in pattern else (ROOT / code).exists())
    if dotted := re.match(r"(?:brigade|torch)(?:\.\w+)+(?=$|\()", code):
        try:
            pkgutil.resolve_name(dotted[0])
        except (ImportError, AttributeError):
            return True
    return bool(re.fullmatch(r"test_\w+", code)) and code not in names_of_tests()


@cache
def code_texts() -> dict[Path, str]:
    """Return the texts of all programs and settings of the course."""
    files = [path for place in CODE for path in (ROOT / place).rglob("*.*") if path.suffix in CODE_SUFFIXES]
    files += [ROOT / name for name in ("Makefile", "tools/setup.mk", "pyproject.toml", ".devcontainer/Dockerfile")]
    files = [path for path in files if "__pycache__" not in path.parts and path != Path(__file__)]
    return {path: path.read_text(errors="replace") for path in files}


@cache
def words() -> set[str]:
    """Return every identifier in the course's code, every file's name without its ending, and Python's own words."""
    found = {
        *dir(builtins),
        *keyword.kwlist,
        *FOREIGN.split(),
        *(name.removeprefix("test_") for name in names_of_tests()),
    }
    files = [path for place in ("*", "docs/*", "lessons/**/*", "tools/student/*") for path in ROOT.glob(place)]
    found |= {path.stem for path in (*files, *code_texts())}
    return found.union(*(re.findall(r"[A-Za-z_]\w*", text) for text in code_texts().values()))


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return the names of the bases of each class in the course's code, and every name in its body."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path, text in code_texts().items():
        tree = ast.parse(text) if path.suffix == ".py" and "wrong" not in path.parts else ast.Module([], [])
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            bases, inside = found.setdefault(node.name, (set(), set()))
            bases |= {re.split(r"[.\[]", ast.unparse(base))[-1] for base in node.bases}
            for part in ast.walk(node):
                inside |= {getattr(part, field) for field in ("name", "attr", "id") if hasattr(part, field)}
    return found


def has_member(name: str, member: str) -> bool:
    """Return whether a class of the course mentions the member, or inherits from a class that is not the course's."""
    bases, inside = classes()[name]
    return member in inside or any(base not in classes() or has_member(base, member) for base in bases - {name})


def find_unknown_words(code: str) -> list[str]:
    """Return the parts of a name such as `run_checks`, `Recorder.watch_gradients` or `--prior` that do not exist."""
    options = re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
    unknown = [option for option in options if option not in FOREIGN.split() and not is_option(option)]
    match = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?", code)
    if match and not (ROOT / match[1]).is_file():
        first, *rest = match[1].split(".")
        unknown += [word for word in (first, *rest) if word not in words()]
        if rest and first[0].isupper() and first not in FOREIGN_CLASSES and match[1] not in names_of_files():
            unknown += [match[1]] if first not in classes() or not has_member(first, rest[0]) else []
    return unknown


@cache
def is_option(option: str) -> bool:
    """Return whether the code contains an option, or a keyword from which it is made."""
    return any(f'"{option}' in text or f"{option} " in text or f"{option}=" in text for text in code_texts().values())


@cache
def names_of_files() -> set[str]:
    """Return the names of the files at the top, in `.github`, in the lessons and in `tools/student`, as AGENTS.md."""
    return {path.name for place in ("*", ".github/*", "tools/student/*", "lessons/**/*") for path in ROOT.glob(place)}


@pytest.mark.parametrize(
    "code", ["Report.add", "check_twice(entry)", "brigade.course.checks.nothing", "brigade grade --shout"]
)
def test_a_name_that_does_not_exist_is_found(code):
    assert is_missing(code) or find_unknown_words(code)


@every_document
def test_what_is_named_is_there(document):
    if document.name == "CHANGELOG.md":
        pytest.skip("it names what is no more")
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(document))]
    assert [code for code in inline if is_missing(code)] == []
    if document.name != "claims.md":  # which quotes the names of many other programs
        assert [code for code in inline if find_unknown_words(code)] == []
