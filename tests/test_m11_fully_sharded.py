"""Graded checks of module 11: weights that are gathered only while their unit computes."""

from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch

from brigade.course.checks.edge_case_models import BORDERS
from brigade.course.checks.expectations import (
    MANY_STEPS,
    ONE_STEP,
    expect_equal,
    explain_failures,
    format_distinct,
    replace_cause,
)
from brigade.course.table.submission import read
from brigade.ranks.claims import At, each_step, in_phase, is_unchanged, show
from brigade.ranks.events import launches, list_step_events, summarize
from brigade.ranks.runner.ranks import PerRank
from brigade.ranks.verdict import CheckFailed, join_names
from helpers.memory import average, draw_sample, expect_delivered, run_with_little_memory
from helpers.steps import expect_interface
from helpers.units import expect_freed, expect_optimizer_state, expect_orders, expect_trained, make_jobs, run_each
from m11_fully_sharded import causes, scenario
from m11_fully_sharded.expected import find_units, join_shards, lay_out, list_units, train_mixed, train_plain
from m11_fully_sharded.scenario import PASSES, UNIT_TYPES, join_words

PLAN = "m11_fully_sharded.plan"

TREES = ("layers", "layers and more", "a layer in a layer", "a subclass", "names that begin alike")
TIED_TREES = ("tied across layers", "tied inside a layer", "tied to the root", "one layer twice")
DOUBLE = {"dtype": torch.float64}
LARGE, COUNT = 5 << 16, 16  # elements of each of so many units, whose weights have 40 MiB in float64


# ---- part (a): units


@pytest.mark.parts("Part (a): units")
@pytest.mark.points(2)
def test_units_are_the_outermost_submodules(submission):
    """plan_units makes each outermost submodule of the types a unit. All other parameters are in unit 0, the root."""
    expect_units(submission, [*((tree, "Layer") for tree in TREES), ("a subclass", "WideLayer")])


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
        At().equal(f"plan_schedule{call} reduces {{}}", name_units(reduced), name_units([]))


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
            what = f"plan_schedule{call} reduces unit {unit} once, after it computes"
            what += f" and before unit {unit - 1} computes" * (unit > 0)
            At().claim(what, is_right, f"it returned {actions}", partial(causes.explain_reduce, actions, places))


# ---- parts (c) to (e): a flat shard


@pytest.mark.parts("Parts (c) to (e): a flat shard")
@pytest.mark.points(2)
def test_each_rank_has_its_part(submission):
    """shards() returns 1-D parameters: for each unit and dtype, this rank's 1/N of the padded trainable parameters."""
    [world] = submission.worlds(3)
    models, casts = ("Blocks", "TiedBlocks", "FrozenBlocks", "Plain"), (torch.float64, None, None, None)
    cases = [submission.case(model, world, hidden_layers=3) for model in models]
    jobs = [make_jobs(case, cast=cast) for case, cast in zip(cases, casts, strict=True)]
    for case, cast, results in zip(cases, casts, run_each(submission, scenario.construct, jobs), strict=True):
        units = lay_out(case, cast)
        expected = [(layout["numel"] // world, dtype) for unit in units for dtype, (layout, _) in unit.items()]
        for rank, result in enumerate(results):
            at, shards = At(rank), result["shards"]
            sizes, nbytes = [(x.numel(), x.dtype) for x in shards], sum(x.nbytes for x in shards)
            what = f"shards() of {case.model} are 1-D, 1/{world} of each padded flat tensor: {name_sizes(expected)}"
            is_right = sizes == expected and all(shard.dim() == 1 for shard in shards)
            at.claim(what, is_right, name_sizes(sizes), partial(causes.explain_sizes, sizes, expected, case, cast))
            got = "one is a plain tensor, or has requires_grad=False"
            at.claim("shards() are trainable nn.Parameters", result["trainable"], got)
            if world > 1:
                at.at_most("the storages of shards() take {} bytes", result["kept"], nbytes, causes.KEPT_WHOLE)
            why = causes.COPIED if result["storages"] == len(result["alive"]) > 1 else causes.NEVER_FREED
            expect_freed(result["alive"], "after construction", why, rank)
        values = join_shards([result["shards"] for result in results], units, case)
        expect_equal(
            f"the shards of all ranks, one after the other, are the weights of rank 0 ({case.model})",
            [values],
            {name: case.start()[name].to(value.dtype) for name, value in values.items()},
            hypotheses=partial(causes.suspect_parts, case, units),
            tolerance=0.0,
        )


# ---- parts (f) to (n): the wrapper


def forgives_plan(check):
    """If a check of the wrapper, which performs the plan, fails because of the plan, let a grader replace the plan.

    Elsewhere, the failure names the function that does not follow its rule.
    """

    @wraps(check)
    def run(submission):
        try:
            check(submission)
        except CheckFailed as failed:
            cause = find_wrong_plan(submission, failed)
            if cause is None or not submission.conditions.uses_hidden:
                raise (failed.with_cause(cause) if cause else failed) from None
            submission.restart({PLAN: read("solutions", 11)[PLAN]})
            check(submission)

    return run


def find_wrong_plan(submission, failed):
    """Return which function of the plan is wrong, "" if one of them raises an exception, or None."""

    def run(*args, **options):
        if results := submission.try_run(*args, **options):
            return results
        raise failed

    checks = {
        "plan_units": (test_units_are_the_outermost_submodules, test_tied_parameters_belong_to_the_root),
        "plan_schedule": (test_forward_schedule, test_backward_schedule),
    }
    for name, own in () if failed.verdict.part else checks.items():
        for check in own:
            try:
                check(SimpleNamespace(rng=submission.rng, run=run))
            except CheckFailed as wrong:
                return "" if wrong is failed else causes.WRONG_PLAN.format(name)
    return None


@pytest.mark.parts("Parts (f) to (n): the wrapper")
@pytest.mark.points(1)
@forgives_plan
def test_shards_have_average_gradients(submission):
    """finish_grad_sync adds the averaged gradients to the gradients of the shards, and clears p.grad."""
    for world, counts in submission.pair_worlds((3, 1), ((1, 2), (2,))):
        cases = [submission.case("Blocks", world, **DOUBLE, hidden_layers=4, micro_batches=n) for n in counts]
        jobs = [make_jobs(case, ("numels", "gradients"), finish_each=True) for case in cases]
        for finishes, case, results in zip(counts, cases, run_each(submission, scenario.train, jobs), strict=True):
            expect_nothing_whole(results, case)
            expect_shapes(results, case)
            expect_all_shards(results, results.events, case, finishes)
            more = ", and those of a second backward and finish are added" * (finishes > 1)
            expected, scale = case.gradients_and_scale()
            with explain_failures([], partial(causes.explain_unawaited, results.events)):
                expect_equal(
                    f"after finish_grad_sync the shards have the average of the gradients{more}",
                    [join_shards([result["gradients"] for result in results], lay_out(case), case)],
                    expected,
                    hypotheses=partial(causes.suspect_gradients, case, results.events[0]),
                    scale=scale,
                    tolerance=ONE_STEP,
                )


@pytest.mark.points(2)
def test_parameters_stay_views(submission):
    """A unit's parameters are views of one flat tensor. Freeing and gathering resize its storage, never replace it."""
    [world] = submission.worlds(2)
    case = submission.case("Blocks", world, hidden_layers=3)
    [results] = run_each(submission, scenario.describe_views, [make_jobs(case)])
    for rank, result in enumerate(results):
        at, what = At(rank), "parameters with another storage after all units are gathered and freed again: {}"
        at.equal(what, result["moved"], [], causes.REPLACED)
        for number, unit in enumerate(lay_out(case)):
            for layout, names in unit.values():
                storages, starts = zip(*(result["views"][name] for name in names), strict=True)
                count = len(set(storages))
                why = causes.COPIED if count == len(names) > 1 else causes.OTHER_LAYOUT
                at.equal(f"number of storages that contain the parameters of unit {number}: {{}}", count, 1, why)
                what = f"the parameters of unit {number} begin at elements {{}} of their flat tensor"
                at.equal(what, starts, tuple(start for start, _ in layout["param_ranges"]), why)
        expect_freed(result["alive"], "after full_state_dict", causes.NEVER_FREED, rank)
    gathered = [result["gathered"] for result in results]
    expect_equal("gathered weights are those of rank 0", gathered, case.start(), tolerance=0.0)


@pytest.mark.points(2)
@forgives_plan
def test_weights_equal_plain_training(submission):
    """After 5 or 20 steps on 1 to 4 ranks, weights equal plain training's, even with tied weights and sub-groups."""
    groups = [[1, 3], [0, 2]]
    for world, (model, options, arguments, more) in submission.pair_worlds(
        (1, 2, 3, 4),
        (
            ("Blocks", {}, {"prefetch": 1}, {}),
            ("TiedBlocks", {"optimizer": "adam"}, {"prefetch": 0}, {}),
            ("Plain", {}, {"prefetch": 2}, {}),
            ("Blocks", {"group": groups[0]}, {"reshard_after_forward": False}, {"groups": groups}),
        ),
    ):
        steps = 20 if world == 2 else 5
        case = submission.case(model, world, steps=steps, **DOUBLE, hidden_layers=3, **options)
        jobs = make_jobs(case, ("numels", "weights", "interface"), arguments=arguments, **more)
        [results] = run_each(submission, scenario.train, [jobs])
        own = [results[rank] for rank in case.group]
        expect_shapes(own, case)
        expect_plain(own, case, f"weights after {steps} steps of {case.optimizer} ({model})")
        expect_interface(results, case)


@pytest.mark.points(3)
@forgives_plan
def test_weights_are_freed(submission):
    """Even in evaluations, at most the root, the current unit and `prefetch` more have full weights. None is a copy."""
    [world] = submission.worlds(2)
    settings = (  # prefetch, layers, and the blocks that each rank skips
        (1, 12, [0, 0]),  # full gradients of 11 blocks take more than the bound allows, whatever their sizes
        (2, 5, [0, 0]),
        (0, 5, [0, 0]),
        (0, 6, [0b0110, 0b01001]),
    )
    options = DOUBLE | {"steps": 2}
    cases = [submission.case("Blocks", world, **options, hidden_layers=n, branches=b[:world]) for _, n, b in settings]
    jobs = [
        make_jobs(case, arguments={"prefetch": prefetch}, forward="checkpointed" if number == 2 else "")
        for number, ((prefetch, *_), case) in enumerate(zip(settings, cases, strict=True))
    ]
    all_results = run_each(submission, scenario.measure, jobs)
    for (prefetch, *_), case, own, results in zip(settings, cases, jobs, all_results, strict=True):
        for rank, result in enumerate(results):
            expect_freed(result["after"], "after finish_grad_sync", causes.ROOT_STAYS, rank)
        unit_of = expect_little_memory(results, case, own, prefetch, itemsize=8)
        for rank, result in enumerate(results):
            unsynced = sorted({unit_of[name] for name in result["unsynced"]} - {0})
            what = f"after a backward in no_sync, at most the root and {prefetch + 1} units have memory"
            got = f"{name_units(unsynced)} have memory"
            At(rank).claim(what, len(unsynced) <= prefetch + 1, got, causes.KEPT_IN_NO_SYNC)
    start = submission.rng.randrange(1 << 31)
    arguments = {"prefetch": 1, "compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    job = {"start": start, "count": COUNT, "numel": LARGE, "unit_type": "Layer", "arguments": arguments}
    if run := run_with_little_memory(submission, scenario.train_large, job, mib=46, world=2):
        results, seeds = run
        at = [draw_sample(submission.rng, LARGE) for _ in range(COUNT)]
        weights = [average([start], i, LARGE, own, torch.float32) for i, own in enumerate(at)]
        expect_delivered(results, 0, torch.cat(weights), "all weights")
        gradients = [average(seeds, i, LARGE, own) for i, own in enumerate(at)]
        expect_delivered(results, 0, len(results) * torch.cat(gradients), "the averages of all gradients")


@pytest.mark.points(2)
@forgives_plan
def test_gathers_and_reductions_overlap(submission):
    """A rank waits for a gather only when it needs the unit, and for a reduction only after the next unit computes."""
    [world] = submission.worlds(2)
    prefetches = (1, 2, 0)
    more = DOUBLE | {"hidden_layers": 5, "forward_borders": True}
    cases = [submission.case("Blocks", world, steps=2, **more) for _ in prefetches]
    settings = [*zip(prefetches, cases, strict=True)]
    parts = ("reports", "early", "trained")
    jobs = [make_jobs(case, parts, arguments={"prefetch": p}, proven=1) for p, case in settings]
    for (prefetch, case), results in zip(settings, run_each(submission, scenario.train, jobs), strict=True):
        units = list_units(case)
        for step in each_step(results.events, 2):
            expect_overlap(step, units, prefetch)
        for rank, result in enumerate(results):
            expect_reports(result, case, rank, units)


@pytest.mark.points(1)
@forgives_plan
def test_volume(submission):
    """A step gathers the root once and other units twice (once without resharding), and reduces every unit once.

    Activation checkpointing changes nothing.
    """
    [world] = submission.worlds(3)
    options = ((True, ""), (False, ""), (True, "checkpointed"))
    cases = [submission.case("Blocks", world, steps=2, **DOUBLE, hidden_layers=4) for _ in options]
    jobs = [
        make_jobs(case, arguments={"reshard_after_forward": reshard}, forward=forward)
        for (reshard, forward), case in zip(options, cases, strict=True)
    ]
    all_results = run_each(submission, scenario.train, jobs)
    for (reshard, forward), case, results in zip(options, cases, all_results, strict=True):
        for step in each_step(results.events, 2):
            expect_volume(step, case, 1 + reshard)
        expect_plain(results, case, "weights after 2 steps" + f" with {forward} blocks" * bool(forward))


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
@forgives_plan
def test_accumulation(submission):
    """Inside no_sync, full gradients stay in p.grad and are not reduced. Weights are still gathered and freed."""
    [world], micro, crossed = submission.worlds(2), 3, 2
    case = submission.case("TiedBlocks", world, steps=3, micro_batches=micro, **DOUBLE, hidden_layers=4)
    jobs = make_jobs(case, ("weights", "accumulated"), zero="ddp", drop=True, interrupted=1, crossed=crossed)
    [results] = run_each(submission, scenario.train, [jobs])
    names = [name for name, p in case.parameters().items() if p.requires_grad]
    for step in each_step(results.events, 3):
        accumulated = results[step.rank]["accumulated"][step.number]
        what = "after a backward in no_sync, every parameter has its full gradient in p.grad"
        what += " (forward ran outside no_sync)" * (step.number == crossed)
        got = f"{len(accumulated)} of {len(names)} parameters have one"
        step.claim(what, accumulated == names, got, partial(causes.explain_accumulated, step, crossed))
        if step.number:
            expect_volume(step, case, 2, micro)
    expect_plain(results, case, f"weights after 3 steps of {micro} micro-batches")


@pytest.mark.points(1)
@forgives_plan
def test_clipping(submission):
    """clip_grad_norm_ returns the norm of all gradients, and multiplies every shard's gradient by the same factor."""
    [world] = submission.worlds(3)
    groups = [[1, 2], [0]] if world == 3 else [list(range(world))]
    case = submission.case("TiedBlocks", world, steps=4, **DOUBLE, hidden_layers=3, group=groups[0])
    limit = sorted(train_plain(case, max_norm=float("inf"))[1])[2]  # this clips about half of the steps
    mixed = submission.case("MixedDtypes", world, hidden_layers=3, group=groups[0])
    half = train_plain(mixed, max_norm=float("inf"))[1][0] / 2
    jobs = [
        make_jobs(case, ("gradients", "norm", "weights"), clip=limit, groups=groups),
        make_jobs(mixed, ("gradients", "norm", "clipped"), clip=half, groups=groups),
    ]
    results, mixed_results = run_each(submission, scenario.train, jobs)
    weights, norms, _ = train_plain(case, max_norm=limit)
    own = [results[rank] for rank in case.group]
    expect_nothing_whole(own, case)
    expect_all_shards(own, results.events, case)
    for rank, result in zip(case.group, own, strict=True):
        got = result["norm"]
        rounding = 1e-5 if got == float(torch.tensor(got, dtype=torch.float32)) else MANY_STEPS
        exact, shown = format_distinct(norms[0], got)
        what = f"clip_grad_norm_ returns the norm of all gradients, {exact}"
        why = partial(causes.explain_norm, case, groups, got, results.events)
        At(rank).claim(what, abs(got - norms[0]) <= rounding * norms[0], f"it returned {shown}", why)
    what = f"weights after 4 steps with gradients clipped to the norm {limit:.4g}"
    # torch adds 1e-6 to the norm. It is right to add it or not, and to round the factor to float32.
    suspects = partial(causes.suspect_clipping, case, limit)
    expect_plain(own, case, what, weights, tolerance=1e-5, otherwise=causes.NOT_SCALED, hypotheses=suspects)
    gradients = join_shards([result["gradients"] for result in own], lay_out(case), case)
    what, (average, scale) = "before clipping, the shards have the average of the gradients", case.gradients_and_scale()
    expect_equal(what, [gradients], average, scale=scale, tolerance=ONE_STEP)
    own = [mixed_results[rank] for rank in mixed.group]
    expect_all_shards(own, mixed_results.events, mixed)
    expect_scaled(own, mixed, half)


@pytest.mark.points(1)
@forgives_plan
def test_checkpoints(submission):
    """full_state_dict equals the plain module's state dict. The plain module and any number of ranks can load it.

    The same holds for full_optimizer_state_dict, which the skeleton contains.
    """
    first, *others = submission.worlds(2, 3, 1)
    half, stored = 2, []
    common = DOUBLE | {"steps": 2 * half, "hidden_layers": 3, "optimizer": "adam"}
    cases = [submission.case(model, 3, **common) for model in ("Buffers", "TiedBlocks", "FrozenBlocks")]
    parts = ("state", "optimizer", "is_shared")
    jobs = [select_jobs(case, first, slice(half), parts=parts) for case in cases]
    for case, saved in zip(cases, run_each(submission, scenario.train, jobs), strict=True):
        plain = case.build()
        for rank, result in enumerate(saved):
            expect_state_dict(result["state"], plain.state_dict(), rank)
        weights, _, optimizer = train_plain(case, range(half), range(first))
        trained = [result | {"weights": result["state"]} for result in saved]
        expect_plain(trained, case, f"the state dict after {half} steps", weights)
        own = saved[0]["optimizer"]  # None if the wrapper has no full_optimizer_state_dict
        expect_optimizer_state([result["optimizer"] for result in saved], optimizer["state"])
        what = "in full_optimizer_state_dict, no two parameters share a tensor such as `step`"
        got = "some do, so a plain optimizer that loads it counts a step several times"
        At().claim(what, not any(result["is_shared"] for result in saved), got)
        plain.load_state_dict(saved[0]["state"])
        stored.append((case, plain, saved[0]["state"], own and optimizer | {"state": own}, optimizer))
    pairs = zip(
        others, (False, True)[: len(others)], stored[1 : 1 + len(others)], strict=True
    )  # of which some may lack
    for world, is_plain, (case, plain, state, own, optimizer) in pairs:
        start = {name: p.detach().clone() for name, p in plain.named_parameters()}
        what = f"weights after {world} ranks load a state dict of {first} ranks and take {half} steps"
        load = (state, optimizer if own and is_plain else own)
        [results] = run_each(submission, scenario.train, [select_jobs(case, world, slice(half, None), load=load)])
        resumed, *_ = train_plain(case, range(half, 2 * half), range(world), start=start, state=own and optimizer)
        expect_trained(results, case, what, resumed, otherwise=causes.NOT_OWN_PART if world > 1 else "")


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
@forgives_plan
def test_frozen_parameters(submission):
    """Frozen parameters, even whole frozen units, are gathered but never reduced or updated."""
    [world] = submission.worlds(3)
    case = submission.case("FrozenBlocks", world, steps=4, **DOUBLE, hidden_layers=4)
    [results] = run_each(submission, scenario.train, [make_jobs(case, ("numels", "weights", "reports", "early"))])
    expect_shapes(results, case)
    trainable = sorted(layout["numel"] for unit in lay_out(case) for layout, _ in unit.values())
    for step in each_step(results.events, 1):
        reduced = sorted(launch.numel for launch in step.launches("reduce_scatter"))
        what = "only trainable parameters are reduced, in flat tensors of {} elements"
        step.equal(what, reduced, trainable, partial(causes.explain_reduced, reduced, case))
    for rank, result in enumerate(results):
        expect_reports(result, case, rank)
    expect_plain(results, case, "weights after 4 steps with frozen parameters")


@pytest.mark.points(1)
@forgives_plan
def test_skipped_units(submission):
    """A rank that skips a unit still joins its gathers and reductions. A missing gradient counts as zero."""
    [world] = submission.worlds(3)
    common = DOUBLE | {"steps": 2, "hidden_layers": 5}
    cases = [
        submission.case("Blocks", world, **common, branches=[0b0011, 0b1010, 0b0001][:world], micro_batches=2),
        submission.case("Blocks", world, **common, branches=[0b1111, 0b0110, 0b1100][:world]),
    ]
    jobs = [make_jobs(case, arguments={"prefetch": number}) for number, case in enumerate(cases)]
    for case, results in zip(cases, run_each(submission, scenario.train, jobs), strict=True):
        expect_all_shards(results, results.events, case)
        expect_plain(results, case, "weights after 2 steps in which each rank skips different blocks")
        for step in each_step(results.events, 2):
            what = "a rank waits for every gather and reduction, also for those of a unit that it skips"
            step.launches().satisfy(what, lambda one: bool(one.waits), causes.explain_forgotten)


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
@forgives_plan
def test_unusual_orders(submission):
    """An evaluation changes nothing at any place of a step. Discarded forwards and more backwards work or are refused.

    Refused means a RuntimeError. If all backward passes of a step are in no_sync, the finish reduces their gradients.
    """
    [world] = submission.worlds(2)
    between = [order for order in scenario.EXTRA if order[1] == scenario.PLACES[1]]
    orders = [(order, True) for order in scenario.ORDERS] + [(order, False) for order in between]
    expect_orders(submission, world, orders)


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
    for world, mixed in submission.pair_worlds(MIXED, MIXED.values()):
        cases = [submission.case("FrozenBlocks", world, **common) for _ in mixed]
        jobs = []
        for case, (compute, reduce) in zip(cases, mixed, strict=True):
            more = {"arguments": {"compute_dtype": compute, "reduce_dtype": reduce}, "finish_each": True}
            if compute and not reduce:  # checkpointed, and from a state dict
                start = case.build().state_dict() | {"scale": torch.linspace(0.5, 1.5, case.sizes[1])}
                more |= {"load": (start, None)}
            checkpointed = ", checkpointed" * ("load" in more)
            parts = ("numels", "gradients", "weights")
            jobs.append(make_jobs(case, parts, forward=f"scaled{checkpointed}", **more))
        outcomes += zip(cases, mixed, jobs, run_each(submission, scenario.train, jobs), strict=True)
    for case, dtypes, jobs, results in outcomes:
        compute, reduce = (dtype or torch.float32 for dtype in dtypes)
        what = "(compute_dtype={}, reduce_dtype={})".format(*dtypes)
        expect_dtypes(results, compute, reduce, what)
        expect_shapes(results, case)
        gradients = join_shards([result["gradients"] for result in results], lay_out(case), case)
        for rank, result in enumerate(results):
            at, dtypes = At(rank), name_dtypes(result["gradients"])
            sentence = f"the gradients of shards are {{}}, as the parameters were {what}"
            at.equal(sentence, dtypes, "float32", causes.NARROW_SHARDS)
            sums = torch.cat(result["gradients"])
            is_narrow = reduce == torch.bfloat16 and sums.equal(sums.to(reduce).float())
            got = "every sum has a value that bfloat16 can represent"
            why = partial(causes.explain_narrow, results, case, compute, reduce)
            at.claim(f"the averages of two finishes are added in float32 {what}", not is_narrow, got, why)
        weights, first = train_mixed(case, compute, reduce)
        exact = 2e-5 if submission.conditions.backend == "gloo" else 2**-5  # a GPU rounds in other places
        is_loaded = "load" in jobs[0]
        suspects = [partial(causes.suspect_casts, case, compute, reduce, is_loaded, which) for which in (0, 1)]
        with replace_cause(partial(causes.explain_garbage, results.events)):
            expect_equal(
                f"gradients of the shards after two backward passes and finishes {what}",
                [gradients],
                first,
                hypotheses=suspects[1],
                tolerance=exact if reduce != torch.bfloat16 else max(exact, 2**-7),
            )
        tolerance = exact if reduce != torch.bfloat16 else max(exact, 1e-3)
        what = f"weights after 2 steps {what}"
        expect_plain(results, case, what, weights, tolerance=tolerance, hypotheses=suspects[0])


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_mixed_precision_memory(submission):
    """Full weights have only the memory of compute_dtype: no copy of a unit in another dtype is alive in forward."""
    [world] = submission.worlds(2)
    case = submission.case("Blocks", world, steps=2, dtype=torch.float32, hidden_layers=5)
    jobs = make_jobs(case, arguments={"prefetch": 0, "compute_dtype": torch.bfloat16})
    [results] = run_each(submission, scenario.measure, [jobs])
    expect_little_memory(results, case, jobs, prefetch=0, itemsize=2, directions=("forward",))


# ---- what the checks use


def expect_dtypes(results, compute, reduce, what):
    """Expect gathers in one dtype, those of frozen weights too, and reductions in another."""
    weights, gradients = show(compute), show(reduce)
    for step in each_step(results.events, 2) if len(results) > 1 else ():
        step.claim("the step gathers weights and reduces gradients", bool(step.launches()), "it launches nothing")
        gathered, reduced = step.launches("all_gather"), step.launches().where(lambda one: one.op != "all_gather")
        gathered.satisfy(f"weights are gathered in {weights} {what}", lambda one: one.dtype == weights)
        why = partial(causes.explain_dtype, compute)
        reduced.satisfy(f"gradients are reduced in {gradients} {what}", lambda one: one.dtype == gradients, why)


def select_jobs(case, world, steps, **more):
    """Return the jobs of the first `world` ranks for a slice of the case's steps."""
    return PerRank(job | {"batches": job["batches"][steps]} for job in make_jobs(case, **more)[:world])


def expect_units(submission, cases):
    """Expect plan_units to return the units of these trees. The order of the names in a unit is free."""
    [answers] = submission.run(scenario.plan_units, cases, world_size=1)
    for (tree, types), answer in zip(cases, answers, strict=True):
        model, unit_types = scenario.make_tree(tree), UNIT_TYPES[types]
        expected = find_units(model, unit_types)
        names = join_names([unit_type.__name__ for unit_type in unit_types])
        what = f"for {describe_tree(model)}, the units of type {names} are {{}}"
        got, wanted = (str([sorted(unit) for unit in units]) for units in (answer, expected))
        At().equal(what, got, wanted, partial(causes.explain_units, model, unit_types, answer, expected))


def describe_tree(module):
    """Return a short description of a tree: the types of its submodules that have types of units."""
    named = module.named_modules(remove_duplicate=False)
    units = [(name, type(one)) for name, one in named if isinstance(one, (scenario.Layer, scenario.Expert))]
    return f"a module with {join_names([f'{name} = {kind.__name__}' for name, kind in units], 8) or 'no such unit'}"


def plan_schedules(submission, backward):
    """Return pairs of arguments, (num_units, prefetch, backward), and the actions that plan_schedule returns."""
    cases = [(units, prefetch, backward) for units in range(1, 7) for prefetch in range(units + 2)]
    cases.append((submission.rng.randint(20, 40), submission.rng.randint(3, 9), backward))
    [answers] = submission.run(scenario.plan_schedules, cases, world_size=1)
    return [*zip(cases, answers, strict=True)]


def expect_order(call, actions, computed, gathered):
    """Expect a schedule to compute and gather these units in this order, each as early as `prefetch` allows."""
    _, prefetch, backward = call
    for action, expected in (("compute", computed), ("gather", gathered)):
        units = [unit for kind, unit in actions if kind == action]
        what = f"plan_schedule{call} {action}s {name_units(expected)}" + ", in this order" * (len(expected) > 1)
        got = f"it {action}s {name_units(units)}. It returned {actions}"
        At().claim(what, units == expected, got, partial(causes.explain_order, action, units, expected, backward))
    for position, unit in enumerate(computed):
        before = [u for kind, u in actions[: actions.index(("compute", unit))] if kind == "gather"]
        allowed = [u for u in computed[: position + prefetch + 1] if u in gathered]
        what = f"when unit {unit} computes, plan_schedule{call} has gathered {name_units(allowed)}"
        got = f"it has gathered {name_units(before)}. It returned {actions}"
        why = causes.TOO_FAR if len(before) > len(allowed) else causes.TOO_FEW
        At().claim(what, before == allowed, got, why)


def name_units(units):
    """Return text such as "no unit", "unit 0" or "units 0 and 1"."""
    return f"unit{'s' * (len(units) > 1)} {join_names(units, 50)}" if units else "no unit"


def name_sizes(sizes):
    return join_names([f"{numel} {show(dtype)}" for numel, dtype in sizes], 12)


def name_dtypes(tensors):
    return show(sorted({show(tensor.dtype) for tensor in tensors}))


def expect_nothing_whole(results, case):
    """Expect no full weights or gradients after each finish_grad_sync."""
    for rank, result in enumerate(results):
        for step, (alive, whole) in enumerate(zip(result["alive"], result["whole"], strict=True)):
            expect_freed(alive, "after finish_grad_sync", partial(causes.explain_stays, alive, case), rank, step)
            what = "parameters whose p.grad is not None after finish_grad_sync: {}"
            At(rank, step).equal(what, whole, [], partial(causes.explain_whole, whole, case))


def expect_plain(results, case, what, weights=None, **options):
    """Expect these weights, by default those of plain training, and nothing whole after a finish."""
    expect_nothing_whole(results, case)
    expect_trained(results, case, what, weights, **options)


def expect_shapes(results, case):
    """Expect each rank to have 1/N of every unit's padded trainable parameters."""
    size = len(case.group)
    expected = [layout["numel"] // size for unit in lay_out(case) for layout, _ in unit.values()]
    for rank, result in zip(case.group, results, strict=True):
        At(rank).equal(
            f"with {size} rank{'s' * (size > 1)}, each one trains shards of {{}} elements", result["numels"], expected
        )


def expect_all_shards(results, events, case, finishes=1):
    """Expect every shard to have a gradient after each step, which calls finish_grad_sync `finishes` times."""
    names = [names for unit in lay_out(case) for _, names in unit.values()]
    what = "parameters whose shard has no gradient after finish_grad_sync, not even zeros: {}"
    for rank, result in zip(case.group, results, strict=True):
        for step, missing in enumerate(result["missing"]):
            surplus = [f"shard {number}" for number in missing if number >= len(names)]
            without = [name for number in missing for part in names[number : number + 1] for name in part]
            why = partial(causes.explain_missing, launches(events[rank], step), len(names) * finishes)
            At(rank, step).equal(what, [*without, *surplus], [], "" if surplus else why)


def expect_scaled(results, case, limit):
    """Expect clip_grad_norm_(limit) to return the norm over all dtypes, and to scale the gradients of every dtype.

    bfloat16 has 8 significant bits. The norm, the factor and the gradients may be rounded to it.
    """
    units = lay_out(case)
    for key in ("gradients", "clipped"):
        join_shards([result[key] for result in results], units, case)  # all shards are there
    gradients = [[grad.double() for grad in result["gradients"]] for result in results]
    norm = sum(float(grad.square().sum()) for grads in gradients for grad in grads) ** 0.5
    for rank, grads, result in zip(case.group, gradients, results, strict=True):
        at, returned, clipped = At(rank), result["norm"], result["clipped"]
        what = f"clip_grad_norm_ returns the norm of the gradients of all dtypes, {norm:.4g}"
        at.claim(what, abs(returned - norm) <= 2**-6 * norm, f"it returned {returned:.4g}")
        pairs = zip(grads, clipped, strict=True)
        scaled = [(old * limit / norm - new).abs().max() <= 2**-6 * old.abs().max() for old, new in pairs]
        wrong = name_dtypes([new for new, is_scaled in zip(clipped, scaled, strict=True) if not is_scaled])
        what = f"clip_grad_norm_ multiplies the gradients of shards of all dtypes by {limit / norm:.4g}"
        at.claim(what, all(scaled), f"those of {wrong} are not multiplied by it", causes.NOT_SCALED)


def expect_little_memory(results, case, jobs, prefetch, itemsize, directions=("forward", "backward")):
    """Expect bounded memory at each boundary of `measure` in these directions. Return the units of parameters.

    Construction may leave memory for one more set of shards, but no copy of the weights.
    """
    units = {name: unit for unit, names in enumerate(list_units(case)) for name in names}
    unit_of = {name: units[name] for name in case.parameters()}
    whole = [sum(layout["numel"] * itemsize for layout, _ in unit.values()) for unit in lay_out(case)]
    total = sum(p.nbytes for p in case.build().parameters())
    for rank, result in enumerate(results):
        what = f"besides shards() and the parameters, whose full weights have {total} bytes, construction leaves {{}}"
        At(rank).at_most(f"{what} bytes in memory", result["held"], total * 3 // 4, causes.COPIES)
        places = scenario.list_boundaries(jobs[rank])
        used = {unit_of.get(f"{name}.weight", 0) for _, name, _ in places}
        why = causes.suspect_copies(result, places) | {"skipped": {*unit_of.values()} - used}
        for direction, name, kind in places:
            if direction in directions or direction == "recomputation" and "backward" in directions:
                entry = result["boundaries"][join_words(direction, name, kind)]
                alone = result["bare"][join_words(direction, name)]
                expect_bounded(At(rank), (direction, name, kind), entry, alone, unit_of, whole, prefetch, why)
    return unit_of


def expect_bounded(at, place, entry, alone, unit_of, whole, prefetch, why):
    """Expect a boundary to have no more full weights and gradients than allowed. `alone` are the bare model's bytes.

    `why` says, for forward and backward, why there are copies.
    """
    direction, name, kind = place
    is_backward = direction != "forward"
    unit = unit_of[name] if direction == "backward" else unit_of.get(f"{name}.weight", 0)
    alive = sorted({unit for unit, has in zip(unit_of.values(), entry["alive"].tolist(), strict=True) if has} - {0})
    window = range(unit - prefetch, unit + 1) if is_backward else range(unit, unit + prefetch + 1)
    direction = "backward" if is_backward else direction
    where = join_words(f"in {direction}, at {name} in {f'unit {unit}' if unit else 'the root'},", kind and f"{kind},")
    more = f"{prefetch + 1} other unit{'s' * (prefetch > 0)}"
    allowed = name_units([u for u in window if 0 < u < len(whole)]) if unit else more
    at.claim(
        f"{where} at most the root and {allowed} have memory (prefetch={prefetch})",
        set(alive) <= set(window) if unit else len(alive) <= prefetch + 1,
        f"{name_units(alive)} {'have' if len(alive) > 1 else 'has'} memory",
        partial(causes.explain_alive, alive, unit, direction, prefetch, why["skipped"]),
    )
    bound = whole[0] + sum(whole[u] for u in alive)
    at.at_most(f"{where} full weights take {{}} bytes", entry["bytes"]["weights"], bound)
    if kind == PASSES[2]:
        return  # full gradients stay
    # Full gradients: of the root, of the unit that computes, and of two whose reductions, to a half, are in flight.
    copies, largest = entry["bytes"]["other"] - alone, sorted(whole[1:])[-3:]
    bound = whole[0] + sum(largest) + sum(largest[1:]) // 2 if is_backward else min(whole[1:]) // 2
    what = "full gradients and copies" if is_backward else "copies of weights"
    at.at_most(f"{where} {what} take {{}} bytes more than in the bare model", copies, bound, why[direction])


def expect_overlap(step, units, prefetch):
    """Expect each gather and each reduction of a step to have time to finish while units compute."""
    count, (computes, leaves, enters) = len(units), find_borders(step)
    ready = [[place for place, name in step.ready if name in names] for names in units]
    launched, gathered, reduced = step.launches(), step.launches("all_gather"), step.launches("reduce_scatter")
    forward, backward = gathered.where(in_phase("forward")), gathered.where(lambda one: one.phase != "forward")
    what = f"a step of {count} units gathers {count} in forward and {count - 1} in backward, and reduces {count}"
    is_right = [len(forward), len(backward), len(reduced)] == [count, count - 1, count]
    launched.claim(what, is_right, f"the step made {summarize(launched, 30)}")
    for own in (gathered, reduced):
        own.are_asynchronous()
    # For each gather: the unit that must not compute before it, and the place until which no rank may wait for it.
    turns = [("forward", unit, max(unit - prefetch, 1), computes, leaves[unit - 1]) for unit in range(1, count)]
    turns += [
        ("backward", unit, min(unit + prefetch, count - 1), enters, max(done, default=-1))
        for unit, done in zip(reversed(range(1, count)), [[], *reversed(ready[2:])], strict=True)
    ]
    late = {"forward": causes.LATE_GATHER, "backward": causes.OTHER_PREFETCH.format("begin_backward")}
    for gather, (direction, unit, ahead, begins, earliest) in zip([*forward[1:], *backward], turns, strict=True):
        what = f"during {direction}, unit {unit} is gathered before unit {ahead} computes (prefetch={prefetch})"
        step.claim(what, gather.place < begins[ahead], "the gather was launched later", late[direction])
        what = f"during {direction}, no rank waits for unit {unit} before its turn (prefetch={prefetch})"
        got = "the rank waited earlier" if gather.waits else "the rank never waited"
        step.claim(what, bool(gather.waits) and gather.waits[0] > earliest, got, causes.EARLY_WAIT)
    for unit, launch in zip(reversed(range(count)), reduced, strict=True):
        name = f"unit {unit}" if unit else "the root"
        what = f"{name} is reduced when its gradients are ready"
        what += f", before unit {unit - 1} computes in backward" * (unit > 1)
        is_right = launch.place > max(ready[unit]) and (unit < 2 or launch.place < min(ready[unit - 1]))
        step.claim(what, is_right, "the reduce-scatter was launched earlier or later")
        what = f"a rank waits for the reduction of {name}"
        step.claim(what, bool(launch.waits), "it never waits", causes.UNAWAITED["reduce_scatter"])
        what = f"no rank waits for the reduction of {name} before unit {unit - 1} has computed"
        is_right = unit == 0 or launch.is_polled or launch.waits[0] > max(ready[unit - 1])
        step.claim(what, is_right, "the rank waited earlier", causes.EARLY_REDUCE_WAIT)
    launched.satisfy("no tensor changes before wait()", is_unchanged)


def expect_reports(result, case, rank, units=()):
    """Expect `shard_reduced` to be called once per step for each trainable shard, and for no other tensor.

    With `units`, which are all trainable, expect the call of unit i before unit i - 3 computes in backward. The
    skeleton promises module 14 one unit earlier, but two reductions in flight are right, too.
    """
    count = sum(len(unit) for unit in lay_out(case))
    for step, (entries, early) in enumerate(zip(result["reports"], result["early"], strict=True)):
        at, shards = At(rank, step), [entry for entry in entries if isinstance(entry, int)]
        got = f"it is called {len(shards)} times, for {len({*shards} - {-1})} of them"
        got += f" and {shards.count(-1)} times for a frozen one" * (-1 in shards)
        why = causes.NO_REPORT if not shards else causes.FROZEN_REPORT if -1 in shards else ""
        what = f"in each step, `shard_reduced` is called once for each of {count} trainable shards"
        at.claim(what, sorted(shards) == list(range(count)), got, why)
        what = "shards whose gradient changes after `shard_reduced` was called for them: {}"
        at.equal(what, early, [], causes.EARLY_REPORTS)
        for unit in range(4, len(units)):
            first = min(entries.index(name) for name in units[unit - 3])
            what = f"`shard_reduced` is called for unit {unit} before unit {unit - 3} computes in backward"
            why = causes.LATE_REPORTS if entries[-count:] == shards else ""
            at.claim(what, entries.index(unit) < first, "it is called later", why)


def find_borders(step):
    """Return, by unit, where in the record it computes in forward, where it has computed, and where backward enters it.

    Unit 0 has computed at the first border. In backward, a unit's norm computes after its border "computes".
    """
    computes, leaves, enters = {}, {}, {}
    for place, event in list_step_events(step.events, step.number):
        if event["kind"] == "border":
            kind, unit = divmod(event["number"], BORDERS)
            by_kind = {3: leaves if unit == 0 else {}, 4: computes, 5: leaves, 2: enters}
            by_kind.get(kind, {})[unit] = place
    return computes, leaves, enters


def expect_volume(step, case, gathers, passes=1):
    """Expect a step to reduce each unit once, and each of its `passes` to gather it `gathers` times, the root once."""
    numels = [sum(layout["numel"] for layout, _ in unit.values()) for unit in lay_out(case)]
    gathered = sorted((numels[:1] + numels[1:] * gathers) * passes)
    expected = {"all_gather": gathered, "reduce_scatter": sorted(numels)}
    launched = step.launches().without_flags()
    made = {op: sorted(x.numel for x in launched if x.op == op) for op in {x.op for x in launched}}
    launched.claim(
        f"each forward and backward gathers each unit {gathers} time{'s' * (gathers > 1)} and the root once; a step "
        f"reduces each once. This is {sum(map(sum, expected.values()))} elements with padding",
        made == expected,
        f"{sum(map(sum, made.values()))} elements: {summarize(launched, 20)}",
        partial(causes.explain_volume, expected),
    )


def expect_state_dict(state, plain, rank):
    """Expect a state dict to have the keys, dtypes and shapes of the plain module's, on the CPU."""
    At(rank).equal("full_state_dict has the keys {}", [*state], [*plain])
    for name, value in plain.items():
        got, wanted = (
            f"a {show(x.dtype)} tensor of shape {tuple(x.shape)} on {x.device}" for x in (state[name], value)
        )
        why = causes.CONVERTED if state[name].dtype != value.dtype else ""
        At(rank, parameter=name).equal("full_state_dict has {}", got, wanted, why)
