"""The score of an entry: its planned step on three fixed problems, and whether real ranks do what is planned.

    rows = plan_rows([get_variant(get_module(8))], sources)      the steps, by label, in the order of `PROBLEMS`
    verify(get_variant(get_module(8)), sources)                  raises UserError if the plan cannot be trusted

A plan runs the entry's own code without memory and without peers. An entry could notice this and launch less than it
needs. So `verify` compares the plan of a small model with what real ranks record, instruction by instruction, and
`plan_rows` expects launches that can carry all gradients of each problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from brigade.lab.devices import CONTENTION, DEVICES
from brigade.lab.ladder import Variant
from brigade.lab.nccl import Network
from brigade.lab.plan import PlannedStep, make_machine, plan
from brigade.lab.program import Program, Setting, record
from brigade.lab.recorded_step import take_real_steps
from brigade.lab.shapes import MODELS, Shape
from brigade.ranks.errors import UserError
from brigade.ranks.events import Event
from brigade.ranks.runner.ranks import RankFailure, run_ranks
from brigade.ranks.texts import Sources

BUCKET_MB, TOKENS = 25.0, 4096  # MiB; tokens per rank and step
H100 = DEVICES["h100"]
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
VERIFY_S = 120.0  # the deadline of the real ranks, whose model has 9 thousand parameters
HEAD = ["| entry | exposed ms | step ms | MB sent | MB at the peak |", "|---|---|---|---|---|"]
SMALL = Setting(Shape(16, 24, 3, 2, 32, 32).make_groups(), world_size=2, bucket_mb=0.01)


@dataclass(frozen=True)
class Problem:
    """A training run to plan, in fp32 with AdamW on H100 GPUs."""

    name: str
    model: str
    world_size: int
    node_size: int | None
    network: Network


PROBLEMS = (
    Problem("one node of 8", "medium", 8, None, Network(H100.fabric, 8)),
    Problem("64 ranks in 8 nodes, a 400 Gbit/s card each", "xl", 64, 8, Network(H100.fabric, 8, 50.0, 8)),
    Problem("8 ranks, a 10 Gbit/s card each", "medium", 8, None, Network(H100.fabric, 1, 1.25, 1)),
)


def plan_rows(variants: Sequence[Variant], sources: Sources | None = None) -> dict[str, list[PlannedStep]]:
    """Return the planned step of each variant on each problem. Raise UserError if one cannot be planned."""
    rows: dict[str, list[PlannedStep]] = {variant.label: [] for variant in variants}
    for problem in PROBLEMS:
        shape = MODELS[problem.model]
        setting = Setting(shape.make_groups(), problem.world_size, BUCKET_MB, node_size=problem.node_size)
        rate = H100.get_utilisation("fp32").typical * H100.tflops["fp32"] * 1e12
        flops = shape.count_forward_flops(TOKENS, shape.context)
        machine = make_machine(flops, rate, H100.memory_gbps * 1e9, contention=CONTENTION)
        programs = record(variants, setting, sources)
        for label, program in programs.items():
            if isinstance(program, str):
                raise UserError(f"{label} has no score: {program}")
            require_gradients(label, program, 4 * setting.numel)
        for step in plan(programs, machine, problem.network):
            rows[step.label].append(step)
    return rows


def require_gradients(label: str, program: Program, nbytes: int) -> None:
    """Raise UserError if the launches of a step that somebody awaits cannot carry gradients of `nbytes` bytes."""
    reduced = sum(launch.nbytes for launch in program.launches if launch.op in REDUCTIONS)
    if reduced < nbytes:
        raise UserError(
            f"{label} has no score: its planned step reduces {reduced / 1e6:,.1f} MB and waits for them, but the "
            f"gradients have {nbytes / 1e6:,.1f} MB"
        )


def verify(variant: Variant, sources: Sources) -> None:
    """Raise UserError if real ranks do something else in a step of a small model than the plan says."""
    program = record([variant], SMALL, sources)[variant.label]
    if isinstance(program, str):
        raise UserError(f"{variant.label} has no score: {program}")
    how = {"world_size": SMALL.world_size, "packages": {"submission": sources}, "deadline": VERIFY_S, "seed": 0}
    try:
        results = run_ranks(take_real_steps, asdict(SMALL), asdict(variant), **how)
    except RankFailure as failure:
        raise UserError(f"{variant.label} has no score: {failure}") from None
    planned = number(one for one in program.instructions if one[0] not in ("copy", "step"))
    for place, (wanted, real) in enumerate(zip_longest(planned, number(list_real_instructions(results.events[0])))):
        if wanted != real:
            raise UserError(
                f"{variant.label} has no score: instruction {place} of its planned step is {describe(wanted)}, but "
                f"real ranks have {describe(real)}"
            )


def list_real_instructions(events: Sequence[Event]) -> list[list[Any]]:
    """Return the instructions of the last step, in the form of a plan, without copies and the optimizer's step."""
    instructions: list[list[Any]] = []
    waiting: set[int] = set()

    def is_pending(one: list[Any]) -> bool:
        return one[0] == "launch" and one[1] in waiting

    for event in events:
        if event["kind"] == "step":
            instructions = [one for one in instructions if is_pending(one)]
        elif event["kind"] == "launch":
            waiting.add(event["index"])
            ranks = event["ranks"]
            instructions.append(["launch", event["index"], event["op"], event["nbytes"], len(ranks), max(ranks)])
        elif event["kind"] == "wait" and event["index"] in waiting:
            waiting.discard(event["index"])
            instructions.append(["wait", event["index"]])
        elif event["kind"] == "layer":
            instructions.append(event["what"])
    return [one for one in instructions if not is_pending(one)]


def number(instructions: Any) -> list[list[Any]]:
    """Return instructions whose launches are numbered from 0, and without those that nobody awaits or launches."""
    numbers: dict[int, int] = {}
    result = []
    for kind, *values in instructions:
        if kind == "launch":
            numbers[values[0]] = len(numbers)
        if kind in ("launch", "wait"):
            values = [numbers.get(values[0], -1), *values[1:]]
        result.append([kind, *values])
    return result


def describe(instruction: list[Any] | None) -> str:
    """Return an instruction as text."""
    if instruction is None:
        return "nothing"
    kind, *values = instruction
    if kind == "launch":
        return f"{values[1]} #{values[0]} of {values[2]:,} B"
    return f"wait #{values[0]}" if kind == "wait" else f"the {kind} of parameter {values[0]}"


def format_rows(rows: dict[str, list[PlannedStep]]) -> list[str]:
    """Return Markdown tables, one for each problem: exposed ms, MB sent and MB at the peak, the fastest first."""
    lines = []
    for place, problem in enumerate(PROBLEMS):
        steps = sorted((steps[place] for steps in rows.values()), key=lambda step: (step.exposed_s, step.label))
        lines += [f"{problem.name}: {problem.model}", "", *HEAD, *map(format_row, steps), ""]
    return lines[:-1]


def format_row(step: PlannedStep) -> str:
    """Return a row of a table."""
    times = [f"{1e3 * seconds:.2f}" for seconds in (step.exposed_s, step.step_s)]
    sizes = [f"{nbytes / 1e6:.1f}" for nbytes in (step.sent_bytes, step.program.peak_bytes)]
    return f"| {' | '.join([step.label, *times, *sizes])} |"
