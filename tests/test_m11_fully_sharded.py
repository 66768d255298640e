"""Graded checks of module 11: weights that are gathered only while their unit computes."""

import itertools
from functools import partial

import pytest
import torch

from brigade.checks.edge_case_models import BORDERS
from brigade.checks.expectations import (
    MANY_STEPS,
    ONE_STEP,
    expect,
    expect_equal,
    explain_failures,
    format_distinct,
    join_names,
    list_steps,
    replace_cause,
)
from brigade.events import drop_flags, launches, list_ready_gradients, list_step_events, summarize
from brigade.runner.ranks import PerRank
from helpers.memory import average, draw_sample, expect_delivered, run_with_little_memory
from helpers.steps import expect_interface
from helpers.units import JOB, expect_none, expect_orders, expect_trained, run_each
from m11_fully_sharded import causes as diagnosis
from m11_fully_sharded import scenario as scenarios
from m11_fully_sharded.expected import find_units, join_shards, lay_out, train_mixed, train_plain
from m11_fully_sharded.scenario import UNIT_TYPES

NAMED_TREES = (
    ("layers", "Layer"),
    ("layers and more", "Layer"),
    ("a layer in a layer", "Layer"),
    ("a subclass", "Layer"),
    ("a subclass", "WideLayer"),
    ("names that begin alike", "Layer"),
)
TIED_TREES = ("tied across layers", "tied inside a layer", "tied to the root", "one layer twice")
DOUBLE = {"dtype": torch.float64}
LARGE, COUNT = 5 << 16, 16  # elements of each of so many units, whose weights have 40 MiB in float64


# ---- part (a): units


@pytest.mark.parts("Part (a): units")
@pytest.mark.points(2)
def test_units_are_the_outermost_submodules(submission):
    """plan_units makes each outermost submodule of the types a unit. All other parameters are in unit 0, the root."""
    expect_units(submission, NAMED_TREES)


@pytest.mark.points(1)
def test_tied_parameters_belong_to_the_root(submission):
    """A parameter with more than one name belongs to the root unit. A unit without parameters is omitted."""
    rng = submission.rng
    cases = [(tree, "Layer") for tree in (*TIED_TREES, "nothing but a tied weight")]
    types = ("Layer", "WideLayer", "Layer or Expert")
    expect_units(submission, cases + [(rng.randrange(10**6), rng.choice(types)) for _ in range(25)])


# ---- part (b): the schedule


@pytest.mark.parts("Part (b): the schedule")
@pytest.mark.points(2)
def test_forward_schedule(submission):
    """During forward, each unit is gathered once, as early as `prefetch` allows but no earlier."""
    for call, actions in plan_schedules(submission, backward=False):
        expect_order(call, actions, list(range(call[0])), list(range(call[0])))
        reduced = [unit for action, unit in actions if action == "reduce"]
        expect(not reduced, f"plan_schedule{call} reduces nothing", f"it reduces {name_units(reduced)}")


@pytest.mark.points(2)
def test_backward_schedule(submission):
    """Backward computes units in reverse order, reduces each before the next computes, and does not gather the root."""
    for call, actions in plan_schedules(submission, backward=True):
        order = list(reversed(range(call[0])))
        expect_order(call, actions, order, order[:-1])
        for unit in order:
            places = [place for place, action in enumerate(actions) if action == ("reduce", unit)]
            limit = actions.index(("compute", unit - 1)) if unit else len(actions)
            is_right = len(places) == 1 and actions.index(("compute", unit)) < places[0] < limit
            right = f"plan_schedule{call} reduces unit {unit} once, after it computes"
            right += f" and before unit {unit - 1} computes" if unit else ""
            why = partial(diagnosis.explain_reduce, actions, places)
            expect(is_right, right, f"it returned {actions}", why)


# ---- parts (c) to (e): a flat shard


@pytest.mark.parts("Parts (c) to (e): a flat shard")
@pytest.mark.points(2)
def test_each_rank_has_its_part(submission):
    """shards() returns 1-D parameters: for each unit and dtype, this rank's 1/N of the padded trainable parameters."""
    [world] = submission.worlds(3)
    kinds = {"Blocks": ("Block", torch.float64), "TiedBlocks": ("Block", None), "FrozenBlocks": ("Block", None)}
    kinds["Plain"] = ("Linear", None)
    cases = [submission.case(model, world, hidden_layers=3) for model in kinds]
    jobs = [case.make_jobs(unit_type=kinds[case.model][0], cast=kinds[case.model][1]) for case in cases]
    for case, results in zip(cases, run_each(submission, scenarios.construct, jobs)):
        units = lay_out(case, *kinds[case.model])
        expected = [(layout["numel"] // world, dtype) for unit in units for dtype, (layout, _) in unit.items()]
        for rank, result in enumerate(results):
            got, nbytes = [(x.numel(), x.dtype) for x in result["shards"]], sum(x.nbytes for x in result["shards"])
            right = f"shards() of {case.model} are 1-D, 1/{world} of each padded flat tensor: {name_sizes(expected)}"
            why = partial(diagnosis.explain_sizes, got, expected, case, *kinds[case.model])
            is_flat = all(shard.dim() == 1 for shard in result["shards"])
            expect(got == expected and is_flat, right, name_sizes(got), why, rank=rank)
            wrong = "one is a plain tensor, or has requires_grad=False"
            expect(all(result["trainable"]), "shards() are trainable nn.Parameters", wrong, rank=rank)
            right, wrong = f"shards() take {nbytes} bytes of memory", f"their storages take {result['kept']} bytes"
            expect(world == 1 or result["kept"] <= nbytes, right, wrong, diagnosis.KEPT_WHOLE, rank=rank)
            is_copied = result["storages"] == len(result["alive"]) > 1
            why = diagnosis.COPIED if is_copied else diagnosis.NEVER_FREED
            expect_none(result["alive"], "after construction full weights have no memory", why, rank=rank)
        values = join_shards([result["shards"] for result in results], units, case)
        expect_equal(
            f"the shards of all ranks, one after the other, are the weights of rank 0 ({case.model})",
            [values],
            {name: case.start()[name].to(value.dtype) for name, value in values.items()},
            hypotheses=partial(diagnosis.suspect_parts, case, units),
            tolerance=0.0,
        )


# ---- parts (f) to (n): the wrapper


@pytest.mark.parts("Parts (f) to (n): the wrapper")
@pytest.mark.points(1)
def test_shards_have_average_gradients(submission):
    """finish_grad_sync adds the averaged gradients to the gradients of the shards, and clears p.grad."""
    for world, counts in zip(submission.worlds(3, 1), ((1, 2), (2,))):
        cases = [submission.case("Blocks", world, **DOUBLE, hidden_layers=4, micro_batches=n) for n in counts]
        jobs = [case.make_jobs(**JOB, finish_each=True) for case in cases]
        for finishes, case, results in zip(counts, cases, run_each(submission, scenarios.train, jobs)):
            expect_averages(results, case, finishes)


@pytest.mark.points(2)
def test_parameters_stay_views(submission):
    """A unit's parameters are views of one flat tensor. Freeing and gathering resize its storage, never replace it."""
    [world] = submission.worlds(2)
    case = submission.case("Blocks", world, hidden_layers=3)
    [results] = run_each(submission, scenarios.describe_views, [case.make_jobs(**JOB)])
    for rank, result in enumerate(results):
        right = "when all units are gathered and freed again, every parameter keeps its storage"
        expect_none(result["moved"], right, diagnosis.REPLACED, "got another storage", rank=rank)
        for number, unit in enumerate(lay_out(case)):
            for layout, names in unit.values():
                storages, starts = zip(*(result["views"][name] for name in names))
                expected, count = tuple(start for start, _ in layout["param_ranges"]), len(set(storages))
                right = f"the parameters of unit {number} are views of one flat tensor, at elements "
                wrong = f"at elements {join_names(starts)} of {count} storages"
                why = diagnosis.COPIED if count == len(names) > 1 else diagnosis.OTHER_LAYOUT
                expect(starts == expected and count == 1, right + join_names(expected), wrong, why, rank=rank)
        right = "after full_state_dict full weights have no memory"
        expect_none(result["alive"], right, diagnosis.NEVER_FREED, rank=rank)
    gathered = [result["gathered"] for result in results]
    expect_equal("gathered weights are those of rank 0", gathered, case.start(), tolerance=0.0)


@pytest.mark.points(2)
def test_weights_equal_plain_training(submission):
    """After 5 or 20 steps on 1 to 4 ranks, weights equal plain training's, even with tied weights and sub-groups."""
    groups = [[1, 3], [0, 2]]
    for world, model, options, more in zip(
        submission.worlds(1, 2, 3, 4),
        ("Blocks", "TiedBlocks", "Plain", "Blocks"),
        ({}, {"optimizer": "adam"}, {}, {"group": groups[0]}),
        (
            {"arguments": {"prefetch": 1}},
            {"arguments": {"prefetch": 0}},
            {"arguments": {"prefetch": 2}, "unit_type": "Linear"},
            {"arguments": {"reshard_after_forward": False}, "groups": groups},
        ),
    ):
        steps = 20 if world == 2 else 5
        case = submission.case(model, world, steps=steps, **DOUBLE, hidden_layers=3, **options)
        [results] = run_each(submission, scenarios.train, [case.make_jobs(**JOB | more)])
        own, unit_type = [results[rank] for rank in case.group], more.get("unit_type", "Block")
        expect_shapes(own, case, unit_type)
        expect_plain(own, case, f"weights after {steps} steps of {case.optimizer} ({model})", unit_type=unit_type)
        expect_interface(results, case)


@pytest.mark.points(3)
def test_weights_are_freed(submission):
    """Even in evaluations, at most the root, the current unit and `prefetch` more have full weights. None is a copy."""
    [world] = submission.worlds(2)
    prefetches = (1, 2, 0)
    layers = (12, 5, 5)  # full gradients of 11 blocks take more than the bound allows, whatever their sizes
    cases = [submission.case("Blocks", world, steps=2, **DOUBLE, hidden_layers=n) for n in layers]
    jobs = [
        case.make_jobs(**JOB, arguments={"prefetch": prefetch}, forward="checkpointed" if prefetch == 0 else "")
        for prefetch, case in zip(prefetches, cases)
    ]
    for prefetch, case, results in zip(prefetches, cases, run_each(submission, scenarios.measure, jobs)):
        for rank, result in enumerate(results):
            expect_none(result["after"], ALL_FREED, diagnosis.ROOT_STAYS, rank=rank)
        unit_of = expect_little_memory(results, case, prefetch, itemsize=8)
        for rank, result in enumerate(results):
            unsynced = sorted({unit_of[name] for name in result["unsynced"]} - {0})
            right = f"after a backward in no_sync, at most the root and {prefetch + 1} units have memory"
            wrong = f"{name_units(unsynced)} have memory"
            expect(len(unsynced) <= prefetch + 1, right, wrong, diagnosis.KEPT_IN_NO_SYNC, rank=rank)
    start = submission.rng.randrange(1 << 40)
    arguments = {"prefetch": 1, "compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    job = {"start": start, "count": COUNT, "numel": LARGE, "unit_type": "Layer", "arguments": arguments}
    if run := run_with_little_memory(submission, scenarios.train_large, job, mib=46, world=2):
        results, seeds = run
        at = [draw_sample(submission.rng, LARGE) for _ in range(COUNT)]
        weights = [average([start], i, LARGE, own, torch.float32) for i, own in enumerate(at)]
        expect_delivered(results, 0, torch.cat(weights), "all weights")
        gradients = [average(seeds, i, LARGE, own) for i, own in enumerate(at)]
        expect_delivered(results, 0, len(results) * torch.cat(gradients), "the averages of all gradients")


@pytest.mark.points(2)
@pytest.mark.needs("test_backward_schedule")
def test_gathers_and_reductions_overlap(submission):
    """A rank waits for a gather only when it needs the unit, and for a reduction only after the next unit computes."""
    [world] = submission.worlds(2)
    prefetches = (1, 2, 0)
    more = DOUBLE | {"hidden_layers": 5, "forward_borders": True}
    cases = [submission.case("Blocks", world, steps=2, **more) for _ in prefetches]
    jobs = [
        case.make_jobs(**JOB, arguments={"prefetch": p}, proven=1, reports=True) for p, case in zip(prefetches, cases)
    ]
    for prefetch, case, results in zip(prefetches, cases, run_each(submission, scenarios.train, jobs)):
        units = find_units(case.build(), UNIT_TYPES["Block"])
        for at, events, launched in list_steps(results.events, 2):
            expect_overlap(events, launched, units, prefetch, at)
        for rank, result in enumerate(results):
            expect_reports(result["reports"], case, rank, units)


@pytest.mark.points(1)
@pytest.mark.needs("test_backward_schedule")
def test_volume(submission):
    """A step gathers the root once and other units twice (once without resharding), and reduces every unit once.

    Activation checkpointing changes nothing.
    """
    [world] = submission.worlds(3)
    options = ((True, ""), (False, ""), (True, "checkpointed"))
    cases = [submission.case("Blocks", world, steps=2, **DOUBLE, hidden_layers=4) for _ in options]
    jobs = [
        case.make_jobs(**JOB, arguments={"reshard_after_forward": reshard}, forward=forward)
        for (reshard, forward), case in zip(options, cases)
    ]
    for (reshard, forward), case, results in zip(options, cases, run_each(submission, scenarios.train, jobs)):
        for at, _, launched in list_steps(results.events, 2):
            expect_volume(launched, case, at, 1 + reshard)
        expect_plain(results, case, "weights after 2 steps" + f" with {forward} blocks" * bool(forward))


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_accumulation(submission):
    """Inside no_sync, full gradients stay in p.grad and are not reduced. Weights are still gathered and freed."""
    micro, crossed = 3, 2
    [world] = submission.worlds(2)
    case = submission.case("TiedBlocks", world, steps=3, micro_batches=micro, **DOUBLE, hidden_layers=4)
    jobs = case.make_jobs(**JOB, zero="ddp", drop=True, interrupted=1, crossed=crossed)
    [results] = run_each(submission, scenarios.train, [jobs])
    names = [name for name, p in case.parameters().items() if p.requires_grad]
    for at, events, launched in list_steps(results.events, 3):
        accumulated = results[at["rank"]]["accumulated"][at["step"]]
        right = "after a backward in no_sync, every parameter has its full gradient in p.grad"
        right += " (forward ran outside no_sync)" * (at["step"] == crossed)
        wrong = f"{len(accumulated)} of {len(names)} parameters have one"
        why = partial(diagnosis.explain_accumulated, events, at["step"], crossed)
        expect(accumulated == names, right, wrong, why, **at)
        if at["step"]:
            expect_volume(launched, case, at, 2, micro)
    expect_plain(results, case, f"weights after 3 steps of {micro} micro-batches")


@pytest.mark.points(1)
def test_clipping(submission):
    """clip_grad_norm_ returns the norm of all gradients, and multiplies every shard's gradient by the same factor."""
    [world] = submission.worlds(3)
    groups = [[1, 2], [0]] if world == 3 else [list(range(world))]
    case = submission.case("TiedBlocks", world, steps=4, **DOUBLE, hidden_layers=3, group=groups[0])
    limit = sorted(train_plain(case, max_norm=float("inf"))[1])[2]  # this clips about half of the steps
    mixed = submission.case("MixedDtypes", world, hidden_layers=3, group=groups[0])
    half = train_plain(mixed, max_norm=float("inf"))[1][0] / 2
    jobs = [
        case.make_jobs(**JOB, clip=limit, groups=groups),
        mixed.make_jobs(unit_type="Linear", clip=half, groups=groups),
    ]
    results, mixed_results = run_each(submission, scenarios.train, jobs)
    weights, norms, _ = train_plain(case, max_norm=limit)
    own = [results[rank] for rank in case.group]
    expect_nothing_whole(own, case)
    expect_all_shards(own, results.events, case)
    for rank, result in zip(case.group, own):
        got, dtype = result["norms"][0]
        rounding = MANY_STEPS if dtype == torch.float64 else 1e-5
        wanted_text, got_text = format_distinct(norms[0], got)
        right = f"clip_grad_norm_ returns the norm of all gradients, {wanted_text}"
        gradients = [result["gradients"][0] for result in results]
        why = partial(diagnosis.explain_norm, gradients, case.group, got, results.events)
        expect(abs(got - norms[0]) <= rounding * norms[0], right, f"it returned {got_text}", why, rank=rank)
    what = f"weights after 4 steps with gradients clipped to the norm {limit:.4g}"
    # torch adds 1e-6 to the norm. It is right to add it or not, and to round the factor to float32.
    suspects = partial(diagnosis.suspect_clipping, case, limit)
    more = {"tolerance": 1e-5, "otherwise": diagnosis.NOT_SCALED, "hypotheses": suspects}
    expect_plain(own, case, what, weights, **more)
    own = [mixed_results[rank] for rank in mixed.group]
    expect_all_shards(own, mixed_results.events, mixed, "Linear")
    expect_scaled(own, mixed, half)


@pytest.mark.points(1)
def test_checkpoints(submission):
    """full_state_dict equals the plain module's state dict. The plain module and any number of ranks can load it.

    The same holds for full_optimizer_state_dict, which the skeleton contains.
    """
    first, *others = submission.worlds(2, 3, 1)
    half, unit_types = 2, {"Buffers": "Linear", "TiedBlocks": "Block", "FrozenBlocks": "Block"}
    common = DOUBLE | {"steps": 2 * half, "hidden_layers": 3, "optimizer": "adam"}
    cases = [submission.case(model, 3, **common) for model in unit_types]
    jobs = [select_jobs(case, first, slice(half), unit_type=unit_types[case.model]) for case in cases]
    stored = []
    for case, saved in zip(cases, run_each(submission, scenarios.train, jobs)):
        plain = case.build()
        for rank, result in enumerate(saved):
            expect_state_dict(result["weights"], plain.state_dict(), rank)
        weights, _, optimizer = train_plain(case, range(half), range(first))
        what, unit_type = f"the state dict after {half} steps", unit_types[case.model]
        expect_plain(saved, case, what, weights, unit_type=unit_type)
        expect_optimizer_state([result["optimizer"] for result in saved if result["optimizer"]], optimizer)
        is_shared = any(result["is shared"] for result in saved)
        right = "in full_optimizer_state_dict, no two parameters share a tensor such as `step`"
        wrong = "some do, so a plain optimizer that loads it counts a step several times"
        expect(not is_shared, right, wrong)
        plain.load_state_dict(saved[0]["weights"])
        stored.append((case, plain, saved[0]["weights"], saved[0]["optimizer"], optimizer))
    for world, is_plain, (case, plain, state, own, optimizer) in zip(others, (False, True), stored[1:]):
        start = {name: p.detach().clone() for name, p in plain.named_parameters()}
        what = f"weights after {world} ranks load a state dict of {first} ranks and take {half} steps"
        load = (state, optimizer if own and is_plain else own)
        jobs = select_jobs(case, world, slice(half, None), **JOB, load=load)
        [results] = run_each(submission, scenarios.train, [jobs])
        resumed, *_ = train_plain(case, range(half, 2 * half), range(world), start=start, state=own and optimizer)
        expect_trained(results, case, what, resumed, otherwise=diagnosis.NOT_OWN_PART if world > 1 else "")


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_frozen_parameters(submission):
    """Frozen parameters, even whole frozen units, are gathered but never reduced or updated."""
    [world] = submission.worlds(3)
    case = submission.case("FrozenBlocks", world, steps=4, **DOUBLE, hidden_layers=4)
    [results] = run_each(submission, scenarios.train, [case.make_jobs(**JOB, reports=True)])
    expect_shapes(results, case)
    trainable = sorted(layout["numel"] for unit in lay_out(case) for layout, _ in unit.values())
    right = f"only trainable parameters are reduced, in flat tensors of {join_names(trainable)} elements"
    for at, _, launched in list_steps(results.events, 1):
        reduced = sorted(x.numel for x in launched if x.op == "reduce_scatter")
        why = partial(diagnosis.explain_reduced, reduced, case)
        expect(reduced == trainable, right, f"reduce-scatters of {join_names(reduced)} elements", why, **at)
    for rank, result in enumerate(results):
        expect_reports(result["reports"], case, rank)
    expect_plain(results, case, "weights after 4 steps with frozen parameters")


@pytest.mark.points(1)
def test_skipped_units(submission):
    """A rank that skips a unit still joins its gathers and reductions. A missing gradient counts as zero."""
    [world] = submission.worlds(3)
    common = DOUBLE | {"steps": 2, "hidden_layers": 5}
    cases = [
        submission.case("Blocks", world, **common, branches=[0b0011, 0b1010, 0b0001][:world], micro_batches=2),
        submission.case("Blocks", world, **common, branches=[0b1111, 0b0110, 0b1100][:world]),
    ]
    jobs = [case.make_jobs(**JOB, arguments={"prefetch": number}) for number, case in enumerate(cases)]
    all_results = run_each(submission, scenarios.train, jobs)
    for case, results in zip(cases, all_results):
        expect_all_shards(results, results.events, case)
        expect_plain(results, case, "weights after 2 steps in which each rank skips different blocks")
    for rank, events in [pair for results in all_results for pair in enumerate(results.events)]:
        forgotten = [x for x in launches(events) if x.step is not None and not x.waits]
        right = "a rank waits for every gather and reduction, also for those of a unit that it skips"
        wrong = f"it never waits for {len(forgotten)} of {len(launches(events))} launches"
        is_gather = {x.op for x in forgotten} == {"all_gather"}
        expect(not forgotten, right, wrong, diagnosis.FREED_IN_FLIGHT if is_gather else "", rank=rank)


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_unusual_orders(submission):
    """An evaluation changes nothing at any place of a step. Discarded forwards and more backwards work or are refused.

    Refused means a RuntimeError. If all backward passes of a step are in no_sync, the finish reduces their gradients.
    """
    [world] = submission.worlds(2)
    between = [order for order in scenarios.EXTRA if order[1] == scenarios.PLACES[1]]
    orders = [(order, True) for order in scenarios.ORDERS] + [(order, False) for order in between]
    options = [
        {
            "arguments": {"reshard_after_forward": reshard, "prefetch": number % 3},
            "forward": "checkpointed" if number % 2 else "",
        }
        for number, (_, reshard) in enumerate(orders)
    ]
    expect_orders(submission, world, [order for order, _ in orders], options)


# ---- part (o): mixed precision


MIXED = {  # the number of ranks: pairs of compute_dtype and reduce_dtype
    2: [(torch.bfloat16, torch.bfloat16)],  # the sum of three numbers in bfloat16 depends on their order
    3: [(torch.bfloat16, None), (None, torch.float64), (torch.float64, None)],  # with 2, a division is exact
}


@pytest.mark.parts("Part (o): mixed precision")
@pytest.mark.points(3)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_mixed_precision(submission):
    """Weights travel in compute_dtype, gradients in reduce_dtype, and shards are never rounded.

    Weights and gradients equal those of one process that rounds at the same places.
    """
    common = {"steps": 2, "micro_batches": 2, "hidden_layers": 4, "dtype": torch.float32}
    outcomes = []
    for world, mixed in zip(submission.worlds(*MIXED), MIXED.values()):
        cases = [submission.case("FrozenBlocks", world, **common) for _ in mixed]
        options = [{"arguments": {"compute_dtype": compute, "reduce_dtype": reduce}} for compute, reduce in mixed]
        jobs = [case.make_jobs(**JOB, forward="scaled", finish_each=True, **more) for case, more in zip(cases, options)]
        outcomes += zip(cases, mixed, run_each(submission, scenarios.train, jobs))
    for case, dtypes, results in outcomes:
        compute, reduce = (dtype or torch.float32 for dtype in dtypes)
        what = "(compute_dtype={}, reduce_dtype={})".format(*dtypes)
        expect_dtypes(results, compute, reduce, what)
        expect_shapes(results, case)
        for rank, result in enumerate(results):
            kept = name_dtypes(result["gradients"][0])
            right = f"the gradients of shards are float32, as the parameters were {what}"
            expect(kept == "float32", right, kept, diagnosis.NARROW_SHARDS, rank=rank)
            sums = torch.cat(result["gradients"][0])
            is_narrow = reduce == torch.bfloat16 and sums.equal(sums.to(reduce).float())
            right = f"the averages of two finishes are added in float32 {what}"
            wrong = "every sum has a value that bfloat16 can represent"
            why = partial(diagnosis.explain_narrow, results, case, compute, reduce)
            expect(not is_narrow, right, wrong, why, rank=rank)
        weights, first = train_mixed(case, compute, reduce)
        exact = 2e-5 if results[0]["device"] == "cpu" else 2**-5  # a GPU rounds in other places
        suspects = [partial(diagnosis.suspect_casts, case, compute, reduce, which) for which in (0, 1)]
        with replace_cause(partial(diagnosis.explain_garbage, results.events)):
            expect_equal(
                f"gradients of the shards after two backward passes and finishes {what}",
                [join_shards([result["gradients"][0] for result in results], lay_out(case), case)],
                first,
                hypotheses=suspects[1],
                tolerance=exact if reduce != torch.bfloat16 else max(exact, 2**-7),
            )
        tolerance = exact if reduce != torch.bfloat16 else max(exact, 1e-3)
        weights |= {"scale": results[0]["weights"]["scale"]}
        expect_plain(
            results, case, f"weights after 2 steps {what}", weights, tolerance=tolerance, hypotheses=suspects[0]
        )


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_mixed_precision_memory(submission):
    """Full weights have only the memory of compute_dtype: no copy of a unit in another dtype is alive in forward."""
    [world] = submission.worlds(2)
    case = submission.case("Blocks", world, steps=2, dtype=torch.float32, hidden_layers=5)
    jobs = case.make_jobs(**JOB, arguments={"prefetch": 0, "compute_dtype": torch.bfloat16})
    [results] = run_each(submission, scenarios.measure, [jobs])
    expect_little_memory(results, case, prefetch=0, itemsize=2, directions=("forward",))


# ---- helpers

ALL_FREED = "after finish_grad_sync, the full weights of every unit are freed"


def expect_dtypes(results, compute, reduce, what):
    """Expect gathers in one dtype, those of frozen weights too, and reductions in another."""
    for at, _, launched in list_steps(results.events, 2):
        for launch in launched:
            is_gather = launch.op == "all_gather"
            dtype = str(compute if is_gather else reduce).removeprefix("torch.")
            right = f"{'weights are gathered' if is_gather else 'gradients are reduced'} in {dtype} {what}"
            wrong = f"{launch.op} of {launch.numel} {launch.dtype}, at {launch.line}"
            is_narrow = not is_gather and str(compute) == f"torch.{launch.dtype}"
            expect(launch.dtype == dtype, right, wrong, diagnosis.REDUCED_NARROW if is_narrow else "", **at)


def select_jobs(case, world, steps, **more):
    """Return the jobs of the first `world` ranks for a slice of the case's steps."""
    return PerRank(job | {"batches": job["batches"][steps]} for job in case.make_jobs(**more)[:world])


def expect_units(submission, cases):
    """Expect plan_units to return the units of these trees. The order of the names in a unit is free."""
    [answers] = submission.run(scenarios.plan_units, cases, world_size=1)
    for (tree, types), answer in zip(cases, answers):
        model, unit_types = scenarios.make_tree(tree), UNIT_TYPES[types]
        expected = find_units(model, unit_types)
        names = join_names([unit_type.__name__ for unit_type in unit_types])
        is_right = [sorted(unit) for unit in answer] == [sorted(unit) for unit in expected]
        right = f"for {describe_tree(model)}, the units of type {names} are {expected}"
        why = partial(diagnosis.explain_units, model, unit_types, answer, expected)
        expect(is_right, right, f"{answer}", why)


def describe_tree(module):
    """Return a short description of a tree: the types of its submodules that have types of units."""
    types = (scenarios.Layer, scenarios.WideLayer, scenarios.Expert)
    named = module.named_modules(remove_duplicate=False)
    return (
        f"a module with {join_names([f'{name} = {type(one).__name__}' for name, one in named if type(one) in types])}"
    )


def plan_schedules(submission, backward):
    """Return pairs of arguments, (num_units, prefetch, backward), and the actions that plan_schedule returns."""
    cases = [(units, prefetch, backward) for units in range(1, 7) for prefetch in range(units + 2)]
    cases.append((submission.rng.randint(20, 40), submission.rng.randint(3, 9), backward))
    [answers] = submission.run(scenarios.plan_schedules, cases, world_size=1)
    return [(case, [tuple(action) for action in actions]) for case, actions in zip(cases, answers)]


def expect_order(call, actions, computed, gathered):
    """Expect a schedule to compute and gather these units in this order, each as early as `prefetch` allows."""
    _, prefetch, backward = call
    for action, expected in (("compute", computed), ("gather", gathered)):
        got = [unit for kind, unit in actions if kind == action]
        right = f"plan_schedule{call} {action}s {name_units(expected)}" + ", in this order" * (len(expected) > 1)
        wrong = f"it {action}s {name_units(got)}. It returned {actions}"
        expect(got == expected, right, wrong, partial(diagnosis.explain_order, action, got, expected, backward))
    for position, unit in enumerate(computed):
        before = [u for kind, u in actions[: actions.index(("compute", unit))] if kind == "gather"]
        allowed = [u for u in computed[: position + prefetch + 1] if u in gathered]
        right = f"when unit {unit} computes, plan_schedule{call} has gathered {name_units(allowed)}"
        wrong = f"it has gathered {name_units(before)}. It returned {actions}"
        expect(before == allowed, right, wrong, diagnosis.TOO_FAR if len(before) > len(allowed) else diagnosis.TOO_FEW)


def name_units(units):
    """Return text such as "no unit", "unit 0" or "units 0 and 1"."""
    return f"unit{'s' * (len(units) > 1)} {join_names(units, 50)}" if units else "no unit"


def name_sizes(sizes):
    return join_names([f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes], 12)


def name_dtypes(tensors):
    return join_names(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def expect_nothing_whole(results, case, unit_type="Block"):
    """Expect no full weights or gradients after each finish_grad_sync."""
    right = "after finish_grad_sync p.grad is None for every parameter of the model"
    for rank, result in enumerate(results):
        for step, (alive, whole) in enumerate(zip(result["alive"], result["whole"])):
            cause = partial(diagnosis.explain_stays, alive, case, unit_type)
            expect_none(alive, ALL_FREED, cause, rank=rank, step=step)
            cause = partial(diagnosis.explain_whole, whole, case, unit_type)
            expect_none(whole, right, cause, "have a gradient", rank=rank, step=step)


def expect_plain(results, case, what, weights=None, *, unit_type="Block", **options):
    """Expect these weights, by default those of plain training, and nothing whole after a finish."""
    expect_nothing_whole(results, case, unit_type)
    expect_trained(results, case, what, weights, **options)


def expect_shapes(results, case, unit_type="Block"):
    """Expect each rank to have 1/N of every unit's padded trainable parameters."""
    size = len(case.group)
    expected = [layout["numel"] // size for unit in lay_out(case, unit_type) for layout, _ in unit.values()]
    right = f"each of {size} ranks trains shards of {join_names(expected)} elements"
    for rank, result in zip(case.group, results):
        expect(result["numels"] == expected, right, f"shards of {join_names(result['numels'])} elements", rank=rank)


def expect_all_shards(results, events, case, unit_type="Block", finishes=1):
    """Expect every shard to have a gradient after each step, which calls finish_grad_sync `finishes` times."""
    names = [names for unit in lay_out(case, unit_type) for _, names in unit.values()]
    right = "after finish_grad_sync every shard has a gradient, which is zero for weights that no rank used"
    for rank, result in zip(case.group, results):
        for step, missing in enumerate(result["missing"]):
            wrong = f"shard.grad is None for {len(missing)} of {len(names)} shards. The first of them is the shard of "
            wrong += join_names(names[missing[0]]) if missing else ""
            why = partial(diagnosis.explain_missing, launches(events[rank], step), len(names) * finishes)
            expect(not missing, right, wrong, why, rank=rank, step=step)


def expect_averages(results, case, finishes):
    """Expect averaged gradients in all shards after one step, which calls finish_grad_sync `finishes` times."""
    expect_nothing_whole(results, case)
    expect_shapes(results, case)
    expect_all_shards(results, results.events, case, finishes=finishes)
    more = ", and those of a second backward and finish are added" * (finishes > 1)
    with explain_failures([], partial(diagnosis.explain_unawaited, results.events)):
        expect_equal(
            f"after finish_grad_sync the shards have the average of the gradients{more}",
            [join_shards([result["gradients"][0] for result in results], lay_out(case), case)],
            case.gradients(),
            hypotheses=partial(diagnosis.suspect_gradients, case, results.events[0]),
            scale=case.largest_entries(),
            tolerance=ONE_STEP,
        )


def expect_scaled(results, case, limit):
    """Expect clip_grad_norm_(limit) to return the norm over all dtypes, and to scale the gradients of every dtype.

    bfloat16 has 8 significant bits. The norm, the factor and the gradients may be rounded to it.
    """
    gradients = [[grad.double() for grad in result["gradients"][0]] for result in results]
    norm = sum(float(grad.square().sum()) for grads in gradients for grad in grads) ** 0.5
    for rank, grads, result in zip(case.group, gradients, results):
        got, pairs = result["norms"][0][0], list(zip(grads, result["clipped"][0]))
        right = f"clip_grad_norm_ returns the norm of the gradients of all dtypes, {norm:.4g}"
        expect(abs(got - norm) <= 2**-6 * norm, right, f"it returned {got:.4g}", rank=rank)
        wrong = [new for old, new in pairs if not (old * limit / norm - new).abs().max() <= 2**-6 * old.abs().max()]
        right = f"clip_grad_norm_ multiplies the gradients of shards of all dtypes by {limit / norm:.4g}"
        got = f"those of {name_dtypes(wrong)} are not multiplied by it"
        expect(not wrong, right, got, diagnosis.NOT_SCALED, rank=rank)


def expect_little_memory(results, case, prefetch, itemsize, directions=("forward", "backward")):
    """Expect bounded memory at each boundary of `measure` in these directions. Return the units of parameters.

    Construction may leave memory for one more set of shards, but no copy of the weights.
    """
    units = find_units(case.build(), UNIT_TYPES["Block"])
    unit_of = {name: unit for unit, names in enumerate(units) for name in names}
    whole = [sum(layout["numel"] * itemsize for layout, _ in unit.values()) for unit in lay_out(case)]
    total = sum(p.nbytes for p in case.build().parameters())
    for rank, result in enumerate(results):
        right = f"besides shards() and the parameters, construction leaves at most {total * 3 // 4} bytes in memory"
        wrong = f"{result['held']} bytes, and all weights have {total}"
        expect(result["held"] <= total * 3 // 4, right, wrong, diagnosis.COPIES, rank=rank)
        causes = diagnosis.suspect_copies(result)
        for entry, alone in zip(result["boundaries"], itertools.cycle(result["bare"])):
            if entry["direction"] in directions:
                expect_bounded(entry, alone, unit_of, whole, prefetch, causes, rank)
    return unit_of


def expect_bounded(entry, alone, unit_of, whole, prefetch, causes, rank):
    """Expect a boundary to have no more full weights and gradients than allowed. `alone` is the bare model's.

    `causes` says, for forward and backward, why there are copies.
    """
    name, direction = entry["name"], entry["direction"]
    is_backward = direction == "backward"
    unit = unit_of[name] if is_backward else unit_of.get(f"{name}.weight", 0)
    alive = sorted({unit_of[parameter] for parameter in entry["alive"]} - {0})
    window = range(unit - prefetch, unit + 1) if is_backward else range(unit, unit + prefetch + 1)
    where = f"in {direction}, at {name} in {f'unit {unit}' if unit else 'the root'},"
    where += entry["kind"] and f" {entry['kind']},"
    more = f"{prefetch + 1} other unit{'s' * (prefetch > 0)}"
    allowed = name_units([u for u in window if 0 < u < len(whole)]) if unit else more
    fits = set(alive) <= set(window) if unit else len(alive) <= prefetch + 1
    right = f"{where} at most the root and {allowed} have memory (prefetch={prefetch})"
    wrong = f"{name_units(alive)} {'have' if len(alive) > 1 else 'has'} memory"
    expect(fits, right, wrong, partial(diagnosis.explain_alive, alive, unit, direction, prefetch), rank=rank)
    bound, nbytes = whole[0] + sum(whole[u] for u in alive), entry["bytes"]["weights"]
    expect(nbytes <= bound, f"{where} full weights take at most {bound} bytes", f"they take {nbytes} bytes", rank=rank)
    if entry["kind"] == "with no_sync":
        return  # full gradients stay
    # Full gradients: of the root, of the unit that computes, and of two whose reductions, to a half, are in flight.
    copies, largest = entry["bytes"]["other"] - alone["bytes"]["other"], sorted(whole[1:])[-3:]
    bound = whole[0] + sum(largest) + sum(largest[1:]) // 2 if is_backward else min(whole[1:]) // 2
    what = "full gradients and copies" if is_backward else "copies of weights"
    right = f"{where} {what} take at most {bound} bytes more than in the bare model"
    expect(copies <= bound, right, f"they take {copies} bytes more", causes[direction], rank=rank)


def expect_overlap(events, launched, units, prefetch, at):
    """Expect each gather and each reduction of a step to have time to finish while units compute."""
    unit_of = {name: unit for unit, names in enumerate(units) for name in names}
    computes, leaves, enters = find_borders(events, at["step"])
    ready: dict[int, list[int]] = {}
    for place, name in list_ready_gradients(events, at["step"]):
        ready.setdefault(unit_of[name], []).append(place)
    forward = [x for x in launched if x.op == "all_gather" and x.phase == "forward"]
    backward = [x for x in launched if x.op == "all_gather" and x.phase != "forward"]
    reduced, count = [x for x in launched if x.op == "reduce_scatter"], len(units)
    right = f"a step of {count} units gathers {count} in forward and {count - 1} in backward, and reduces {count}"
    is_right = [len(forward), len(backward), len(reduced)] == [count, count - 1, count]
    expect(is_right, right, summarize(launched, 30), **at)
    for launch in forward + backward + reduced:
        right = "every gather and every reduction is asynchronous"
        expect(not launch.sync, right, f"{launch.op} is not", diagnosis.SYNC, **at)
    late = {"forward": diagnosis.LATE_GATHER, "backward": diagnosis.OTHER_PREFETCH.format("begin_backward")}
    directions = (  # with the unit that must not compute before a gather, and after what a rank may wait for it
        ("forward", zip(range(1, count), forward[1:]), lambda unit: max(unit - prefetch, 1), computes, leaves),
        ("backward", zip(range(count - 1, 0, -1), backward), lambda unit: min(unit + prefetch, count - 1), enters, {}),
    )
    for direction, gathers, find_ahead, begins, ends in directions:
        for unit, gather in gathers:
            ahead, earlier = find_ahead(unit), ends.get(unit - 1, max(ready.get(unit + 1, [-1])))
            right = f"during {direction}, unit {unit} is gathered before unit {ahead} computes (prefetch={prefetch})"
            expect(gather.place < begins[ahead], right, "the gather was launched later", late[direction], **at)
            right = f"during {direction}, no rank waits for unit {unit} before its turn (prefetch={prefetch})"
            wrong = "the rank waited earlier" if gather.waits else "the rank never waited"
            expect(gather.waits and gather.waits[0] > earlier, right, wrong, diagnosis.EARLY_WAIT, **at)
    for unit, launch in zip(range(count - 1, -1, -1), reduced):
        is_right = launch.place > max(ready[unit]) and (unit < 2 or launch.place < min(ready[unit - 1]))
        right = f"unit {unit} is reduced when its gradients are ready, before unit {unit - 1} computes in backward"
        expect(is_right, right, "the reduce-scatter was launched earlier or later", **at)
        right = f"a rank waits for the reduction of {f'unit {unit}' if unit else 'the root'}"
        expect(bool(launch.waits), right, "it never waits", diagnosis.UNAWAITED["reduce_scatter"], **at)
        is_right = unit == 0 or launch.is_polled or launch.waits[0] > max(ready[unit - 1])
        right = f"no rank waits for the reduction of unit {unit} before unit {unit - 1} has computed"
        expect(is_right, right, "the rank waited earlier", diagnosis.EARLY_REDUCE_WAIT, **at)
    raced = [x for x in launched if x.raced]
    expect(not raced, "no tensor changes before wait()", f"{len(raced)} of {len(launched)} changed", **at)


def expect_reports(reports, case, rank, units=()):
    """Expect `shard_reduced` to be called once per step for each trainable shard, and for no other tensor.

    With `units`, which are all trainable, expect the call of unit i before unit i - 3 computes in backward. The
    skeleton promises module 14 one unit earlier, but two reductions in flight are right, too.
    """
    count = sum(len(unit) for unit in lay_out(case))
    for step, entries in enumerate(reports):
        shards = [entry for entry in entries if isinstance(entry, int)]
        right = f"in each step, `shard_reduced` is called once for each of {count} trainable shards"
        wrong = f"it is called {len(shards)} times, for {len({*shards} - {-1})} of them"
        wrong += f" and {shards.count(-1)} times for a frozen one" if -1 in shards else ""
        why = diagnosis.NO_REPORT if not shards else diagnosis.FROZEN_REPORT if -1 in shards else ""
        expect(sorted(shards) == list(range(count)), right, wrong, why, rank=rank, step=step)
        for unit in range(4, len(units)):
            first = min(entries.index(name) for name in units[unit - 3])
            right = f"`shard_reduced` is called for unit {unit} before unit {unit - 3} computes in backward"
            is_last = entries[-count:] == shards
            why = diagnosis.LATE_REPORTS if is_last else ""
            expect(entries.index(unit) < first, right, "it is called later", why, rank=rank, step=step)


def find_borders(events, step):
    """Return, by unit, where in the record it computes in forward, where it has computed, and where backward enters it.

    Unit 0 has computed at the first border. In backward, a unit's norm computes after its border "computes".
    """
    computes, leaves, enters = {}, {}, {}
    for place, event in list_step_events(events, step):
        if event["kind"] == "border":
            kind, unit = divmod(event["number"], BORDERS)
            by_kind = {3: leaves if unit == 0 else {}, 4: computes, 5: leaves, 2: enters}
            by_kind.get(kind, {})[unit] = place
    return computes, leaves, enters


def expect_volume(launched, case, at, gathers, passes=1):
    """Expect a step to reduce each unit once, and each of its `passes` to gather it `gathers` times, the root once."""
    numels = [sum(layout["numel"] for layout, _ in unit.values()) for unit in lay_out(case)]
    expected = {
        "all_gather": sorted((numels[:1] + numels[1:] * gathers) * passes),
        "reduce_scatter": sorted(numels),
    }
    launched = drop_flags(launched)
    got = {op: sorted(x.numel for x in launched if x.op == op) for op in {x.op for x in launched}}
    right = (
        f"each forward and backward gathers each unit {gathers} time{'s' * (gathers > 1)} and the root once; a step "
    )
    right += f"reduces each once. This is {sum(map(sum, expected.values()))} elements with padding"
    wrong = f"{sum(map(sum, got.values()))} elements: {summarize(launched, 20)}"
    expect(got == expected, right, wrong, partial(diagnosis.explain_volume, got, expected), **at)


def expect_optimizer_state(states, expected):
    """Expect the state dict of each rank's optimizer to have the entries of a plain optimizer, `expected`."""
    actual, wanted = [flatten_state(state) for state in states], flatten_state(expected)
    for rank, entries in enumerate(actual):
        right = f"full_optimizer_state_dict has {len(wanted)} entries: {join_names(wanted, 12)}"
        expect(entries.keys() == wanted.keys(), right, f"it has {join_names(entries, 12)}", rank=rank)
    expect_equal("full_optimizer_state_dict has a plain optimizer's state", actual, wanted, tolerance=MANY_STEPS)


def flatten_state(state):
    """Return the tensors of an optimizer's state dict by text such as "exp_avg of parameter 3"."""
    entries = sorted(state["state"].items())
    return {f"{key} of parameter {number}": value for number, entry in entries for key, value in entry.items()}


def expect_state_dict(state, plain, rank):
    """Expect a state dict to have the keys, dtypes and shapes of the plain module's, on the CPU."""
    right = f"full_state_dict has the keys of the plain module's state_dict, {join_names(plain, 4)}"
    expect(list(state) == list(plain), right, f"it has {join_names(state, 4)}", rank=rank)
    for name, value in plain.items():
        got = (state[name].dtype, tuple(state[name].shape), state[name].device.type)
        right = f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)} on the CPU"
        why = diagnosis.CONVERTED if got[0] != value.dtype else ""
        is_right = got == (value.dtype, tuple(value.shape), "cpu")
        expect(is_right, right, join_names(got), why, rank=rank, parameter=name)
