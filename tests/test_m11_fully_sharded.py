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
    expect_interface,
    explain_failures,
    format_distinct,
    join_names,
)
from brigade.events import drop_flags, launches, list_ready_gradients, summarize
from brigade.runner.ranks import PerRank
from helpers.units import JOB, expect_none, expect_orders, expect_trained, run_each
from m11_fully_sharded import causes as diagnosis
from m11_fully_sharded import scenario as scenarios
from m11_fully_sharded.expected import build, find_units, join_shards, lay_out, train_mixed, train_plain
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
    for case, actions in plan_schedules(submission, backward=False):
        expect_order(case, actions, list(range(case[0])), list(range(case[0])))
        reduced = [unit for action, unit in actions if action == "reduce"]
        expect(not reduced, f"{call(case)} reduces nothing", f"it reduces {name_units(reduced)}")


@pytest.mark.points(2)
def test_backward_schedule(submission):
    """Backward computes units in reverse order, reduces each before the next computes, and does not gather the root."""
    for case, actions in plan_schedules(submission, backward=True):
        order = list(reversed(range(case[0])))
        expect_order(case, actions, order, order[:-1])
        for unit in order:
            places = [place for place, action in enumerate(actions) if action == ("reduce", unit)]
            done = actions.index(("compute", unit))
            limit = actions.index(("compute", unit - 1)) if unit else len(actions)
            expect(
                len(places) == 1 and done < places[0] < limit,
                f"{call(case)} reduces unit {unit} once, after it computes"
                + (f" and before unit {unit - 1} computes" if unit else ""),
                f"it returned {actions}",
                partial(diagnosis.explain_reduce, actions, places, done),
            )


# ---- part (c): a flat shard


@pytest.mark.parts("Parts (c) to (e): a flat shard")
@pytest.mark.points(2)
def test_each_rank_has_its_part(submission):
    """shards() returns 1-D parameters: for each unit and dtype, this rank's 1/N of the padded trainable parameters."""
    [world] = submission.worlds(3)
    kinds = {"Blocks": {}, "TiedBlocks": {}, "FrozenBlocks": {}, "Plain": {"unit_type": "Linear"}}
    cases = [submission.case(model, world, hidden_layers=3) for model in kinds]
    jobs = [case.make_jobs(**JOB | more) for case, more in zip(cases, kinds.values())]
    jobs[0] = PerRank(job | {"cast": torch.float64} for job in jobs[0])
    all_results = run_each(submission, scenarios.construct, jobs)
    for number, (case, (model, more), results) in enumerate(zip(cases, kinds.items(), all_results)):
        kind = (more.get("unit_type", "Block"), torch.float64 if number == 0 else None)
        units = lay_out(case, *kind)
        expected = [(layout["numel"] // world, dtype) for unit in units for dtype, (layout, _) in unit.items()]
        for rank, result in enumerate(results):
            got = [(shard.numel(), shard.dtype) for shard in result["shards"]]
            expect(
                got == expected and all(shard.dim() == 1 for shard in result["shards"]),
                f"shards() of {model} are 1-D, 1/{world} of each padded flat tensor: {describe_sizes(expected)}",
                describe_sizes(got),
                partial(diagnosis.explain_sizes, got, expected, case, *kind),
                rank=rank,
            )
            expect(
                all(result["trainable"]),
                "shards() are trainable nn.Parameters",
                "one is a plain tensor, or has requires_grad=False",
                rank=rank,
            )
            expect(
                world == 1 or result["kept"] <= sum(shard.nbytes for shard in result["shards"]),
                f"shards() take {sum(shard.nbytes for shard in result['shards'])} bytes of memory ({model})",
                f"their storages take {result['kept']} bytes",
                diagnosis.KEPT_WHOLE,
                rank=rank,
            )
            cause = partial(diagnosis.explain_memory, result["alive"], result["storages"])
            expect_none(result["alive"], "after construction full weights have no memory", cause, rank=rank)
        start = {name: value for name, value in case.start().items() if case.parameters()[name].requires_grad}
        values = join_shards([result["shards"] for result in results], units, case)
        expect_equal(
            f"the shards of all ranks, one after the other, are the weights of rank 0 ({model})",
            [values],
            {name: value.to(values[name].dtype) for name, value in start.items()},
            hypotheses=partial(diagnosis.suspect_parts, case, units),
            tolerance=0.0,
        )


# ---- part (d): the wrapper


@pytest.mark.parts("Parts (f) to (n): the wrapper")
@pytest.mark.points(1)
def test_shards_have_average_gradients(submission):
    """finish_grad_sync adds the averaged gradients to the gradients of the shards, and clears p.grad."""
    [world] = submission.worlds(3)
    cases = [
        submission.case("Blocks", world, dtype=torch.float64, hidden_layers=4, micro_batches=micro) for micro in (1, 2)
    ]
    all_results = run_each(submission, scenarios.train, [case.make_jobs(**JOB, finish_each=True) for case in cases])
    for number, (case, results) in enumerate(zip(cases, all_results)):
        expect_nothing_whole(results, case)
        expect_shapes(results, case)
        expect_all_shards(results, results.events, case, finishes=number + 1)
        with explain_failures([], partial(diagnosis.explain_unawaited, results.events)):
            expect_equal(
                "after finish_grad_sync the shards have the average of the gradients"
                + (", and those of a second backward and finish are added" if number else ""),
                [join_shards([result["gradients"][0] for result in results], lay_out(case), case)],
                case.gradients(),
                hypotheses=partial(diagnosis.suspect_gradients, case),
                scale=case.largest_entries(),
                tolerance=ONE_STEP,
            )


@pytest.mark.points(2)
def test_parameters_stay_views(submission):
    """A unit's parameters are views of one flat tensor. Freeing and gathering resize its storage, never replace it."""
    [world] = submission.worlds(2)
    case = submission.case("Blocks", world, hidden_layers=3)
    [results] = run_each(submission, scenarios.describe_views, [case.make_jobs(**JOB)])
    for rank, result in enumerate(results):
        expected = "when all units are gathered and freed again, every parameter keeps its storage"
        expect_none(result["moved"], expected, diagnosis.REPLACED, "got another storage", rank=rank)
        for number, unit in enumerate(lay_out(case)):
            for layout, names in unit.values():
                views = [result["views"][name] for name in names]  # (number of the storage, first element)
                expected = [start for start, _ in layout["param_ranges"]]
                expect(
                    [start for _, start in views] == expected and len({storage for storage, _ in views}) == 1,
                    f"the parameters of unit {number} are views of one flat tensor, at elements {join_names(expected)}",
                    f"at elements {join_names([start for _, start in views])} of "
                    f"{len({storage for storage, _ in views})} storages",
                    diagnosis.COPIED if len({s for s, _ in views}) == len(views) > 1 else diagnosis.OTHER_LAYOUT,
                    rank=rank,
                )
        expected = "after full_state_dict full weights have no memory"
        expect_none(result["alive"], expected, diagnosis.NEVER_FREED, rank=rank)
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
        case = submission.case(model, world, steps=steps, dtype=torch.float64, hidden_layers=3, **options)
        [results] = run_each(submission, scenarios.train, [case.make_jobs(**JOB | more)])
        own = [results[rank] for rank in case.group]
        expect_shapes(own, case, more.get("unit_type", "Block"))
        expect_nothing_whole(own, case, more.get("unit_type", "Block"))
        expect_trained(own, case, train_plain(case)[0], f"weights after {steps} steps of {case.optimizer} ({model})")
        expect_interface(results, case)


@pytest.mark.points(3)
def test_weights_are_freed(submission):
    """Even in evaluations, at most the root, the current unit and `prefetch` more have full weights. None is a copy."""
    [world] = submission.worlds(2)
    prefetches = (1, 2, 0)
    layers = (12, 5, 5)  # full gradients of 11 blocks take more than the bound allows, whatever their sizes
    cases = [submission.case("Blocks", world, steps=2, dtype=torch.float64, hidden_layers=n) for n in layers]
    jobs = [case.make_jobs(**JOB, arguments={"prefetch": p}) for p, case in zip(prefetches, cases)]
    jobs[-1] = PerRank(job | {"forward": "checkpointed"} for job in jobs[-1])
    all_results = run_each(submission, scenarios.measure, jobs)
    for prefetch, case, results in zip(prefetches, cases, all_results):
        units = find_units(build(case), UNIT_TYPES["Block"])
        unit_of = {name: unit for unit, names in enumerate(units) for name in names}
        whole = [sum(layout["numel"] * 8 for layout, _ in unit.values()) for unit in lay_out(case)]
        for rank, result in enumerate(results):
            expect_nothing_held(result, case, rank)
            expect_none(result["after"], ALL_FREED, diagnosis.ROOT_STAYS, rank=rank)
            for entry, alone in zip(result["boundaries"], itertools.cycle(result["bare"])):
                expect_bounded(entry, alone, unit_of, whole, prefetch, result["whole"], rank)
            unsynced = sorted({unit_of[name] for name in result["unsynced"]} - {0})
            expect(
                len(unsynced) <= prefetch + 1,
                f"after a backward in no_sync, at most the root and {prefetch + 1} units have memory",
                f"{name_units(unsynced)} have memory",
                diagnosis.KEPT_IN_NO_SYNC,
                rank=rank,
            )


@pytest.mark.points(2)
@pytest.mark.needs("test_backward_schedule")
def test_gathers_and_reductions_overlap(submission):
    """A rank waits for a gather only when it needs the unit, and for a reduction only after the next unit computes."""
    [world] = submission.worlds(2)
    prefetches = (1, 2, 0)
    more = {"dtype": torch.float64, "hidden_layers": 5, "forward_borders": True}
    cases = [submission.case("Blocks", world, steps=2, **more) for _ in prefetches]
    jobs = [case.make_jobs(**JOB, arguments={"prefetch": p}, proven=1) for p, case in zip(prefetches, cases)]
    all_results = run_each(submission, scenarios.train, jobs)
    for prefetch, case, results in zip(prefetches, cases, all_results):
        units = find_units(build(case), UNIT_TYPES["Block"])
        for rank, events in enumerate(results.events):
            for step in range(2):
                expect_overlap(events, step, units, prefetch, rank)


@pytest.mark.points(1)
@pytest.mark.needs("test_backward_schedule")
def test_volume(submission):
    """A step gathers the root once and other units twice (once without resharding), and reduces every unit once.

    Activation checkpointing changes nothing.
    """
    [world] = submission.worlds(3)
    options = ((True, ""), (False, ""), (True, "checkpointed"))
    cases = [submission.case("Blocks", world, steps=2, dtype=torch.float64, hidden_layers=4) for _ in options]
    jobs = [
        case.make_jobs(**JOB, arguments={"reshard_after_forward": reshard}, forward=forward)
        for (reshard, forward), case in zip(options, cases)
    ]
    all_results = run_each(submission, scenarios.train, jobs)
    for (reshard, forward), case, results in zip(options, cases, all_results):
        for step in range(2):
            for rank, events in enumerate(results.events):
                expect_volume(events, step, case, rank, 1 + reshard)
        expect_nothing_whole(results, case)
        expect_trained(
            results, case, train_plain(case)[0], f"weights after 2 steps {forward and f'with {forward} blocks'}"
        )


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_accumulation(submission):
    """Inside no_sync, full gradients stay in p.grad and are not reduced. Weights are still gathered and freed."""
    micro, crossed = 3, 2
    [world] = submission.worlds(2)
    case = submission.case("TiedBlocks", world, steps=3, micro_batches=micro, dtype=torch.float64, hidden_layers=4)
    jobs = case.make_jobs(**JOB, zero="ddp", drop=True, interrupted=1, crossed=crossed)
    [results] = run_each(submission, scenarios.train, [jobs])
    names = [name for name, p in case.parameters().items() if p.requires_grad]
    for rank, result in enumerate(results):
        for step, accumulated in enumerate(result["accumulated"]):
            expect(
                accumulated == names,
                "after a backward in no_sync, every parameter has its full gradient in p.grad"
                + " (forward ran outside no_sync)" * (step == crossed),
                f"{len(accumulated)} of {len(names)} parameters have one",
                partial(diagnosis.explain_accumulated, results.events[rank], step, crossed),
                rank=rank,
                step=step,
            )
        for step in range(1, 3):
            expect_volume(results.events[rank], step, case, rank, 2, micro, is_crossed=step == crossed)
    expect_nothing_whole(results, case)
    expect_trained(results, case, train_plain(case)[0], f"weights after 3 steps of {micro} micro-batches")


@pytest.mark.points(1)
def test_clipping(submission):
    """clip_grad_norm_ returns the norm of all gradients, and multiplies every shard's gradient by the same factor."""
    [world] = submission.worlds(3)
    groups = [[1, 2], [0]] if world == 3 else [list(range(world))]
    case = submission.case("TiedBlocks", world, steps=4, dtype=torch.float64, hidden_layers=3, group=groups[0])
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
        expect(
            abs(got - norms[0]) <= rounding * norms[0],
            f"clip_grad_norm_ returns the norm of all gradients, {wanted_text}",
            f"it returned {got_text}",
            partial(diagnosis.explain_norm, [r["gradients"][0] for r in results], case.group, got, results.events),
            rank=rank,
        )
    what = f"weights after 4 steps with gradients clipped to the norm {limit:.4g}"
    # torch adds 1e-6 to the norm. It is right to add it or not, and to round the factor to float32.
    suspects = partial(diagnosis.suspect_clipping, case, limit)
    expect_trained(own, case, weights, what, 1e-5, otherwise=diagnosis.NOT_SCALED, hypotheses=suspects)
    own = [mixed_results[rank] for rank in mixed.group]
    expect_all_shards(own, mixed_results.events, mixed, "Linear")
    expect_scaled(own, mixed, half)


@pytest.mark.points(1)
def test_checkpoints(submission):
    """full_state_dict equals the plain module's state dict. The plain module and any number of ranks can load it.

    The same holds for full_optimizer_state_dict, which the skeleton contains.
    """
    first, *others = submission.worlds(2, 3, 1)
    half, kinds = 2, {"Buffers": {"unit_type": "Linear"}, "TiedBlocks": JOB, "FrozenBlocks": JOB}
    common = {"steps": 2 * half, "dtype": torch.float64, "hidden_layers": 3, "optimizer": "adam"}
    cases = [submission.case(model, 3, **common) for model in kinds]
    jobs = [select_jobs(case, more, first, slice(half)) for case, more in zip(cases, kinds.values())]
    stored = []
    for case, saved in zip(cases, run_each(submission, scenarios.train, jobs)):
        plain = build(case)
        for rank, result in enumerate(saved):
            expect_state_dict(result["weights"], plain.state_dict(), result["gradients"][0], rank)
        weights, _, optimizer = train_plain(case, range(half), range(first))
        expect_nothing_whole(saved, case, kinds[case.model]["unit_type"])
        expect_trained(saved, case, weights, f"the state dict after {half} steps")
        expect_optimizer_state([result["optimizer"] for result in saved], optimizer["state"])
        plain.load_state_dict(saved[0]["weights"])
        stored.append((case, plain, saved[0]["weights"], saved[0]["optimizer"], optimizer))
        expect(
            not any(result["is shared"] for result in saved),
            "in full_optimizer_state_dict, no two parameters share a tensor such as `step`",
            "some do, so a plain optimizer that loads it counts a step several times",
        )
    for world, is_plain, (case, plain, state, own, optimizer) in zip(others, (False, True), stored[1:]):
        start = {name: p.detach().clone() for name, p in plain.named_parameters()}
        what = f"weights after {world} ranks load a state dict of {first} ranks and take {half} steps"
        source = optimizer if own and is_plain else own
        jobs = select_jobs(case, JOB | {"load": (state, source)}, world, slice(half, None))
        [results] = run_each(submission, scenarios.train, [jobs])
        earlier = optimizer if all(result["resumed"] for result in results) else None
        resumed, *_ = train_plain(case, range(half, 2 * half), range(world), start=start, state=earlier)
        expect_trained(results, case, resumed, what, otherwise=diagnosis.NOT_OWN_PART)


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_frozen_parameters(submission):
    """Frozen parameters, even whole frozen units, are gathered but never reduced or updated."""
    [world] = submission.worlds(3)
    case = submission.case("FrozenBlocks", world, steps=4, dtype=torch.float64, hidden_layers=4)
    [results] = run_each(submission, scenarios.train, [case.make_jobs(**JOB)])
    expect_shapes(results, case)
    for rank, events in enumerate(results.events):
        reduced = sorted(x.numel for x in launches(events, 0) if x.op == "reduce_scatter")
        trainable = sorted(layout["numel"] for unit in lay_out(case) for layout, _ in unit.values())
        expect(
            reduced == trainable,
            f"only trainable parameters are reduced, in flat tensors of {join_names(trainable)} elements",
            f"reduce-scatters of {join_names(reduced)} elements",
            partial(diagnosis.explain_reduced, reduced, case),
            rank=rank,
            step=0,
        )
    expect_nothing_whole(results, case)
    expect_trained(results, case, train_plain(case)[0], "weights after 4 steps with frozen parameters")


@pytest.mark.points(1)
def test_skipped_units(submission):
    """A rank that skips a unit still joins its gathers and reductions. A missing gradient counts as zero."""
    [world] = submission.worlds(3)
    common = {"steps": 2, "dtype": torch.float64, "hidden_layers": 5}
    cases = [
        submission.case("Blocks", world, **common, branches=[0b0011, 0b1010, 0b0001], micro_batches=2),
        submission.case("Blocks", world, **common, branches=[0b1111, 0b0110, 0b1100]),
    ]
    jobs = [case.make_jobs(**JOB, arguments={"prefetch": number}) for number, case in enumerate(cases)]
    all_results = run_each(submission, scenarios.train, jobs)
    what = "weights after 2 steps in which each rank skips different blocks"
    for case, results in zip(cases, all_results):
        expect_nothing_whole(results, case)
        expect_all_shards(results, results.events, case)
        expect_trained(results, case, train_plain(case)[0], what)
    for rank, events in [pair for results in all_results for pair in enumerate(results.events)]:
        forgotten = [x for x in launches(events) if x.step is not None and not x.waits]
        expect(
            not forgotten,
            "a rank waits for every gather and reduction, also for those of a unit that it skips",
            f"it never waits for {len(forgotten)} of {len(launches(events))} launches",
            partial(diagnosis.explain_forgotten, forgotten),
            rank=rank,
        )


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
        expect_nothing_whole(results, case)
        weights, first = train_mixed(case, compute, reduce)
        for rank, result in enumerate(results):
            kept = {str(shard.dtype).removeprefix("torch.") for shard in result["gradients"][0]}
            expect(
                kept == {"float32"},
                f"the gradients of shards are float32, as the parameters were {what}",
                join_names(sorted(kept)),
                diagnosis.NARROW_SHARDS,
                rank=rank,
            )
            sums = torch.cat(result["gradients"][0])
            expect(
                reduce != torch.bfloat16 or not sums.equal(sums.to(reduce).float()),
                f"the averages of two finishes are added in float32 {what}",
                "every sum has a value that bfloat16 can represent",
                diagnosis.NARROW_SUMS,
                rank=rank,
            )
        exact = 2e-5 if results[0]["device"] == "cpu" else 2**-5  # a GPU rounds in other places
        with diagnosis.explain_garbage(results.events):
            expect_equal(
                f"gradients of the shards after two backward passes and finishes {what}",
                [join_shards([result["gradients"][0] for result in results], lay_out(case), case)],
                first,
                hypotheses=partial(diagnosis.suspect_casts, case, compute, reduce, 1),
                tolerance=exact if reduce != torch.bfloat16 else max(exact, 2**-7),
            )
        expect_trained(
            results,
            case,
            weights | {"scale": results[0]["weights"]["scale"]},
            f"weights after 2 steps {what}",
            exact if reduce != torch.bfloat16 else max(exact, 1e-3),
            hypotheses=partial(diagnosis.suspect_casts, case, compute, reduce, 0),
        )


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_mixed_precision_memory(submission):
    """Full weights have only the memory of compute_dtype: no copy of a unit in another dtype is alive in forward."""
    [world] = submission.worlds(2)
    case = submission.case("Blocks", world, steps=2, dtype=torch.float32, hidden_layers=5)
    jobs = case.make_jobs(**JOB, arguments={"prefetch": 0, "compute_dtype": torch.bfloat16})
    [results] = run_each(submission, scenarios.measure, [jobs])
    unit_of = {name: unit for unit, names in enumerate(find_units(build(case), UNIT_TYPES["Block"])) for name in names}
    whole = [sum(layout["numel"] * 2 for layout, _ in unit.values()) for unit in lay_out(case)]
    for rank, result in enumerate(results):
        expect_nothing_held(result, case, rank)
        for entry, alone in zip(result["boundaries"], result["bare"]):
            if entry["direction"] == "forward":
                expect_bounded(entry, alone, unit_of, whole, 0, result["whole"], rank)


# ---- helpers

ALL_FREED = "after finish_grad_sync, the full weights of every unit are freed"


def expect_dtypes(results, compute, reduce, what):
    """Expect gathers in one dtype, those of frozen weights too, and reductions in another."""
    for rank, events in enumerate(results.events):
        for launch in (launch for launch in launches(events) if launch.step is not None):
            dtype = str(compute if launch.op == "all_gather" else reduce).removeprefix("torch.")
            kind = "weights are gathered" if launch.op == "all_gather" else "gradients are reduced"
            expect(
                launch.dtype == dtype,
                f"{kind} in {dtype} {what}",
                f"{launch.op} of {launch.numel} {launch.dtype}, at {launch.line}",
                diagnosis.REDUCED_NARROW
                if launch.op != "all_gather" and str(compute) == f"torch.{launch.dtype}"
                else "",
                rank=rank,
                step=launch.step,
            )


def select_jobs(case, more, world, steps):
    """Return the jobs of the first `world` ranks for a slice of the case's steps."""
    return PerRank(job | {"batches": job["batches"][steps]} for job in case.make_jobs(**more)[:world])


def expect_units(submission, cases):
    """Expect plan_units to return the units of these trees. The order of the names in a unit is free."""
    [answers] = submission.run(scenarios.plan_units, cases, world_size=1)
    for (tree, types), answer in zip(cases, answers):
        model = scenarios.make_tree(tree)
        expected = find_units(model, UNIT_TYPES[types])
        names = join_names([unit_type.__name__ for unit_type in UNIT_TYPES[types]])
        expect(
            [sorted(unit) for unit in answer] == [sorted(unit) for unit in expected],
            f"for {describe_tree(model)}, the units of type {names} are {expected}",
            f"{answer}",
            partial(diagnosis.explain_units, model, UNIT_TYPES[types], answer, expected),
        )


def describe_tree(module):
    """Return a short description of a tree: the types of its submodules that have types of units."""
    parts = [
        f"{name} = {type(submodule).__name__}"
        for name, submodule in module.named_modules(remove_duplicate=False)
        if name and not isinstance(submodule, (torch.nn.ModuleList, scenarios.Leaf)) and type(submodule) in TYPES
    ]
    return f"a module with {join_names(parts)}"


TYPES = (scenarios.Layer, scenarios.WideLayer, scenarios.Expert)


def plan_schedules(submission, backward):
    """Return pairs of a case, (num_units, prefetch, backward), and the actions that plan_schedule returns for it."""
    cases = [(units, prefetch, backward) for units in range(1, 7) for prefetch in range(units + 2)]
    cases.append((submission.rng.randint(20, 40), submission.rng.randint(3, 9), backward))
    [answers] = submission.run(scenarios.plan_schedules, cases, world_size=1)
    return [(case, [tuple(action) for action in actions]) for case, actions in zip(cases, answers)]


def call(case):
    return f"plan_schedule{case}"


def expect_order(case, actions, computed, gathered):
    """Expect a schedule to compute and gather these units in this order, each as early as `prefetch` allows."""
    for action, expected in (("compute", computed), ("gather", gathered)):
        got = [unit for kind, unit in actions if kind == action]
        expect(
            got == expected,
            f"{call(case)} {action}s {name_units(expected)}" + ", in this order" * (len(expected) > 1),
            f"it {action}s {name_units(got)}. It returned {actions}",
            partial(diagnosis.explain_order, action, got, expected, case),
        )
    for position, unit in enumerate(computed):
        before = [u for kind, u in actions[: actions.index(("compute", unit))] if kind == "gather"]
        allowed = [u for u in computed[: position + case[1] + 1] if u in gathered]
        expect(
            before == allowed,
            f"when unit {unit} computes, {call(case)} has gathered {name_units(allowed)}",
            f"it has gathered {name_units(before)}. It returned {actions}",
            partial(diagnosis.explain_prefetch, before, allowed, unit),
        )


def name_units(units):
    """Return text such as "no unit", "unit 0" or "units 0 and 1"."""
    return f"unit{'s' * (len(units) > 1)} {join_names(units, 50)}" if units else "no unit"


def describe_sizes(sizes):
    return join_names([f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes], 12)


def expect_shapes(results, case, unit_type="Block"):
    """Expect each rank to have 1/N of every unit's padded trainable parameters."""
    size = len(case.group)
    expected = [layout["numel"] // size for unit in lay_out(case, unit_type) for layout, _ in unit.values()]
    for rank, result in zip(case.group, results):
        expect(
            result["numels"] == expected,
            f"each of {size} ranks trains shards of {join_names(expected)} elements",
            f"shards of {join_names(result['numels'])} elements",
            rank=rank,
        )


def expect_nothing_whole(results, case, unit_type="Block"):
    """Expect no full weights or gradients after each finish_grad_sync."""
    for rank, result in enumerate(results):
        for step, (alive, whole) in enumerate(zip(result["alive"], result["whole"])):
            expect_none(alive, ALL_FREED, diagnosis.ROOT_STAYS, rank=rank, step=step)
            expected = "after finish_grad_sync p.grad is None for every parameter of the model"
            cause = partial(diagnosis.explain_whole, whole, case, unit_type)
            expect_none(whole, expected, cause, "have a gradient", rank=rank, step=step)


def expect_all_shards(results, events, case, unit_type="Block", finishes=1):
    """Expect every shard to have a gradient after each step, which calls finish_grad_sync `finishes` times."""
    names = [names for unit in lay_out(case, unit_type) for _, names in unit.values()]
    for rank, result in zip(case.group, results):
        for step, missing in enumerate(result["missing"]):
            expect(
                not missing,
                "after finish_grad_sync every shard has a gradient, which is zero for weights that no rank used",
                f"shard.grad is None for {len(missing)} of {len(names)} shards. The first of them is the shard of "
                f"{join_names(names[missing[0]]) if missing else ''}",
                partial(diagnosis.explain_missing, launches(events[rank], step), len(names) * finishes),
                rank=rank,
                step=step,
            )


def expect_scaled(results, case, limit):
    """Expect clip_grad_norm_(limit) to return the norm over all dtypes, and to scale the gradients of every dtype.

    bfloat16 has 8 significant bits. The norm, the factor and the gradients may be rounded to it.
    """
    gradients = [[grad.double() for grad in result["gradients"][0]] for result in results]
    norm = sum(float(grad.square().sum()) for grads in gradients for grad in grads) ** 0.5
    for rank, grads, result in zip(case.group, gradients, results):
        got = result["norms"][0][0]
        expect(
            abs(got - norm) <= 2**-6 * norm,
            f"clip_grad_norm_ returns the norm of the gradients of all dtypes, {norm:.4g}",
            f"it returned {got:.4g}",
            rank=rank,
        )
        pairs = list(zip(grads, result["clipped"][0]))
        wrong = [new for old, new in pairs if not (old * limit / norm - new).abs().max() <= 2**-6 * old.abs().max()]
        dtypes = sorted({str(new.dtype).removeprefix("torch.") for new in wrong})
        expect(
            not wrong,
            f"clip_grad_norm_ multiplies the gradients of shards of all dtypes by {limit / norm:.4g}",
            f"those of {join_names(dtypes)} are not multiplied by it",
            diagnosis.NOT_SCALED,
            rank=rank,
        )


def expect_nothing_held(result, case, rank):
    """Expect construction to leave no copy of the weights. Memory for one more set of shards is allowed."""
    total = sum(p.nbytes for p in build(case).parameters())
    expect(
        result["held"] <= total * 3 // 4,
        f"besides shards() and the parameters, construction leaves at most {total * 3 // 4} bytes in memory",
        f"{result['held']} bytes, and all weights have {total}",
        diagnosis.COPIES["forward"],
        rank=rank,
    )


def expect_bounded(entry, alone, unit_of, whole, prefetch, uncleared, rank):
    """Expect a boundary to have no more full weights and gradients than allowed. `alone` is the bare model's.

    After finish_grad_sync, the parameters in `uncleared` have full gradients.
    """
    name, direction = entry["name"], entry["direction"]
    unit = unit_of[name] if direction == "backward" else unit_of.get(f"{name}.weight", 0)
    alive = sorted({unit_of[parameter] for parameter in entry["alive"]} - {0})
    window = range(unit, unit + prefetch + 1) if direction == "forward" else range(unit - prefetch, unit + 1)
    fits = set(alive) <= set(window) if unit else len(alive) <= prefetch + 1
    where = f"in {direction}, at {name} in {f'unit {unit}' if unit else 'the root'},"
    where += entry["kind"] and f" {entry['kind']},"
    more = f"{prefetch + 1} other unit{'s' * (prefetch > 0)}"
    allowed = name_units([u for u in window if 0 < u < len(whole)]) if unit else more
    expect(
        fits,
        f"{where} at most the root and {allowed} have memory (prefetch={prefetch})",
        f"{name_units(alive)} {'have' if len(alive) > 1 else 'has'} memory",
        partial(diagnosis.explain_alive, alive, unit, direction, prefetch),
        rank=rank,
    )
    bound = whole[0] + sum(whole[u] for u in alive)
    expect(
        entry["bytes"]["weights"] <= bound,
        f"{where} full weights take at most {bound} bytes",
        f"they take {entry['bytes']['weights']} bytes",
        rank=rank,
    )
    if entry["kind"] == "with no_sync":
        return  # full gradients stay
    # Full gradients: of the root, of the unit that computes, and of two whose reductions, to a half, are in flight.
    copies = entry["bytes"]["other"] - alone["bytes"]["other"]
    largest = sorted(whole[1:])[-3:]
    bound = whole[0] + sum(largest) + sum(largest[1:]) // 2 if direction == "backward" else min(whole[1:]) // 2
    what = "full gradients and copies" if direction == "backward" else "copies of weights"
    expect(
        copies <= bound,
        f"{where} {what} take at most {bound} bytes more than in the bare model",
        f"they take {copies} bytes more",
        diagnosis.WHOLE_GRADIENTS if direction == "backward" and uncleared else diagnosis.COPIES[direction],
        rank=rank,
    )


def expect_overlap(events, step, units, prefetch, rank):
    """Expect each gather and each reduction of a step to have time to finish while units compute."""
    at = {"rank": rank, "step": step}
    unit_of = {name: unit for unit, names in enumerate(units) for name in names}
    computes, leaves, enters = find_borders(events, step)
    ready: dict[int, list[int]] = {}
    for place, name in list_ready_gradients(events, step):
        ready.setdefault(unit_of[name], []).append(place)
    launched = launches(events, step)
    forward = [x for x in launched if x.op == "all_gather" and x.phase == "forward"]
    backward = [x for x in launched if x.op == "all_gather" and x.phase != "forward"]
    reduced = [x for x in launched if x.op == "reduce_scatter"]
    count = len(units)
    expect(
        [len(forward), len(backward), len(reduced)] == [count, count - 1, count],
        f"a step of {count} units gathers {count} in forward and {count - 1} in backward, and reduces {count}",
        summarize(launched, 30),
        **at,
    )
    for launch in launched:
        expect(not launch.sync, "every launch is asynchronous", f"{launch.op} is not", diagnosis.SYNC, **at)
    directions = (  # with the unit that must not compute before a gather, and after what a rank may wait for it
        ("forward", zip(range(1, count), forward[1:]), lambda unit: max(unit - prefetch, 1), computes, leaves),
        ("backward", zip(range(count - 1, 0, -1), backward), lambda unit: min(unit + prefetch, count - 1), enters, {}),
    )
    for direction, gathers, find_ahead, begins, ends in directions:
        for unit, gather in gathers:
            ahead, earlier = find_ahead(unit), ends.get(unit - 1, max(ready.get(unit + 1, [-1])))
            expect(
                gather.place < begins[ahead],
                f"during {direction}, unit {unit} is gathered before unit {ahead} computes (prefetch={prefetch})",
                "the gather was launched later",
                diagnosis.LATE_GATHER if direction == "forward" else diagnosis.OTHER_PREFETCH["backward"],
                **at,
            )
            expect(
                gather.waits and gather.waits[0] > earlier,
                f"during {direction}, no rank waits for unit {unit} before its turn (prefetch={prefetch})",
                "the rank waited earlier" if gather.waits else "the rank never waited",
                diagnosis.EARLY_WAIT,
                **at,
            )
    for unit, launch in zip(range(count - 1, -1, -1), reduced):
        expect(
            launch.place > max(ready[unit]) and (unit < 2 or launch.place < min(ready[unit - 1])),
            f"during backward, unit {unit} is reduced when its gradients are ready, before unit {unit - 1} computes",
            "the reduce-scatter was launched earlier or later",
            **at,
        )
        expect(
            bool(launch.waits),
            f"a rank waits for the reduction of {f'unit {unit}' if unit else 'the root'}",
            "it never waits",
            diagnosis.UNAWAITED["reduce_scatter"],
            **at,
        )
        expect(
            unit == 0 or launch.is_polled or launch.waits[0] > max(ready[unit - 1]),
            f"no rank waits for the reduction of unit {unit} before unit {unit - 1} has computed",
            "the rank waited earlier",
            diagnosis.EARLY_REDUCE_WAIT,
            **at,
        )
    raced = [x for x in launched if x.raced]
    expect(not raced, "no tensor changes before wait()", f"{len(raced)} of {len(launched)} changed", **at)


def find_borders(events, step):
    """Return, by unit, where in the record it computes in forward, where it has computed, and where backward enters it.

    Unit 0 has computed at the first border. In backward, a unit's norm computes after its border "computes".
    """
    computes, leaves, enters = {}, {}, {}
    current = None
    for place, event in enumerate(events):
        if event["kind"] == "step":
            current = event["step"]
        elif event["kind"] == "border" and current == step:
            kind, unit = divmod(event["number"], BORDERS)
            by_kind = {3: leaves if unit == 0 else {}, 4: computes, 5: leaves, 2: enters}
            by_kind.get(kind, {})[unit] = place
    return computes, leaves, enters


def expect_volume(events, step, case, rank, gathers, passes=1, is_crossed=False):
    """Expect a step to reduce each unit once, and each of its `passes` to gather it `gathers` times, the root once.

    If `is_crossed`, the forward of its last pass was in no_sync, but the backward was not.
    """
    numels = [sum(layout["numel"] for layout, _ in unit.values()) for unit in lay_out(case)]
    expected = {
        "all_gather": sorted((numels[:1] + numels[1:] * gathers) * passes),
        "reduce_scatter": sorted(numels),
    }
    launched = drop_flags(launches(events, step))
    got = {op: sorted(x.numel for x in launched if x.op == op) for op in {x.op for x in launched}}
    expect(
        got == expected,
        f"each forward and backward gathers each unit {gathers} time{'s' * (gathers > 1)} and the root once; a step "
        f"reduces each once. This is {sum(map(sum, expected.values()))} elements with padding",
        f"{sum(map(sum, got.values()))} elements: {summarize(launched, 20)}",
        partial(diagnosis.explain_volume, got, expected, passes, is_crossed),
        rank=rank,
        step=step,
    )


def expect_optimizer_state(states, expected):
    """Expect the state dict of each rank's optimizer to have the entries of a plain optimizer, `expected`.

    A wrapper without full_optimizer_state_dict has None.
    """
    for rank, state in enumerate(states):
        got, wanted = (
            {n: {key: tuple(value.shape) for key, value in entry.items()} for n, entry in entries.items()}
            for entries in (state["state"] if state else expected, expected)
        )
        expect(
            got == wanted,
            f"full_optimizer_state_dict has entries for parameters {join_names(wanted, 50)}: {[*wanted.values()][:1]}",
            f"entries for parameters {join_names(sorted(got), 50)}: {[*got.values()][:1]}",
            rank=rank,
        )
    for number, entry in expected.items() if None not in states else ():
        expect_equal(
            f"the optimizer's state of parameter {number} in full_optimizer_state_dict",
            [state["state"][number] for state in states],
            entry,
            tolerance=MANY_STEPS,
        )


def expect_state_dict(state, plain, shards, rank):
    """Expect a state dict to have the keys, dtypes and shapes of the plain module's, on the CPU.

    `shards` are the gradients of this rank's shards.
    """
    expect(
        list(state) == list(plain),
        f"full_state_dict has the keys of the plain module's state_dict, {join_names(plain, 4)}",
        f"it has {join_names(state, 4)}",
        rank=rank,
    )
    for name, value in plain.items():
        expect(
            (state[name].dtype, state[name].shape, state[name].device.type) == (value.dtype, value.shape, "cpu"),
            f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)} on the CPU",
            f"{state[name].dtype}, {tuple(state[name].shape)}, {state[name].device}",
            partial(diagnosis.explain_entry, state[name], value, shards),
            rank=rank,
            parameter=name,
        )
