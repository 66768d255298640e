"""Graded checks of module 14: weights in shards inside a node, and a replica in every node."""

from functools import partial

import pytest
import torch

from brigade.course.checks.expectations import MANY_STEPS, ONE_STEP, expect_equal, format_distinct, replace_cause
from brigade.ranks.claims import At, before, each_step, is_unchanged, show
from brigade.ranks.events import list_backward_passes
from brigade.ranks.runner.ranks import PerRank
from helpers.units import expect_optimizer_state, make_jobs
from m11_fully_sharded import scenario as fully_sharded
from m11_fully_sharded.expected import join_shards, lay_out, list_units, train_plain
from m14_hybrid_sharded import causes, scenario
from m14_hybrid_sharded.scenario import CROSSED, IN_BLOCKS, NESTED, QUIET, REPEATED, UNSYNCED

ALL = [0, 1, 2, 3]
DOUBLE = {"dtype": torch.float64, "hidden_layers": 4}
CASE_OPTIONS = ("steps", "micro_batches", "dtype", "hidden_layers", "forward_borders", "optimizer")


# ---- plans


@pytest.mark.parts("Part (a): the grid")
@pytest.mark.points(2)
def test_grid(submission):
    """plan_grid returns the shard groups, of consecutive ranks, and the replica groups. It refuses wrong sizes."""
    grids = [(6, 2), (6, 3), (4, 2), (4, 1), (4, 4), (1, 1), (5, 5)]
    grids += [(shards * submission.rng.randint(1, 9), shards) for shards in range(1, 9)]
    wrong = [(4, 3), (6, 4), (2, 4), (4, 0), (4, -1), (4, -2)]
    [(answers, _)] = submission.run(scenario.plan, grids + wrong, [], world_size=1)
    for arguments, answer in zip(grids + wrong, answers, strict=True):
        call = f"plan_grid{arguments}"
        if arguments in wrong:
            At().claim(f"{call} raises ValueError", answer == "ValueError", f"it returned {answer}", causes.NO_ERROR)
            continue
        expected = [sorted(groups) for groups in make_grid(list(range(arguments[0])), arguments[1])]
        got = answer if isinstance(answer, str) else [sorted(map(sorted, groups)) for groups in answer]
        what, why = f"{call} returns {expected[0]} and {expected[1]}", partial(causes.explain_groups, got, expected)
        At().claim(what, got == expected, f"it returned {answer}", why)


@pytest.mark.parts("Part (b): the traffic")
@pytest.mark.points(1)
def test_traffic(submission):
    """plan_traffic returns the bytes that a rank sends inside its node and to other nodes."""
    rng = submission.rng
    cases = [
        (10**9, 2, 8, 1, 4),
        (10**9, 2, 8, 4, 4),
        (2 * 10**9, 16, 8, 8, 2),
        (10**6, 1, 4, 2, 4),
        (10**6, 4, 1, 2, 4),
    ]
    cases += [tuple(rng.randint(1, most) for most in (2 * 10**9, 64, 16, 9)) + (4,) for _ in range(9)]
    [(_, answers)] = submission.run(scenario.plan, [], [*cases, cases[0][:4]], world_size=1)
    for arguments, got in zip([*cases, cases[0]], answers, strict=True):
        numel, replicas, shards, micro_batches, itemsize = arguments
        inner = 3 * micro_batches * numel * itemsize * (shards - 1) / shards
        expected = [inner, 2 * numel * itemsize / shards * (replicas - 1) / replicas]
        why = partial(causes.explain_traffic, got, expected, arguments)
        for name, value, exact in zip(("inner", "outer"), got, expected, strict=True):
            wanted, text = format_distinct(exact, value)
            what = f"plan_traffic{arguments} has {name} = {wanted} bytes"
            At().claim(what, abs(value - exact) <= 1 + 1e-9 * exact, f"{text} bytes", why)


# ---- the wrapper


@pytest.mark.parts("Parts (c) to (e): the wrapper")
@pytest.mark.points(2)
def test_same_start(submission):
    """All ranks of the grid start with the weights and buffers of its first rank, and keep 1/S of every unit."""
    settings = [
        ("Buffers", ALL, 2, {}),
        ("FrozenBlocks", ALL, 2, {}),
        ("Buffers", ALL, 1, {}),
        ("Blocks", ALL, 4, {}),
        ("Transposed", [1, 3], 1, {}),
        ("Buffers", [2, 3], 2, {}),
    ]
    for case, grid, results in run_cases(submission, scenario.construct, settings):
        expect_equal(
            f"every rank of the grid starts with the weights and buffers of rank {case.group[0]}",
            [results[rank]["start"] for rank in case.group],
            case.start(),
            ranks=case.group,
            hypotheses=partial(causes.suspect_start, case, grid.shards),
            tolerance=0.0,
        )
        sizes = [numel // grid.shards for numel in grid.list_numels()]
        for rank in case.group:
            at, (shard_ranks, _), result = At(rank), grid.get_groups(rank), results[rank]
            ranks = result["interface"]["process_group"]
            at.equal(
                "the ranks of .process_group, the shard group, are {}", ranks, str([*shard_ranks]), causes.OTHER_GROUP
            )
            what = f"with {grid.shards} ranks in a shard group, shards() have {{}} elements"
            at.equal(what, result["numels"], sizes)


@pytest.mark.points(4)
@pytest.mark.needs("test_same_start")
def test_weights_equal_plain_training(submission):
    """Gradients are averages over all ranks of the grid, and after 2 steps weights equal plain training's."""
    settings = [
        ("Blocks", ALL, 2, {"branches": [0b000, 0b010, 0b101, 0b100]}),
        ("TiedBlocks", ALL, 2, {"arguments": {"prefetch": 0}}),
        ("FrozenBlocks", ALL, 1, {"arguments": {"reshard_after_forward": False}}),
        ("Plain", ALL, 4, {"arguments": {"prefetch": 2}}),
        ("Blocks", [1, 3], 1, {}),
        ("Blocks", [1, 2], 2, {}),
    ]
    parts = ("gradients", "weights")
    for case, grid, results in run_cases(submission, scenario.train, settings, **DOUBLE, steps=2, parts=parts):
        for rank in case.group:
            what, is_right = "after finish_grad_sync every shard has a gradient", not any(results[rank]["missing"])
            At(rank).claim(what, is_right, "shard.grad is None for some shards")
        expected, scale = case.gradients_and_scale()
        expect_equal(
            "after finish_grad_sync the shards of each node have the gradients averaged over all ranks of the grid",
            [grid.join([results[rank]["gradients"] for rank in node]) for node in grid.nodes],
            expected,
            ranks=[node[0] for node in grid.nodes],
            hypotheses=partial(causes.suspect_gradients, case, grid.shards, results.events[case.group[0]]),
            evidence=partial(causes.find_mistake, results.events, grid),
            scale=scale,
            tolerance=ONE_STEP,
        )
        expect_trained(results, case, "weights after 2 steps")


@pytest.mark.points(3)
@pytest.mark.needs("test_same_start")
def test_collectives(submission):
    """A step makes an all-reduce per trainable shard in the replica group, and module 11's in the shard group."""
    settings = [
        ("Blocks", ALL, 2, {}),
        ("FrozenBlocks", ALL, 2, {}),
        ("Blocks", ALL, 4, {"arguments": {"reshard_after_forward": False}}),
        ("FrozenBlocks", ALL, 1, {}),
        ("Buffers", [0, 2], 1, {}),
    ]
    for case, grid, results in run_cases(
        submission, scenario.train, settings, steps=2, hidden_layers=4, parts=("trained",)
    ):
        for step in each_step(results.events, 2, case.group):
            expect_collectives(step, grid, results.events)


@pytest.mark.points(3)
def test_overlap(submission):
    """An all-reduce starts after its reduction, before the next unit but one computes, and runs until that has."""
    options = DOUBLE | {"steps": 2, "hidden_layers": 6, "forward_borders": True, "proven": 1, "parts": ("trained",)}
    settings = [
        ("Blocks", ALL, 2, {}),
        ("Blocks", ALL, 1, {"arguments": {"prefetch": 0}}),
        ("Blocks", ALL, 2, {"forward": "narrow norms"}),
    ]
    runs = run_cases(submission, scenario.train, settings, **options)
    for (*_, own), (case, grid, results) in zip(settings, runs, strict=True):
        for step in each_step(results.events, 2, case.group if len(grid.nodes) > 1 else []):
            expect_overlap(step, grid, 1 + ("forward" in own))


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_unusual_orders(submission):
    """An evaluation or a discarded forward changes nothing. A second backward before the finish is right or refused."""
    orders = [*fully_sharded.EXTRA[2:6], fully_sharded.TWO_BACKWARDS[0]]
    settings = [
        ("Blocks", ALL, 2, {"order": order, "number": 0, "micro_batches": 2 - isinstance(order, tuple)})
        for order in orders
    ]
    outcomes = run_cases(submission, scenario.train_unusually, settings, **DOUBLE, steps=2)
    for order, (case, _, results) in zip(orders, outcomes, strict=True):
        what = " ".join(order) if isinstance(order, tuple) else order
        refusals = [result["refusal"] for result in results if "refusal" in result]
        is_right = not refusals or fully_sharded.EVALUATION not in order
        At().claim(f"a step with {what} is right", is_right, f"RuntimeError: {refusals[:1]}")
        if not refusals:
            expect_trained(results, case, f"weights after 2 steps with {what}")


@pytest.mark.points(1)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_clipping_and_checkpoints(submission):
    """clip_grad_norm_ returns the norm of all gradients. State dicts equal the plain module's and fit every grid."""
    settings = [
        ("TiedBlocks", ALL, 2, {"clip": 0.1, "parts": ("gradients", "norm", "weights")}),
        ("Blocks", ALL, 2, {"steps": 4, "optimizer": "adam", "part": 0, "parts": ("weights", "optimizer")}),
    ]
    [(case, grid, clipped), (whole, _, saved)] = run_cases(submission, scenario.train, settings, **DOUBLE, steps=2)
    weights, norms, _ = train_plain(case, max_norm=0.1)
    for rank, result in enumerate(clipped):
        norm = result["norm"]
        wanted, got = format_distinct(norms[0], norm)
        what = f"clip_grad_norm_ returns the norm of all gradients, {wanted}"
        At(rank).claim(what, abs(norm - norms[0]) <= 1e-5 * norms[0], f"it returned {got}", causes.NORM)
    # torch adds 1e-6 to the norm. It is right to add it or not.
    expect_trained(clipped, case, "weights after 2 steps with gradients clipped to 0.1", weights, 1e-4)
    gradients = [grid.join([clipped[rank]["gradients"] for rank in node]) for node in grid.nodes]
    (average, scale), what = case.gradients_and_scale(), "the shards of each node have the average of the gradients"
    expect_equal(f"before clipping, {what}", gradients, average, scale=scale, tolerance=ONE_STEP)
    expect_trained(saved, whole, "weights in a state dict after 2 steps", train_plain(whole, range(2))[0])
    own = saved[0]["optimizer"]  # None if the wrapper has no full_optimizer_state_dict
    plain = train_plain(whole, range(2))[2]
    expect_optimizer_state([saved[rank]["optimizer"] for rank in whole.group], plain["state"])
    state = None if own is None else plain | {"state": own}
    jobs = Grid(whole, 1).make_jobs(part=1, load=(saved[0]["weights"], state))
    [resumed] = submission.run_each(scenario.train, [jobs])
    expect_trained(resumed, whole, "weights after shard groups of one rank load it and take 2 steps")


@pytest.mark.parts("Part (f): accumulation")
@pytest.mark.points(3)
@pytest.mark.needs("test_weights_equal_plain_training")
def test_no_replica_sync(submission):
    """In no_replica_sync, gradients are reduced inside the node and added up. The next finish averages the sum."""
    orders = [IN_BLOCKS, NESTED, QUIET, UNSYNCED, IN_BLOCKS, REPEATED, CROSSED]
    options = DOUBLE | {"steps": len(orders), "micro_batches": 3, "orders": orders}
    few = {"steps": 2, "orders": orders[:2]}
    settings = [("Blocks", ALL, 2, {}), ("FrozenBlocks", ALL, 1, few)]
    for case, grid, results in run_cases(submission, scenario.accumulate, settings, **options):
        for step in each_step(results.events, len(case.batches[0]), case.group):
            expect_accumulation(step, orders[step.number], grid)
        evidence = partial(causes.explain_nodes, results, grid)
        suspects = partial(causes.suspect_forgotten, case, orders[: len(case.batches[0])])
        what = "weights after steps of three micro-batches"
        expect_trained(results, case, what, evidence=evidence, hypotheses=suspects)


# ---- what the checks use


def make_grid(ranks, shards):
    """Return the shard groups and the replica groups of a grid of these ranks."""
    nodes = [ranks[start : start + shards] for start in range(0, len(ranks), shards)]
    return nodes, [list(group) for group in zip(*nodes, strict=True)]


class Grid:
    """The groups of a case's ranks. Every other rank of the run is alone in its groups."""

    def __init__(self, case, shards, is_resharded=True):
        self.case, self.shards, self.is_resharded = case, shards, is_resharded
        self.nodes, self.replica_groups = make_grid(case.group, shards)
        self.others = [[rank] for rank in range(case.world_size) if rank not in case.group]

    def make_jobs(self, part=None, **options):
        """Return the jobs of all ranks. With a `part`, they have only the first or the second half of the steps."""
        grid = [self.nodes + self.others, self.replica_groups + self.others]
        jobs, half = make_jobs(self.case, grid=grid, **options), len(self.case.batches[0]) // 2
        own = slice(None) if part is None else slice(part * half, (part + 1) * half)
        return PerRank(job | {"batches": job["batches"][own]} for job in jobs)

    def get_groups(self, rank):
        """Return the ranks of a rank's shard group, and those of its replica group."""
        return [next(g for g in groups if rank in g) for groups in (self.nodes, self.replica_groups)]

    def list_numels(self, trainable=True):
        """Return the lengths of the padded flat tensors, those of trainable or those of frozen parameters."""
        return sum(self.list_units(trainable), [])

    def list_units(self, trainable):
        """Return the same for each unit."""
        units = lay_out(self.case, trainable=trainable, size=self.shards)
        return [[layout["numel"] for layout, _ in unit.values()] for unit in units]

    def join(self, shards):
        """Return gradients by name, from those of the shards of all ranks of a node."""
        return join_shards(shards, lay_out(self.case, size=self.shards), self.case)


def run_cases(submission, function, settings, **common):
    """Run the function for each (model, ranks, shards, options), on the same ranks. Return case, grid and results."""
    [world], runs, jobs = submission.worlds(4), [], []
    for model, ranks, shards, own in settings:
        options = common | own
        branches = options.pop("branches", [0] * world)[:world]
        of_case = {key: options.pop(key) for key in CASE_OPTIONS if key in options}
        case = submission.case(model, world, group=ranks if world > 1 else [0], branches=branches, **of_case)
        is_resharded = options.get("arguments", {}).get("reshard_after_forward", True)
        runs.append((case, Grid(case, shards if world > 1 else 1, is_resharded)))
        jobs.append(runs[-1][1].make_jobs(**options))
    with replace_cause(partial(causes.explain_run, [grid for _, grid in runs])):
        return [(*run, results) for run, results in zip(runs, submission.run_each(function, jobs), strict=True)]


def expect_trained(results, case, what, weights=None, tolerance=MANY_STEPS, evidence=None, hypotheses=None):
    """Expect each state dict of the case's ranks to have these weights, by default those of all steps."""
    expected = train_plain(case)[0] if weights is None else weights
    state = [results[rank]["weights"] for rank in case.group]
    what = f"{what} equal those of plain training"
    more = {"evidence": evidence, "hypotheses": hypotheses}
    expect_equal(what, state, expected, ranks=case.group, tolerance=tolerance, **more)


def split(step, grid):
    """Return a rank's launches across nodes, those inside the node, and those in other groups."""
    launched, (shard_ranks, replica_ranks) = step.launches(), grid.get_groups(step.rank)
    crossing = launched.where(lambda one: one.ranks == replica_ranks != shard_ranks)  # none in a grid of one rank
    inner = launched.where(lambda one: one.ranks == shard_ranks)
    return crossing, inner, launched.where(lambda one: one.ranks not in (shard_ranks, replica_ranks))


def expect_collectives(step, grid, records):
    """Expect the collectives of a step in a rank's two groups, and none in other groups."""
    (shard_ranks, replica_ranks), whole = grid.get_groups(step.rank), grid.list_numels()
    crossing, inner, others = split(step, grid)
    numels = sorted(numel // grid.shards for numel in whole) if len(replica_ranks) > 1 else []
    crossing.claim(
        f"a step makes {len(numels) or 'no'} all-reduces in the replica group {replica_ranks}"
        + f", of {show(numels)} elements" * bool(numels),
        sorted((one.op, one.numel) for one in crossing) == [("all_reduce", numel) for numel in numels],
        "in this group it makes {these}",
        partial(causes.explain_crossing, records, grid),
    )
    what = f"all collectives of a step are in the shard group {shard_ranks} or in the replica group {replica_ranks}"
    others.claim(what, not others, f"{{these}} in {show({str(one.ranks) for one in others})}")
    units = [a + b for a, b in zip(grid.list_units(True), grid.list_units(False), strict=True)]
    times = 2 if grid.is_resharded else 1
    gathered = units[0] + sum(units[1:], []) * times
    wanted = sorted([("all_gather", numel) for numel in gathered] + [("reduce_scatter", numel) for numel in whole])
    made = sorted((one.op, one.numel) for one in inner if one.numel > 16)
    inner.claim(
        f"in the shard group, a step gathers the root once and each other unit {times} times, and reduces each once: "
        f"{sum(gathered + whole)} elements with padding",
        grid.shards == 1 or made == wanted,
        f"{sum(numel for _, numel in made)} elements: {{these}}",
    )


def expect_overlap(step, grid, dtypes):
    """Expect each unit's all-reduces between its reduce-scatters and the gradients of the next unit but one.

    `dtypes` is the number of dtypes in each unit except the root.
    """
    crossing, inner, _ = split(step, grid)
    reduced = inner.where(lambda one: one.op == "reduce_scatter")
    units = list_units(grid.case)
    count, ready = len(units), {unit: [] for unit in range(len(units))}
    for place, name in step.ready:
        ready[next(unit for unit, names in enumerate(units) if name in names)].append(place)
    order = [unit for unit in reversed(range(count)) for _ in range(dtypes if unit else 1)]  # one launch per dtype
    step.launches().where(lambda one: one.op != "all_gather").claim(
        f"a step of {count} units makes {len(order)} reduce-scatters and {len(order)} all-reduces",
        len(reduced) in (len(order), 0) and len(crossing) == len(order),
    )
    end = next(
        place for place, event in enumerate(step.events) if place > max(ready[0]) and event.get("phase") == "step"
    )
    for number, (unit, launch) in enumerate(zip(order, crossing, strict=True)):
        name = f"the all-reduce of unit {unit}" if unit else "the all-reduce of the root"
        step.claim(f"{name} is launched without waiting", not launch.sync, "the launch blocks", causes.SYNC)
        if reduced:
            is_after = any(wait < launch.place for wait in reduced[number].waits)
            step.claim(f"{name} comes after the wait for its reduce-scatter", is_after, "it comes earlier")
        is_awaited = any(wait < end for wait in launch.waits)
        step.claim(f"a rank waits for {name} before the optimizer's step", is_awaited, "it does not")
        if unit >= 3:
            why = causes.IN_FINISH * (crossing[0].place > step.ready[-1][0])
            what = f"{name} is launched before the first gradient of unit {unit - 2} is ready"
            step.claim(what, launch.place < min(ready[unit - 2]), "it is launched later", why)
            # Of two dtypes, the first: with one, the rank does not wait earlier.
            why = causes.AWAITED_IN_UNIT if order[number + 1] == unit else causes.AWAITED_AT_ONCE
            what = f"no rank waits for {name} before the last gradient of unit {unit - 2} is ready"
            step.claim(what, launch.waits[0] > max(ready[unit - 2]), "the rank waited earlier", why)
    crossing.satisfy("no shard's gradient changes before wait()", is_unchanged)


def expect_accumulation(step, order, grid):
    """Expect all-reduces only after the last backward of a step has begun, and a reduction for each finish."""
    crossing, inner, _ = split(step, grid)
    passes = list_backward_passes(step.events, step.number)
    count = len(grid.list_numels()) * (grid.case.world_size > 1)
    early, reduced = crossing.where(before(passes[-1])), inner.where(lambda one: one.op == "reduce_scatter")
    finishes = {IN_BLOCKS: 3, NESTED: 3, QUIET: 2, UNSYNCED: 1, REPEATED: 3, CROSSED: 3}[order]
    late = reduced.where(lambda one: one.phase != "backward")
    is_late = len(late) > finishes and order != UNSYNCED
    if order == REPEATED:
        what = f"with {order}, a step makes {{}} across nodes, {count} all-reduces for each finish"
        crossing.are_so_many(what, finishes * count)
    else:
        crossing.claim(
            f"with {order}, only the last of three backward passes makes all-reduces across nodes: {count}",
            len(crossing) == count and not early,
            f"{{count}} all-reduces, {len(early)} of them before the last backward",
            partial(causes.explain_accumulation, order, passes, is_late),
        )
    if grid.shards > 1:
        what = f"with {order}, a step makes {{}} inside the node, {count} reduce-scatters for each finish"
        reduced.are_so_many(what, finishes * count)
        what, got = f"with {order}, reduce-scatters are launched during backward", f"{len(late)} come after it"
        reduced.claim(what, not is_late, got, causes.NO_SYNC)
