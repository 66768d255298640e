"""Programs that users of other libraries had trouble with are right on every wrapper, or refused with a sentence.

    pytest tests/situations                               every situation, on some of the wrappers in turn
    pytest tests/situations --everything                  every situation on every wrapper
    pytest tests/situations --everything -k m05           every situation on one wrapper
    pytest tests/situations --everything --situation lstm one situation on every wrapper

README.md says how to add one.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from typing import Any

import pytest
import torch
from hang_guard import HANG_S

from brigade.course.table.modules import ROOT, get_module
from brigade.course.table.submission import read
from brigade.ranks.runner.ranks import RankFailure, run_calls
from brigade.ranks.texts import PACKAGE
from situations.kinds import KINDS, Kind
from situations.ranks import add_ones, clip_with_torch, execute, run_situation
from situations.run import SITUATIONS, WORLD, Run, Situation
from solutions.m11_fully_sharded.checkpoint import require_one_group

SHARE = 8  # without --everything, a situation runs on each eighth kind that it applies to
REFUSALS = ("RuntimeError", "ValueError", "TypeError", "NotImplementedError")


def select(kind: Kind, everything: bool) -> list[str]:
    """Return the names of the situations that run on a kind."""
    selected = []
    for number, (name, entry) in enumerate(SITUATIONS.items()):
        if entry.imports_compiler and not everything:
            continue
        kinds = [other for other in KINDS if entry.applies_to(other)]
        if kind in kinds and (everything or (number + kinds.index(kind)) % SHARE == 0):
            selected.append(name)
    return selected


def run_on(kind: Kind, names: list[str]) -> list[list[dict[str, Any]] | RankFailure]:
    """Run situations on the same ranks. If a rank dies or hangs, find out in which situation."""
    if not names:
        return []
    try:
        calls = [(name, kind.name) for name in names]
        packages = {PACKAGE: read("solutions", kind.module)}
        return list(
            run_calls(run_situation, calls, world_size=WORLD, packages=packages, mode="strict", deadline=HANG_S)
        )
    except RankFailure as failure:
        if len(names) == 1:
            return [failure]
        half = len(names) // 2
        return run_on(kind, names[:half]) + run_on(kind, names[half:])


@functools.cache
def compute_expected(name: str, kind: Kind) -> dict[str, Any]:
    """Return what one process computes. It depends on the kind only by its dtype and its default optimizer."""
    return execute(name, kind, None)


def find_fault(name: str, kind: Kind, results: list[dict[str, Any]] | RankFailure) -> str | None:
    """Return what is wrong with the results of a situation, or None."""
    entry = SITUATIONS[name]
    if isinstance(results, RankFailure):
        return str(results)
    if results[0]["refusals"]:
        return find_bad_refusal(entry, results)
    expected = compute_expected(name, kind)
    if "weights" not in expected:
        return f"one process raises {expected['error']}: {expected['message']}"
    tolerance = max(entry.tolerance, kind.tolerance)
    for rank, result in enumerate(results):
        weights = result["weights"]
        if weights.keys() != expected["weights"].keys():
            return f"rank {rank} has other parameters than one process"
        for parameter, right in expected["weights"].items():
            error = measure(weights[parameter], right)
            if not error <= tolerance:
                return f"rank {rank}: {parameter} is wrong by {error:.2g}; it may be by {tolerance:.2g}"
    return None


def find_bad_refusal(entry: Situation, results: list[dict[str, Any]]) -> str | None:
    """Return what is wrong with a refusal, or None if all ranks raise an exception with a stated sentence."""
    for rank, result in enumerate(results):
        if "error" not in result:
            return f"rank {rank} is not refused, but {WORLD - 1} others are"
        is_stated = any(sentence in result["message"] for sentence in entry.refused)
        if result["error"] not in REFUSALS or not is_stated:
            return f"rank {rank} raises {result['error']}: {result['message']}"
    return None


def measure(actual: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference, relative to the larger of 1 and the largest right value."""
    if actual.shape != right.shape or actual.dtype != right.dtype:
        return float("inf")
    wide = torch.complex128 if right.is_complex() else torch.float64
    if not right.numel():
        return 0.0
    return ((actual.to(wide) - right.to(wide)).abs().max() / right.to(wide).abs().max().clamp(min=1)).item()


@pytest.mark.parametrize(
    ("kind", "package"),  # make module MODULE=5 selects tests by the package
    [pytest.param(kind, get_module(kind.module).package, id=kind.name) for kind in KINDS],
)
def test_right_or_refused(kind, package, request):
    options = request.config.option
    names = select(kind, options.everything or options.situation or options.module)
    names = [name for name in names if options.situation in (None, name)]
    names.sort(key=lambda name: not SITUATIONS[name].imports_compiler)  # the compiler comes before the wrappers
    results = run_on(kind, names)
    faults = {name: find_fault(name, kind, result) for name, result in zip(names, results, strict=True)}
    faults = {name: fault for name, fault in faults.items() if fault}
    assert not faults, "\n" + "\n".join(f"{SITUATIONS[n].source}, {n}: {fault}" for n, fault in faults.items())


def test_micro_batches_add_up_in_the_parameters_dtype():
    """In bfloat16, 600 ones would be 256 (pytorch PR 125191)."""
    packages = {PACKAGE: read("solutions", 11)}
    [sums] = run_calls(add_ones, [(600,)], world_size=WORLD, packages=packages, deadline=HANG_S)
    assert list(sums) == [600.0] * WORLD


def test_torch_clips_nothing_where_the_model_has_no_gradients():
    """In module 10, and in 8 and 9 with a wider `grad_dtype`, only the course's own function clips."""
    wide, packages = {"grad_dtype": torch.float64}, {PACKAGE: read("solutions", 10)}
    calls: list[Any] = [("m08", wide), ("m09", wide), ("m10", {})]
    for norms in run_calls(clip_with_torch, calls, world_size=WORLD, packages=packages, deadline=HANG_S):
        assert norms == [(0.0, pytest.approx(20**0.5))] * WORLD


def test_module_11_saves_the_state_of_one_parameter_group():
    """It refuses several, whose options a plain optimizer's state would have lost (fairscale #601)."""
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "lr": 0.1}]
    with pytest.raises(ValueError, match="must be in one parameter group, but there are 2"):
        require_one_group(torch.optim.SGD(groups, lr=1.0))


def test_page_shows_the_programs():
    """docs/bugs.md shows programs as they are here, under their public numbers."""
    text = (ROOT / "docs" / "bugs.md").read_text()
    shown = re.findall(r"\n### \d+\. [^\n]* \(([^\n]+)\)\n\n```python\n(def (\w+)\(.*?)\n```\n", text, re.DOTALL)
    assert len(shown) == text.count("\n### ") >= 20
    for source, program, name in shown:
        entry = SITUATIONS[name]
        assert source == entry.source
        assert inspect.getsource(entry.program).endswith(f"{program}\n"), f"docs/bugs.md shows another {name}"
    loop = inspect.getsource(Run.train).partition('"""\n')[2]
    assert textwrap.dedent(loop).replace("self.", "run.") in text


def test_situations_are_well_formed():
    """There are 60 situations, each runs on most wrappers, and a program fits on a slide."""
    assert len(SITUATIONS) >= 60
    for name, entry in SITUATIONS.items():
        assert re.search(r"(#| PR )\d+$", entry.source), f"{name}: {entry.source} is no public number"
        assert sum(map(entry.applies_to, KINDS)) >= 5, f"{name} runs on few wrappers"
        assert entry.not_for.keys() <= {kind.name for kind in KINDS}
