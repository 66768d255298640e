"""Torch's own tests of its wrappers pass on ours, or ours refuse them with a sentence, as `torch_lists.py` says.

pytest tests/situations/test_torch_suite.py --everything -k m05     all tests on one wrapper
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hang_guard import HANG_S

from brigade.course.table.submission import read
from brigade.ranks.runner.ranks import run_calls
from brigade.ranks.texts import PACKAGE
from situations import torch_lists as lists
from situations.run import WORLD
from situations.torch_fsdp import run_fsdp_test
from situations.torch_suite import SUITE, run_torch_test

RANKS = {"hierarchical": 4, "group_sum": 3}  # tests with one of these words need more than two


def find_file() -> Path:
    """Return torch's file of tests. Skip the test that calls this if torch has none."""
    spec = importlib.util.find_spec(SUITE.rpartition(".")[0])
    path = Path(spec.submodule_search_locations[0], "distributed_test.py") if spec else Path("missing")
    if not path.exists():
        pytest.skip("this torch has no file of tests")
    return path


def list_sources() -> dict[str, str]:
    """Return the source of each method of torch's class of tests by its name."""
    text = find_file().read_text()
    lines, sources = text.splitlines(), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase":
            functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            sources = {part.name: "\n".join(lines[part.lineno - 1 : part.end_lineno]) for part in functions}
    return sources


def list_tests() -> set[str]:
    """Return the names of torch's tests that use DistributedDataParallel, directly or in a helper of a helper."""
    sources = list_sources()
    using = {name for name, source in sources.items() if "DistributedDataParallel(" in source or "DDP(" in source}
    for _ in range(2):
        helpers = {f"self.{name}(" for name in using if not name.startswith("test_")}
        using |= {name for name, source in sources.items() if any(helper in source for helper in helpers)}
    return {name for name in using if name.startswith("test_")}


def find_reason(name: str) -> str | None:
    """Return why a test applies to no wrapper, or None."""
    reasons = lists.NOT_APPLICABLE.items()
    return next((why for words, why in reasons if any(word in name for word in words.split())), None)


def find_faults(function: Any, names: list[Any], kind: str, sentences: dict[Any, str]) -> dict[Any, list[str]]:
    """Run tests with a wrapper. Return the messages of those that do not pass or, with a sentence, are not refused."""
    faults = {}
    for size in {count_ranks(name) for name in names}:
        of_size = [name for name in names if count_ranks(name) == size]
        calls = [(*name, kind) if isinstance(name, tuple) else (name, kind) for name in of_size]
        packages, deadline = {PACKAGE: read("solutions", 0 if kind == "m00" else 16)}, 4 * HANG_S
        results = run_calls(function, calls, world_size=size, packages=packages, mode="record", deadline=deadline)
        for name, messages in zip(of_size, results, strict=True):
            sentence = sentences.get(name)
            if any(messages) if sentence is None else not all(sentence in message for message in messages):
                faults[name] = list(messages)
    return faults


def count_ranks(name: Any) -> int:
    """Return the number of ranks on which a test runs."""
    return next((ranks for word, ranks in RANKS.items() if word in name), WORLD)


def test_every_test_has_a_verdict():
    """A test that torch adds is in no list. One that it removes may stay in them, because torch has versions."""
    applicable = lists.PASSED.keys() | lists.REFUSED.keys()
    unknown = {name for name in list_tests() if name not in applicable and not find_reason(name)}
    assert not unknown, "torch has new tests: run them with every wrapper, and put them into a list"
    assert not {name for name in applicable if find_reason(name)}, "these tests are in two lists"


def test_every_pair_has_a_verdict():
    for name in lists.PASSED.keys() | lists.REFUSED.keys():
        refused = lists.REFUSED.get(name, ("", ()))[1]
        assert not {*lists.PASSED.get(name, ())} & {*refused}, f"{name}: a wrapper cannot both pass and refuse a test"
        rest = {*lists.KINDS} - {*lists.PASSED.get(name, ())} - {*refused}
        assert name in lists.LEFT_OUT or rest <= lists.KINDS_LEFT_OUT.keys(), f"{name} on {sorted(rest)}: say why not"


def test_sixty_tests_pass_on_a_wrapper():
    """Each counts once, on however many wrappers it passes: DistributedDataParallel's, FSDP's, and collectives."""
    fsdp = len(lists.FSDP_MODELS) * len(lists.FSDP_STRATEGIES)
    assert len(list_tests() & lists.PASSED.keys()) + fsdp + len(lists.RING) >= 60


@pytest.mark.extended
@pytest.mark.parametrize("kind", lists.KINDS)
def test_torch_tests_pass_or_are_refused(kind):
    passed = [name for name in lists.PASSED if kind in lists.PASSED[name]]
    refused = {name: sentence for name, (sentence, kinds) in lists.REFUSED.items() if kind in kinds}
    names = [name for name in (*passed, *refused) if name in list_tests()]
    assert not find_faults(run_torch_test, names, kind, refused)


@pytest.mark.extended
@pytest.mark.parametrize("kind", dict.fromkeys(kind for kinds in lists.FSDP_STRATEGIES.values() for kind in kinds))
def test_torch_tests_of_fsdp_pass(kind):
    find_file()
    strategies = [strategy for strategy, kinds in lists.FSDP_STRATEGIES.items() if kind in kinds]
    names = [(model, strategy) for strategy in strategies for model in lists.FSDP_MODELS]
    assert not find_faults(run_fsdp_test, names, kind, {})


@pytest.mark.extended
def test_torch_tests_of_collectives_pass_with_module_0():
    names = [name for name in lists.RING if name in list_sources()]
    assert not find_faults(run_torch_test, names, "m00", {})
