"""Graded checks of module 15: an optimizer that needs whole matrices."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from brigade.course.checks.expectations import expect_equal, replace_cause
from brigade.course.checks.reference import draw_generators
from brigade.grader.witness.content import Values
from brigade.ranks.claims import At, before, each_step, is_unchanged, show
from brigade.ranks.ipc.wire import DTYPES
from brigade.ranks.runner.ranks import PerRank
from m15_sharded_muon import causes, scenario
from m15_sharded_muon.expected import LISTS, SMALL, assign, count_cost, draw_problem, orthogonalize

# Relative to the largest entry. The iteration amplifies rounding by up to 3.4445 ** 5 = 485 per step.
EXACT = 1e-9
PRECISION = {torch.float64: EXACT, torch.float32: 1e-3, torch.bfloat16: 0.15}  # of the 2-norm
BALANCE = 1.10  # the largest sum of costs, relative to the mean, on the reading's lists
PADDING = 1.25  # all buffers, relative to the matrices; the largest group, relative to the mean
WORK = 1.15  # FLOPs of a rank, relative to the larger of total / N and the largest matrix
ROOM = 1.5  # elements of a step's all-gathers, relative to the matrices; the reference has 1.0
CLOSE = 1e-6  # relative to the largest entry
COUNTED = 0.2  # the least part of all FLOPs that the counter must see
RANKS = range(2, 17)
MIXED = [(6, 9), (9, 6), (7, 7), (1, 12), (12, 1), (5, 16), (16, 5)]
MIXED_TWICE = MIXED + MIXED[:5]
ORTHOGONALIZED = (  # shape, dtype, norm and options
    *((shape, torch.float64, None, {}) for shape in MIXED),
    ((8, 5), torch.float64, 1e-7, {}),
    ((4, 6), torch.float64, 0, {}),
    ((3, 8), torch.float64, None, {"steps": 2}),
    ((6, 16), torch.float32, None, {}),
    ((6, 16), torch.bfloat16, None, {}),
)


# ---- pure functions


@pytest.mark.parts("Part (a): orthogonalize")
@pytest.mark.points(2)
def test_orthogonalize(submission):
    """orthogonalize returns the result of the iteration in the dtype of the matrix, and does not change the matrix."""
    problems = []
    [generator] = draw_generators(submission.rng, 1)
    for number, (shape, dtype, norm, options) in enumerate(ORTHOGONALIZED):
        matrix = torch.randn(shape, dtype=torch.float64, generator=generator)
        matrix = (matrix if norm is None else matrix * norm / matrix.norm()).to(dtype)
        problems.append((matrix, number % 2 == 1, options))
    [answers] = submission.run(scenario.orthogonalize_each, {"problems": problems}, world_size=1)
    for (matrix, is_transposed, options), answer in zip(problems, answers, strict=True):
        where = f"for a {describe_matrix(matrix)} with norm {matrix.double().norm():.3g}"
        where += " (a transposed view)" * is_transposed + f" and steps={options.get('steps', 5)}, "
        is_kept, result = torch.equal(answer["given"], matrix), answer["result"]
        At().claim(f"{where}orthogonalize does not change the matrix", is_kept, "it changed", causes.IN_PLACE)
        At().equal(f"{where}the result is a {{}}", describe_matrix(result), describe_matrix(matrix))
        expected, why = orthogonalize(matrix, **options), partial(causes.explain_result, matrix, result, **options)
        error = float((result.double() - expected).norm()) / max(1e-30, float(expected.norm()))
        At().at_most(f"{where}the relative error of the result is {{}} (2-norm)", error, PRECISION[matrix.dtype], why)


@pytest.mark.points(1)
@pytest.mark.needs("test_orthogonalize")
def test_short_side(submission):
    """The matrix products of orthogonalize take at most 2 · steps · short² · (2 · long + short) FLOPs."""
    problems = [(torch.ones(shape), {"steps": 4}) for shape in ((24, 24), (12, 48), (48, 12), (1, 16), (16, 1))]
    [answers] = submission.run(scenario.count_flops, {"problems": problems}, world_size=1)
    for (matrix, _), flops in zip(problems, answers, strict=True):
        what = f"4 iterations of a {describe_matrix(matrix)} take {{}} FLOPs"
        At().at_most(what, flops, 8 * count_cost(matrix.shape), partial(causes.explain_flops, matrix.shape, flops))


@pytest.mark.parts("Part (b): which rank owns which matrix")
@pytest.mark.points(2)
def test_assignment(submission):
    """assign_matrices balances the ranks' work on two real models, and never exceeds the mean plus the largest cost."""
    rng = submission.rng
    problems = [(shapes, size) for shapes in LISTS.values() for size in RANKS]
    problems += [([], 3), ([(4, 4)], 3), ([(1, 64)] * 16 + [(16, 16)] * 4, 4), ([(16, 16)] * 4 + [(1, 64)] * 16, 4)]
    problems += [([(16, 16), (1, 256)] * 6, 2), ([(1, 256), (16, 16)] * 6, 2)]  # equal numbers of elements
    first = [(16, 17), (16, 16), (16, 17), (4, 256)]  # the largest ones are not in turn
    problems += [(first + [(16, 16), (4, 256)] * 16, 2)]  # otherwise equal long · short²
    problems += [([(16, 700)] + [(48, 48)] * 5, 2)]  # of which the five have fewer elements than two of the first
    sides = (1, 4, 16, 48, 64, 256)
    problems += [
        ([(rng.choice(sides), rng.choice(sides)) for _ in range(rng.randint(1, 40))], rng.randint(1, 8))
        for _ in range(30)
    ]
    for (shapes, size), owners in ask(submission, "assign_matrices", problems):
        where = f"for {describe_shapes(shapes)} and {size} ranks, "
        At().claim(
            f"{where}assign_matrices returns {len(shapes)} numbers from 0 to {size - 1}",
            len(owners) == len(shapes) and set(owners) <= set(range(size)),
            f"it returned {len(owners)}: {show(owners)}",
        )
        costs = [count_cost(shape) for shape in shapes]
        load = max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)
        )
        mean, limit = sum(costs) / size, sum(costs) / size + max(costs, default=0)
        if shapes in LISTS.values():
            limit = min(limit, BALANCE * mean)
        At().claim(
            f"{where}the largest sum of costs is at most {limit / max(mean, 1):.3f} times the mean",
            load <= limit,
            f"it is {load / max(mean, 1):.3f} times the mean",
            partial(causes.explain_owners, shapes, size, owners),
        )


@pytest.mark.parts("Part (c): which matrices travel together")
@pytest.mark.points(2)
def test_groups(submission):
    """plan_groups puts every matrix into one group, with its owner. On two real models, buffers have little padding."""
    rng = submission.rng
    problems = [(shapes, assign(shapes, size), size, 4) for shapes in LISTS.values() for size in RANKS]
    problems += [([(3, 4)] * 5, [0, 2, 2, 0, 2], 3, 2), ([(3, 4)] * 2, [1, 1], 4, 5), ([], [], 2, 4)]
    for _ in range(30):
        size, count = rng.randint(1, 6), rng.randint(1, 12)
        shapes = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
        problems.append((shapes, [rng.randrange(size) for _ in range(count)], size, rng.randint(1, 6)))
    for (shapes, owners, num_ranks, num_groups), groups in ask(submission, "plan_groups", problems):
        where = f"for {describe_shapes(shapes)} with owners {show(owners)}, {num_ranks} ranks and {num_groups=}, "
        At().claim(
            f"{where}plan_groups returns at most {num_groups} groups with {num_ranks} lists each, and none is empty",
            len(groups) <= num_groups and all(len(rows) == num_ranks and any(rows) for rows in groups),
            f"it returned {len(groups)} groups with {show([sum(map(len, rows)) for rows in groups])} matrices",
            partial(causes.explain_groups, groups, num_ranks, num_groups),
        )
        placed = sorted((i, rank) for rows in groups for rank, row in enumerate(rows) for i in row)
        what = f"{where}every matrix is in one group, in its owner's list"
        At().claim(what, placed == list(enumerate(owners)), "some are in another list, in several or in none")
        if shapes in LISTS.values():
            why = causes.ONE_GROUP * (len(groups) == 1)
            At().equal(f"{where}plan_groups returns {{}} groups", len(groups), num_groups, why)
            numels = [rows * columns for rows, columns in shapes]
            buffers = [num_ranks * max(sum(numels[i] for i in row) for row in rows) for rows in groups]
            sizes = [sum(numels[i] for row in rows for i in row) for rows in groups]
            for what, ratio in (
                ("all buffers together have {} times the elements of the matrices", sum(buffers) / sum(numels)),
                ("the largest group has {} times the mean number of elements", max(sizes) * len(sizes) / sum(sizes)),
            ):
                At().at_most(where + what, ratio, PADDING, partial(causes.explain_buffers, groups, what))


# ---- the optimizer


@pytest.mark.parts("Parts (d) to (f): a step")
@pytest.mark.points(3)
@pytest.mark.needs("test_orthogonalize")
def test_equals_one_process(submission):
    """After each of 10 steps, all ranks have the weights of one process. A gradient that is None counts as zeros."""
    everybody = [(5, i, range(4)) for i in range(len(MIXED))]
    absent = [(1, 0, [1]), (2, 0, [0]), (4, 2, [0, 1, 2, 3]), (7, 3, [1, 2]), *everybody]
    absent += [(3, i, [1]) for i in range(len(MIXED))]  # one rank has no gradients
    absent += [(step, 6, range(4)) for step in range(6, 10)]
    settings = (
        (MIXED[:5], {"options": {"momentum": 0.0}, "transposed": [1]}),
        (MIXED, {"absent": absent, "transposed": [0, 4, 6], "options": {"weight_decay": 0.3, "lr": 0.05}}),
        ([(4, 9), (9, 4)], {"absent": [(2, 0, [0, 1]), (3, 1, [2])], "options": {"lr": 0.1}}),
        (MIXED, {"absent": absent, "group": [1, 3], "groups": [[1, 3], [0, 2]]}),
    )
    what = "correct weights earn points only if gradients are reduce-scattered and weights are all-gathered"
    for world, (shapes, setting) in submission.pair_worlds((1, 2, 3, 4), settings):
        [(results, problem)] = train(submission, world, (shapes, 10, setting))
        expect_weights(results, problem)
        for step in each_step(results.events, 1, problem.job["group"] if world > 1 else []):
            launched = step.launches().without_flags()
            is_right = {one.op for one in launched} == {"reduce_scatter", "all_gather"}
            launched.claim(what, is_right, cause=causes.NOT_SCATTERED)


@pytest.mark.points(2)
def test_launches(submission):
    """A step makes one reduce-scatter and one all-gather per group, as large as its buffer, and nothing else."""
    options = {"num_groups": 3}, {}, {"num_groups": 1}
    for step, result, problem in list_two_steps(submission, 3, *options, parts=["sizes"]):
        launched, sizes = step.launches(), result["sizes"]
        limit, numel = problem.job["options"].get("num_groups", 4), sum(map(math.prod, problem.shapes))
        what, is_right = f"plan_groups returns at most {limit} groups", len(sizes) <= limit and sum(sizes) >= numel
        step.claim(f"{what}, with all {numel} elements", is_right, f"the groups have {show(sizes)} elements")
        launched.claim(
            f"a step launches one reduce-scatter and one all-gather for each of {len(sizes)} groups, of {show(sizes)} "
            "elements, and nothing else",
            sorted((one.op, one.numel) for one in launched) == sorted(product(("all_gather", "reduce_scatter"), sizes)),
            cause=partial(causes.explain_launches, sizes, len(MIXED_TWICE)),
        )
        barriers = sum(event["kind"] == "launch" and event["op"] == "barrier" for event in step.events)
        step.equal("a rank makes {} barriers", barriers, 0)
        launched.satisfy("no tensor of a collective changes between launch and wait", is_unchanged)
        launched.satisfy("a step waits on every handle", lambda one: one.wait_steps[:1] == [one.step])


@pytest.mark.points(2)
@pytest.mark.needs("test_launches")
def test_overlap(submission):
    """Reduce-scatters are all launched at once. Each all-gather travels while the next group is orthogonalized."""
    for step, *_ in list_two_steps(submission, 2, {"num_groups": 4}, {}):
        reduces, gathers = step.launches("reduce_scatter"), step.launches("all_gather")
        step.launches().claim("a step launches reduce-scatters and all-gathers", bool(reduces and gathers))
        what = "no {} is awaited before all are launched"
        reduces.satisfy(what.format("reduce-scatter"), waits_after(reduces), causes.explain_reductions)
        waits, polled = sorted(one.waits[0] for one in reduces.where(blocks)), sum(one.is_polled for one in reduces)
        for number, wait in enumerate(waits):
            launched, why = gathers.where(before(wait)), causes.LATE_GATHERS * (gathers[0].place > waits[-1])
            expected = f"{number} all-gathers are launched before reduce-scatter {number} is awaited"
            launched.claim(expected, len(launched) >= number - polled, "{count} are", why)
        gathers.satisfy(what.format("all-gather"), waits_after(gathers), causes.EARLY_GATHER)


@pytest.mark.points(2)
def test_flops(submission):
    """No rank computes more than 1.15 times its part of the matrix products, or than the largest matrix takes."""
    # With so many layers, the bound of assign_matrices, the mean plus the largest cost, is below the limit.
    settings = ([("Llama 3 8B", 6)], [("XL", 8), ("Llama 3 8B", 8)])
    for world, sizes in submission.pair_worlds((3, 4), settings):
        names = [f"{layers} small layers of {name}" for name, layers in sizes]
        runs = train(submission, world, *((SMALL[name] * layers, 1, {"counts": True}) for name, layers in sizes))
        for name, (results, problem) in zip(names, runs, strict=True):
            costs = [10 * count_cost(shape) for shape in problem.shapes]
            flops = [result["steps"][0]["flops"] for result in results]
            limits = [WORK * max(sum(costs) / world, *costs)] * world
            if max(flops) > limits[0]:  # a wrong plan loses only its own points: here, judge by the work that it plans
                [(_, owners)] = ask(submission, "assign_matrices", [(problem.shapes, world)])
                loads = [sum(costs[i] for i, own in enumerate(owners[: len(costs)]) if own == r) for r in range(world)]
                limits = [max(limit, WORK * load) for limit, load in zip(limits, loads, strict=True)]
            for rank, (count, limit) in enumerate(zip(flops, limits, strict=True)):
                what, why = f"with {name} on {world} ranks, a rank computes {{}} FLOPs per step", causes.explain_work
                At(rank).at_most(what, count, int(limit), partial(why, problem.shapes, flops))
            what = f"torch computes the matrix products of {name}, so its counter sees about {sum(costs):,} FLOPs"
            At().claim(what, sum(flops) >= COUNTED * sum(costs), f"it sees {sum(flops):,} on all ranks")
            expect_divided(results, problem)


@pytest.mark.points(1)
@pytest.mark.needs("test_equals_one_process")
def test_options(submission):
    """Parameter groups, schedulers, frozen matrices and closures work. Other parameters are refused with ValueError."""
    one = ([4, 0, 2], {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.2, "steps": 3})
    other = ([1, 3, 5, 6], {})
    options = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "steps": 4, "num_groups": 2}
    lrs = [[0.1 / (1 + step), 0.03 * (1 + step)] for step in range(4)]
    setting = {"frozen": [2, 3], "param_groups": [one, other], "options": options, "scheduler": lrs, "closure": True}
    setting |= {"parts": ["is_optimizer"]}
    [(results, problem)] = train(submission, 2, (MIXED, 4, setting))
    expect_weights(results, problem)
    for rank, result in enumerate(results):
        what = "ShardedMuon is a subclass of torch.optim.Optimizer"
        At(rank).claim(what, result["is_optimizer"], "it is not a subclass")
        for step, answer in enumerate(result["steps"]):
            at, what = At(rank, step), "step returns what the closure returned"
            at.equal("calls of the closure in step: {}", answer["calls"], 1, causes.CLOSURE)
            at.claim(what, answer["is_loss"], "it returned something else", causes.CLOSURE)
    matrix = torch.ones(4, 4)
    refused = {
        "a vector": [matrix[0]],
        "a matrix and a parameter with 3 dimensions": [matrix, torch.ones(2, 2, 2)],
        "two dtypes": [matrix, matrix.double()],
    }
    [answers] = submission.run(scenario.refuse, {"problems": list(refused.values())}, world_size=1)
    for name, answer in zip(refused, answers, strict=True):
        At().equal(f"ShardedMuon raises {{}} for {name}", answer or "nothing", "ValueError")


@pytest.mark.points(1)
def test_momentum(submission):
    """Each matrix has its momentum on its owner and on no other rank, even if a rank owns nothing."""
    setting = {"parts": ["owners", "owned"]}
    for results, problem in train(submission, 3, (MIXED, 2, setting), ([(4, 9), (9, 4)], 2, setting)):
        expect_momentum(results, problem)


# ---- checkpoints


@pytest.mark.parts("Parts (g) and (h): checkpoints")
@pytest.mark.points(1)
@pytest.mark.needs("test_momentum")
def test_state_dict(submission):
    """state_dict returns one process's momentum and options, on the CPU, on every rank."""
    absent = [(1, 0, [1]), (2, 0, [0, 2]), (2, 1, [0, 1, 2])]
    one, other = ([4, 0, 2], {"lr": 0.1, "momentum": 0.5}), ([1, 3, 5, 6], {"weight_decay": 0.1})
    [world] = submission.worlds(3)
    setting = {"absent": absent, "transposed": [1, 4], "param_groups": [one, other], "parts": ["saved"]}
    setting |= {"counts_launches": False}
    setting |= {"group": [1, 2], "groups": [[1, 2], [0]]} if world > 1 else {}
    # The second checkpoint comes before the first step. In the third, a rank owns nothing.
    kinds = (3, {"frozen": [2]}), (0, {"frozen": [2]}), (1, {"frozen": [0, 1, 2, 3, 4, 6]})
    for results, problem in train(submission, world, *((MIXED, steps, setting | frozen) for steps, frozen in kinds)):
        numbers = {i: str((one[0] + other[0]).index(i)) for i in problem.trainable()}
        momentum = {numbers[i]: value for i, value in problem.train()[1].items()}
        groups = [([0, 1, 2], problem.get_options(one[0][0], 0)), ([3, 4, 5, 6], problem.get_options(other[0][0], 0))]
        wanted, group = sorted(momentum, key=by_number), problem.job["group"]
        for rank in group:
            at, saved = At(rank), results[rank]["saved"]
            have = [i + " (None)" * (saved["momentum"][i] is None) for i in sorted(saved["momentum"], key=by_number)]
            what = "before the first step, " * (not problem.gradients[0])
            what += "state_dict()['state'] has momentum_buffer for {}"
            at.equal(what, have, wanted, partial(causes.explain_numbers, saved["momentum"], momentum, numbers))
            at.equal("state_dict returns tensors on these devices: {}", saved["devices"], ["cpu"])
            what = f"state_dict()['param_groups'] has these numbers and options: {groups}"
            at.claim(what, saved["groups"] == groups, f"it has {saved['groups']}")
        what = "the momentum in state_dict is that of one process"
        actual = [results[rank]["saved"]["momentum"] for rank in group]
        why = partial(causes.suspect_momentum, problem, numbers, momentum, results.events[group[0]])
        expect_equal(what, actual, momentum, ranks=group, tolerance=EXACT, hypotheses=why)


@pytest.mark.points(1)
@pytest.mark.needs("test_state_dict")
def test_resharding(submission):
    """load_state_dict takes one process's checkpoint, at any world size, and each rank keeps its own part of it."""
    for world in submission.worlds(1, 3):
        saved = draw_problem(submission.rng, MIXED, 1, 1).gradients[0][0]
        load = dict(enumerate(saved)), [{"lr": 0.07, "momentum": 0.8, "weight_decay": 0.1, "steps": 3}]
        setting = {"transposed": [0, 3], "load": load, "saves": True, "counts_launches": False}
        setting |= {"parts": ["is_kept", "owners", "owned"]}
        [(results, problem)] = train(submission, world, (MIXED, 3, setting))
        expect_weights(results, problem, "after a checkpoint has been loaded and ")
        for rank, result in enumerate(results):
            At(rank).claim("the loaded state dict keeps its entries", result["is_kept"], "some are removed")
        expect_momentum(results, problem)


# ---- what the checks use


def ask(submission, function, problems):
    """Return pairs of arguments and what a function of the submission returns. All ranks must compute the same."""
    [world] = submission.worlds(2)
    job = {"function": function, "problems": problems}
    first, *others = submission.run(scenario.call_each, job, world_size=world)
    what, is_same = f"all ranks compute the same {function}", all(other == first for other in others)
    At().claim(what, is_same, "the ranks differ", causes.NOT_DETERMINISTIC)
    return zip(problems, first, strict=True)


def describe_matrix(matrix):
    """Return text such as: 6 × 9 matrix in float64"""
    return f"{' × '.join(map(str, matrix.shape))} matrix in {show(matrix.dtype)}"


def describe_shapes(shapes):
    """Return the name of a list, or its shapes."""
    names = [name for name, entries in LISTS.items() if entries == shapes]
    texts = [f"{rows} × {columns}" for rows, columns in shapes]
    return names[0] if names else f"matrices of {show(texts)}" if texts else "no matrices"


def train(submission, world, *settings):
    """Train on a problem for each (shapes, steps, job), on the same ranks. Return pairs of results and problem.

    Ranks outside of job["group"] return no parts.
    """
    [world] = submission.worlds(world)
    problems = [draw_problem(submission.rng, shapes, world, steps, **job) for shapes, steps, job in settings]
    jobs = [PerRank(make_job(problem, rank) for rank in range(world)) for problem in problems]
    with replace_cause(causes.explain_failed_run):
        return list(zip(submission.run_each(scenario.train, jobs), problems, strict=True))


def by_number(name):
    """Return the key that sorts numbers that are texts, and other texts too."""
    return len(name), name


def make_job(problem, rank):
    """Return the job of a rank."""
    job = problem.job
    return job | {"gradients": problem.gradients[rank], "parts": job["parts"] if rank in job["group"] else []}


def list_two_steps(submission, world, *options, parts=()):
    """Take two steps for each of these options. Yield each step of each rank, the rank's result, and the problem."""
    for results, problem in train(
        submission, world, *((MIXED_TWICE, 2, {"options": own, "parts": parts}) for own in options)
    ):
        expect_weights(results, problem)
        for step in each_step(results.events if len(results) > 1 else [], 2):
            yield step, results[step.rank], problem


def blocks(launch):
    """Return whether the first wait for a launch can block. It cannot after polling until the launch is complete."""
    return launch.sync or not launch.is_polled


def waits_after(launched):
    """Return whether no wait for a launch blocks before all these launches are made, as a condition."""
    last = max((one.place for one in launched), default=0)
    return lambda launch: not blocks(launch) or launch.waits[0] > last


def expect_weights(results, problem, after=""):
    """Expect the weights of one process after every step."""
    history, _ = problem.train()
    for step, weights in enumerate(history):
        actual = [results[rank]["steps"][step]["weights"] for rank in problem.job["group"]]
        what = f"{after}after {step + 1} step{'s' * (step > 0)}, the weights are those of one process"
        why = partial(causes.suspect_weights, problem, step, weights, actual)
        expect_equal(what, actual, weights, ranks=problem.job["group"], tolerance=EXACT, hypotheses=why)


def expect_divided(results, problem):
    """Expect that no rank can have computed the part of others in a step, because it has only averages of its own part.

    The grader's switch shows this, whatever the ranks report. Reduce-scatters give each rank its part. All other
    launches carry the new weights or what the step adds to them, and have no room for averages too.
    """
    if results.carried is None:
        return
    for step in each_step(results.events, 1):
        numel = sum(one.numel for one in step.launches() if one.op != "reduce_scatter")
        most = ROOM * sum(rows * columns for rows, columns in problem.shapes)
        step.at_most("besides reduce-scatters, a step launches {} elements", numel, most)
    calls = [call for own in results.carried for call in own if call.op != "reduce_scatter" and call.carried]
    gathered = Values(torch.frombuffer(bytearray(call.carried), dtype=DTYPES[call.dtype]) for call in calls)
    [weights], _ = problem.train()
    for i, (name, after) in enumerate(weights.items()):
        old, options = problem.job["start"][name], problem.get_options(i, 0)
        change = after - (1 - options["lr"] * options["weight_decay"]) * old
        direction = change / -options["lr"]
        forms = after, after - old, change, direction, direction / math.sqrt(max(1, len(after) / len(after[0])))
        what = f"all-gathers carry the new weights of {name}, or what the step adds to them"
        At().claim(
            what, any(gathered.contain(x, CLOSE * float(x.abs().max())) for x in forms), "they carry other numbers"
        )


def expect_momentum(results, problem):
    """Expect optimizer.state to have the momentum of the matrices that the rank owns, and nothing else."""
    what = "optimizer.state has the momentum of the matrices that this rank owns: {}"
    owners = results[0]["owners"]
    for rank, result in enumerate(results):
        is_same = result["owners"] == owners
        At(rank).claim("all ranks compute the same owners", is_same, "the ranks differ", causes.NOT_DETERMINISTIC)
        owned = [[i, 8 * math.prod(problem.shapes[i])] for i, owner in enumerate(owners) if owner == rank]
        actual, expected = ([f"{count} bytes of matrix {i}" for i, count in own] for own in (result["owned"], owned))
        At(rank).equal(what, actual, expected, causes.explain_momentum(actual, len(problem.trainable())))
