"""Everything that the documents name exists: links, anchors, files, checks, our names, torch's names, and figures.

Codespell checks the spelling (`make lint`, configured in pyproject.toml). This file only checks that it is British.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.metadata
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from documents import SECTION, documents, find_dead_links, prose

from brigade.cli.main import parse
from brigade.course.modules import MODULES, ROOT
from brigade.grade import similarity
from brigade.lab import links, plan
from brigade.runner import monitor, ranks
from tools import gpu_check

PLACES = ("brigade", "docs", "lessons", "notebooks", "slurm", "solutions", "tests", "tools")
GENERATED = ("docs/gpu_report.md", "lessons/measurements.json")  # not there until somebody makes them
AMERICAN = ("optimizer", "optimizers", "optimization", "program", "programs")  # names of the field; computer programs
TORCH = Path(torch.__file__).parent
PINNED = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]

every_document = pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())


def code_in(document: Path) -> list[str]:
    """Return the inline code of a document, each piece on one line."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(document))]


# ---- links


@every_document
def test_links_lead_somewhere(document):
    """Anchors, and all links between pages, are tested where the site is built."""
    # Documents in `student` are for the top of the student edition.
    assert find_dead_links(document, ROOT if document.parent.name == "student" else document.parent) == []


# ---- names of ours


@cache
def paths() -> list[str]:
    """Return all files of the course."""
    return [path.relative_to(ROOT).as_posix() for place in PLACES for path in (ROOT / place).rglob("*.*")]


def missing_file(code: str) -> bool:
    """Return whether inline code is a path in the course that does not exist. * and NN match any text."""
    code = code.replace("NN", "*")
    if not re.fullmatch(rf"(?:{'|'.join(PLACES)})/[\w./*-]*", code) or code in GENERATED:
        return False
    return not (fnmatch.filter(paths(), code) if "*" in code else (ROOT / code).exists())


@cache
def names_of_tests() -> set[str]:
    """Return the names of all test functions."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing_name(code: str) -> bool:
    """Return whether inline code is a dotted name or call in `brigade` or `torch` that cannot be resolved."""
    if not (dotted := re.match(r"((?:brigade|torch)(?:\.\w+)+)(?:$|\()", code)):
        return False
    names = dotted[1].split(".")
    for length in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:length]))
        except ModuleNotFoundError:
            continue
        for name in names[length:]:
            if not hasattr(found, name):
                return True
            found = getattr(found, name)
        return False
    return True


@every_document
def test_what_is_named_is_there(document):
    for code in code_in(document):
        assert not missing_file(code), f"there is no {code}"
        assert not missing_name(code), f"{code} cannot be resolved"
        if re.fullmatch(r"test_\w+", code):
            assert code in names_of_tests(), f"there is no test {code}"


def test_files_named_in_the_code_are_there():
    """Files that docstrings and comments name by the end of their path exist."""
    for path in paths():
        if path.endswith(".py"):
            for code in re.findall(r"`(?!torch/)([\w./]+\.py)`", (ROOT / path).read_text()):
                assert any(f"/{other}".endswith(f"/{code}") for other in paths()), f"{path} names {code}"


# ---- names of torch's

FILES = (
    "torch/nn/parallel/distributed.py",
    "torch/csrc/distributed/c10d/reducer.cpp",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/optim/zero_redundancy_optimizer.py",
    "torch/distributed/fsdp/_fully_shard/_fully_shard.py",
    "torch/nn/modules/module.py",
    "torch/_utils.py",
)  # any of them, or a file that the cell names, must contain a name
OURS = {"finish_grad_sync", "wait()", "p.grad"}  # in cells about torch


def torch_source(path: str) -> str:
    """Return the text of a file of torch. For a C++ file, return its header, because only headers are installed."""
    if path.endswith(".cpp"):
        path = f"torch/include/{path[:-4]}.hpp"
    return (TORCH.parent / path).read_text()


def torch_names(section: str) -> list[tuple[str, list[str]]]:
    """Return (name, files that may contain it) for the inline code in the columns about torch of a section's tables."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for row in rows:
            for title, cell in zip(head, row):
                codes = re.findall(r"`([^`]+)`", cell) if "torch" in title else []
                files = [code for code in codes if code.startswith("torch/")]
                found += [(code, [*files, *FILES]) for code in codes if code not in OURS and code not in files]
    return found


@pytest.mark.skipif(torch.__version__.partition("+")[0] != PINNED, reason=f"the readings are about torch {PINNED}")
@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_torch_has_what_the_reading_names(entry):
    section = (entry.lesson / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    assert section, f"lessons/{entry.package}/README.md has no section on what others decided"
    for file in re.findall(r"`(torch/[\w/]+\.\w+)`", section):
        assert torch_source(file)
    for code, files in torch_names(section):
        word = re.match(r"(?:\w+(?:::|\.))*(\w+)", code)[1]
        assert any(re.search(rf"\b{word}\b", torch_source(file)) for file in files), f"{code} is not in {files}"


# ---- figures of the code


def default(command: str, option: str):
    """Return the default of an option of `brigade`."""
    needed = {"trace": ["1"], "grade": ["--submission", "x"]}
    return getattr(parse([command, *needed.get(command, [])]), option)


LIMIT = re.search(r"--limit (\d+)", (ROOT / "brigade/grade/gradescope/run_autograder").read_text())[1]
FIGURES = {
    r"`--deadline`, (\d+) s by default": ranks.DEADLINE_S["nccl"],
    r"(\d+) s with gloo, \d+ s with NCCL": ranks.DEADLINE_S["gloo"],
    r"\d+ s with gloo, (\d+) s with NCCL": ranks.DEADLINE_S["nccl"],
    r"that does not end is stopped after (\d+)": ranks.DEADLINE_S["gloo"],
    r"deadlock: for (\d+) s no rank": monitor.QUIET_S,
    r"until `--deadline` \((\d+) s\)": default("bench", "deadline"),
    r"stopped after (\d+) s: rank 3 on node2": default("bench", "deadline"),
    r"package sets `--limit` to (\d+) s": LIMIT,
    r"fit into `--memory-gb` \(default: (\d+)\)": default("grade", "memory_gb"),
    r"groups that share (\d+) % or more": 100 * similarity.ALIKE,
    r"finish within (\d+) % of `--minutes`": 100 * gpu_check.CHECKS_PART,
    r"mutants within (\d+) %": 100 * gpu_check.MUTANTS_PART,
    r"each run of ranks within (\d+) s": gpu_check.RUN_DEADLINE_S,
    r"The defaults are (\d+) % of an H100's peak": 100 * links.UTILISATION,
    r"for dense matrices \((\d+) TFLOPS in fp32": plan.DEVICE_TFLOPS["fp32"],
}


@pytest.mark.parametrize("pattern", FIGURES)
def test_a_figure_is_the_codes(pattern):
    said = {path.name: re.findall(pattern, " ".join(prose(path).split())) for path in documents()}
    assert any(said.values()), "no document says this any more"
    for name, figures in said.items():
        assert all(float(figure) == float(FIGURES[pattern]) for figure in figures), name


# ---- spelling


@every_document
def test_the_spelling_is_british(document):
    """No word is an American form in codespell's list of British and American spellings."""
    distribution = importlib.metadata.distribution("codespell")
    [words] = [file for file in distribution.files if file.name == "dictionary_en-GB_to_en-US.txt"]
    pairs = [line.strip().split("->") for line in words.read_text().splitlines() if "->" in line]
    british = {american.strip(): word for word, others in pairs for american in others.split(",") if american.strip()}
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", prose(document)))
    found = {word for word in re.findall(r"[A-Za-z]+", text) if word.lower() in british}
    assert {word: british[word.lower()] for word in found if word.lower() not in AMERICAN} == {}
