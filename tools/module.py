"""Write the files of a new module, or list what a module still lacks:

    python -m tools.module new 12 lockstep
    python -m tools.module missing 12

`new` adds a row to the table of modules and writes a small module that works: a wrapper with one part, one check with
its mutants, a reading, hints and a notebook. Replace everything that is marked TODO.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

from brigade.course.modules import MODULES, ROOT, CourseError, Module, get_module

TABLE = "brigade/course/modules.py"
ROW = """    Module({number}, "{package}", "TODO: a title", 2, 60, 3, ("{wrapper}",),
           "TODO: what a step launches, and when", ADVANCED),
"""
SOLUTION = '''"""Module {number}: TODO say in one line what the module does differently.

TODO: the idea in a few sentences, and the cost of a step: launches, bytes, copies, memory.
"""

from __future__ import annotations

import torch.distributed as dist

from ..m01_naive_ddp.naive_ddp import NaiveDDP


class {wrapper}(NaiveDDP):
    """TODO: Wrap a model and average its gradients in a new way."""

    def finish_grad_sync(self) -> None:
        """Average the gradients over the group."""
        # TODO: what students have to write in part (a).
        {begin} part (a)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad, group=self.process_group)
                parameter.grad /= dist.get_world_size(self.process_group)
        {end}
'''
ALTERNATIVE = '''"""TODO: the same in another style, such as other names, another order and other functions of torch."""

import torch.distributed as dist

from ..m01_naive_ddp.naive_ddp import NaiveDDP


class {wrapper}(NaiveDDP):
    def finish_grad_sync(self):
        for trainable in [p for p in self.module.parameters() if p.requires_grad]:
            trainable.grad /= dist.get_world_size(self.process_group)
            dist.all_reduce(trainable.grad, group=self.process_group)
'''
CHECKS = '''"""Graded checks of module {number}: TODO the topic."""

import pytest

from brigade.checks.expectations import expect_gradients, require_launches
from helpers import training
from {package} import causes

JOB = {{"package": "{package}", "wrapper": "{wrapper}"}}


@pytest.mark.points(2)
def test_{name}_averages_gradients(submission):
    """TODO: After finish_grad_sync, every gradient is the average over the group."""
    for world in submission.worlds(1, 2, 3):
        case = submission.case("Plain", world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_gradients(results, case)
        # TODO: a condition that the launches of an earlier module do not meet.
        kind = "TODO: the launches of a step"
        require_launches(results.events, range(world), kind, bool, in_backward=False, explain=causes.explain_launches)
'''
CAUSES = '''"""Likely causes when a check of module {number} fails."""

from brigade.events import launches


def explain_launches(events, step):
    """TODO: Explain why a step does not launch what it should."""
    return "" if launches(events, step) else "finish_grad_sync launches nothing."
'''
MUTANTS = """# TODO: at least four mutants for three checks. `python tests/mutants.py --help` explains how to add one.

mutant: summed, not averaged
caught by: test_{name}_averages_gradients
cause: summed
sample: yes
--- a/{name}.py
-                parameter.grad /= dist.get_world_size(self.process_group)
+                pass

mutant: not reduced
caught by: test_{name}_averages_gradients
sample: yes
--- a/{name}.py
-                dist.all_reduce(parameter.grad, group=self.process_group)
+                pass
"""
READING = """# Module {number}: TODO: a title

**Minutes:** 60 · **Difficulty:** 3 of 5 · **Points:** 2 · **File:** [`{name}.py`]({name}.py)

TODO: the cost that the previous module leaves, as a scene with its number, and the question.

## The picture

TODO: `make figures MODULE={number}` draws it.

## Round 1: TODO

TODO: the idea with its reasons, and a prediction.

**Part (a).** TODO: what to write. Run `brigade check {number}`, or `pytest tests/test_{package}.py`.

## Round 2: TODO

TODO: what is still wrong, and the rule that solves it.

## Measure it

TODO: *predict, then run*, with a script in this directory.

## What others decided

TODO: what torch and Megatron-LM do, and why.

## What is left

TODO: the cost that remains, which is the next module's question.

## Questions

They are in [answers.md](answers.md), and you write your answers below them.
"""
QUESTIONS = """# Module {number}: written answers

Write each answer below its question. `brigade submit` adds this file to the zip that you hand in.

## Question 1

> TODO: a question?
"""
HINTS = """# Hints for module {number}

## 1. Nudge

**(a)** TODO: a question that leads to the idea.

## 2. Approach

**(a)** TODO: the steps in words.

## 3. Almost the code

**(a)** TODO:

```python
for parameter in self.module.parameters():
    dist.all_reduce(parameter.grad, group=...)
```
"""
ANSWERS = """# Module {number}: what a full answer contains

1. TODO: a model answer.
"""
CELLS = (
    ("markdown", "slide", "# Module {number}: TODO: a title\n\nTODO: the idea in three sentences."),
    ("code", "skip", "from brigade.lab.notebook import show, start_ranks\n\nranks = start_ranks()\nranks"),
    ("code", "subslide", 'show({number}, "{wrapper}.finish_grad_sync")'),
    ("markdown", "slide", "## Ask before running: TODO\n\nTODO: a prediction. A notebook has 8 to 16 cells."),
    ("code", "subslide", "ranks.stop()"),
    ("markdown", "skip", "## Run sheet\n\nTODO: how many minutes, and a table as in the other notebooks."),
)


def fill_in(text: str, entry: dict[str, str]) -> str:
    return text.format(**entry, begin="### BEGIN" + " SOLUTION", end="### END" + " SOLUTION")


def make_notebook(entry: dict[str, str]) -> str:
    """Return the notebook as JSON."""
    cells = [
        {"cell_type": kind, "id": f"cell-{number:02}", "metadata": {"slideshow": {"slide_type": slide}}}
        | {"source": fill_in(source, entry).splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, slide, source) in enumerate(CELLS, 1)
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def make_files(number: int, name: str) -> dict[str, str]:
    """Return the texts of a new module's files by path."""
    package = f"m{number:02}_{name}"
    wrapper = "".join(word.capitalize() for word in name.split("_")) + "DDP"
    entry = {"number": str(number), "package": package, "name": name, "wrapper": wrapper}
    texts = {
        f"solutions/{package}/{name}.py": SOLUTION,
        f"solutions/{package}/answers.md": ANSWERS,
        f"lessons/{package}/README.md": READING,
        f"lessons/{package}/answers.md": QUESTIONS,
        f"lessons/{package}/hints.md": HINTS,
        f"tests/test_{package}.py": CHECKS,
        f"tests/{package}/causes.py": CAUSES,
        f"tests/{package}/mutants.diff": MUTANTS,
        f"tests/{package}/alternative.py": ALTERNATIVE,
        TABLE: ROW,
    }
    files = {path: fill_in(text, entry) for path, text in texts.items()}
    return files | {f"notebooks/{package[1:]}.ipynb": make_notebook(entry)}


def write_module(number: int, name: str) -> None:
    """Write the files of a new module, and its row. Raise CourseError if there is one with this number."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or number in [entry.number for entry in MODULES]:
        raise CourseError("give a number that no module has, and a name of small letters, such as 12 lockstep")
    files = make_files(number, name)
    if existing := [path for path in files if path != TABLE and (ROOT / path).exists()]:
        raise CourseError(f"{existing[0]} already exists")
    row, table = files.pop(TABLE), (ROOT / TABLE).read_text()
    later = re.search(rf"    Module\({min((e.number for e in MODULES if e.number > number), default=-1)},", table)
    place = later.start() if later else table.index(")  # fmt: skip\n")
    (ROOT / TABLE).write_text(table[:place] + row + table[place:])
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    subprocess.run([sys.executable, "-m", "brigade.cli", "skeletons"], cwd=ROOT, check=True)
    print(f"Module {number} is there: brigade check {number} --target solutions")
    print(f"What it still needs: python -m tools.module missing {number}")


def list_missing(entry: Module) -> list[str]:
    """Return everything that an author still has to write for a module."""
    from mutants import list_mutants

    from brigade.course import validation

    files = list(make_files(entry.number, entry.name))
    needed = [path for path in files if not path.endswith("causes.py")]
    missing = [f"{path} is missing" for path in needed if not (ROOT / path).is_file()]
    missing += [fault for fault in validation.find_module_faults(entry, ROOT) if fault not in missing]
    for path in files:
        lines = (ROOT / path).read_text().splitlines() if path != TABLE and (ROOT / path).is_file() else []
        places = [(number, line.strip()[:90]) for number, line in enumerate(lines, 1) if "TODO" in line]
        missing += [f"{path}, line {number}: {line}" for number, line in places]
    missing += [f"{TABLE}: {text}" for text in (entry.title, entry.idea) if "TODO" in text]
    if (entry.tests / "mutants.diff").exists() and sum(mutant.in_sample for mutant in list_mutants(entry)) != 2:
        missing.append(f"tests/{entry.package}/mutants.diff: mark two mutants with `sample: yes`")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.module", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("new", "missing"))
    parser.add_argument("number", type=int, help="the number of the module")
    parser.add_argument("name", nargs="?", default="", help="for `new`: the name of its file, such as lockstep")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        if options.action == "new":
            write_module(options.number, options.name)
            return 0
        missing = list_missing(get_module(options.number))
    except CourseError as error:
        print(f"module: {error}", file=sys.stderr)
        return 2
    print("\n".join([f"Module {options.number} lacks:", *missing]) if missing else "Nothing is missing.")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
