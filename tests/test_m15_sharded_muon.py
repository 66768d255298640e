"""Graded checks of module 15: an optimizer that needs whole matrices."""

import math
from functools import partial

import pytest
import torch

from brigade.checks.content import Values
from brigade.checks.expectations import expect, expect_equal, join_names, list_steps, replace_cause
from brigade.checks.reference import draw_generators
from brigade.events import drop_flags, launches, summarize
from brigade.ipc.wire import DTYPES
from brigade.runner.ranks import PerRank
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
    for (matrix, is_transposed, options), answer in zip(problems, answers):
        dtype = str(matrix.dtype).removeprefix("torch.")
        rows, columns = matrix.shape
        where = f"for a {rows} × {columns} matrix in {dtype} with norm {matrix.double().norm():.3g}"
        where += " (a transposed view)" * is_transposed + f" and steps={options.get('steps', 5)}"
        is_kept, result = torch.equal(answer["given"], matrix), answer["result"]
        expect(is_kept, f"{where}, orthogonalize does not change the matrix", "it changed", causes.IN_PLACE)
        right = f"{where}, the result has the matrix's dtype and shape"
        wrong = f"it has {result.dtype} and the shape {tuple(result.shape)}"
        expect((result.dtype, result.shape) == (matrix.dtype, matrix.shape), right, wrong)
        expected, limit = orthogonalize(matrix, **options), PRECISION[matrix.dtype]
        error = float((result.double() - expected).norm()) / max(1e-30, float(expected.norm()))
        right = f"{where}, the relative error of the result is at most {limit:g} (2-norm)"
        why = partial(causes.explain_result, matrix, result, **options)
        expect(error <= limit or torch.equal(result.double(), expected), right, f"it is {error:.3g}", why)


@pytest.mark.points(1)
@pytest.mark.needs("test_orthogonalize")
def test_short_side(submission):
    """The matrix products of orthogonalize take at most 2 · steps · short² · (2 · long + short) FLOPs."""
    problems = [(torch.ones(shape), False, {"steps": 4}) for shape in ((24, 24), (12, 48), (48, 12), (1, 16), (16, 1))]
    [answers] = submission.run(scenario.orthogonalize_each, {"problems": problems}, world_size=1)
    for (matrix, _, _), answer in zip(problems, answers):
        rows, columns = matrix.shape
        limit = 8 * count_cost(matrix.shape)
        right = f"4 iterations of a {rows} × {columns} matrix take at most {limit:,} FLOPs"
        why = partial(causes.explain_flops, matrix.shape, answer["flops"])
        expect(answer["flops"] <= limit, right, f"they take {answer['flops']:,}", why)


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
    sides = (1, 4, 16, 48, 64, 256)
    problems += [
        ([(rng.choice(sides), rng.choice(sides)) for _ in range(rng.randint(1, 40))], rng.randint(1, 8))
        for _ in range(30)
    ]
    for number, owners in enumerate(ask(submission, "assign_matrices", problems)):
        shapes, size = problems[number]
        where = f"for {describe_shapes(shapes)} and {size} ranks, "
        is_valid = len(owners) == len(shapes) and set(owners) <= set(range(size))
        right = f"{where}assign_matrices returns {len(shapes)} numbers from 0 to {size - 1}"
        expect(is_valid, right, f"it returned {len(owners)}: {join_names(owners, 12)}")
        costs = [count_cost(shape) for shape in shapes]
        loads = [sum(cost for cost, owner in zip(costs, owners) if owner == rank) for rank in range(size)]
        mean, limit = sum(costs) / size, sum(costs) / size + max(costs, default=0)
        if number < 2 * len(RANKS):
            limit = min(limit, BALANCE * mean)
        right = f"{where}the largest sum of costs is at most {limit / max(mean, 1):.3f} times the mean"
        wrong = f"it is {max(loads) / max(mean, 1):.3f} times the mean"
        expect(max(loads) <= limit, right, wrong, partial(causes.explain_owners, shapes, size, owners))


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
    for number, groups in enumerate(ask(submission, "plan_groups", problems)):
        (shapes, owners, num_ranks, num_groups), is_real = problems[number], number < 2 * len(RANKS)
        where = f"for {describe_shapes(shapes)} with owners {join_names(owners) or 'none'}, {num_ranks} ranks and "
        where += f"{num_groups=}, "
        right = f"{where}plan_groups returns at most {num_groups} groups with {num_ranks} lists each, and none is empty"
        is_valid = len(groups) <= num_groups and all(len(rows) == num_ranks and any(rows) for rows in groups)
        wrong = f"it returned {len(groups)} groups with {join_names([sum(map(len, rows)) for rows in groups])} matrices"
        expect(is_valid, right, wrong, partial(causes.explain_groups, groups, num_ranks, num_groups))
        placed = sorted((i, rank) for rows in groups for rank, row in enumerate(rows) for i in row)
        right = f"{where}every matrix is in one group, in its owner's list"
        expect(placed == list(enumerate(owners)), right, "some are in another list, in several or in none")
        if is_real:
            numels = [rows * columns for rows, columns in shapes]
            buffers = [num_ranks * max(sum(numels[i] for i in row) for row in rows) for rows in groups]
            right = f"{where}plan_groups returns {num_groups} groups"
            why = causes.ONE_GROUP * (len(groups) == 1)
            expect(len(groups) == num_groups, right, f"it returned {len(groups)}", why)
            sizes = [sum(numels[i] for row in rows for i in row) for rows in groups]
            padding, largest = sum(buffers) / sum(numels), max(sizes) * len(sizes) / sum(sizes)
            why = partial(causes.explain_buffers, groups)
            right = f"{where}all buffers together have at most {PADDING} times the elements of the matrices"
            expect(padding <= PADDING, right, f"they have {padding:.3f} times as many", why)
            right = f"{where}the matrices of the largest group have at most {PADDING} times the mean number of elements"
            expect(largest <= PADDING, right, f"it has {largest:.3f} times the mean", why)


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
    right = "correct weights earn points only if gradients are reduce-scattered and weights are all-gathered"
    for world, (shapes, setting) in zip(submission.worlds(1, 2, 3, 4), settings):
        [(results, problem)] = train(submission, world, (shapes, 10, setting))
        expect_weights(results, problem)
        for at, _, launched in list_steps(results.events, 1, problem.job["group"] if world > 1 else []):
            ops = {launch.op for launch in drop_flags(launched)}
            wrong = f"the step launched {join_names(sorted(ops)) or 'nothing'}"
            is_right = ops == {"reduce_scatter", "all_gather"}
            expect(is_right, right, wrong, causes.NOT_SCATTERED, rank=at["rank"])


@pytest.mark.points(2)
@pytest.mark.needs("test_equals_one_process")
def test_launches(submission):
    """A step makes one reduce-scatter and one all-gather per group, as large as its buffer, and nothing else."""
    for results, at, launched in list_two_steps(submission, 3, {"num_groups": 3}, {}, {"num_groups": 1}):
        sizes = results[at["rank"]]["sizes"]
        events = results.events[at["rank"]]
        barriers = sum(event["kind"] == "launch" and event["op"] == "barrier" for event in events)
        right = f"a step launches one reduce-scatter and one all-gather for each of {len(sizes)} groups, of "
        right += f"{join_names(sizes)} elements, and nothing else"
        wrong = f"it made {summarize(launched, 12)}" + f" and {barriers} barriers" * bool(barriers)
        expected = [(op, size) for op in ("all_gather", "reduce_scatter") for size in sizes]
        is_right = sorted((x.op, x.numel) for x in launched) == expected and not barriers
        why = partial(causes.explain_launches, launched, sizes, len(MIXED_TWICE))
        expect(is_right, right, wrong, why, **at)
        raced = [x for x in launched if x.raced]
        right = "no tensor of a collective changes between launch and wait"
        expect(not raced, right, f"those of {summarize(raced)} change", **at)
        missed = [x for x in launched if not x.waits or x.wait_steps[0] != at["step"]]
        expect(not missed, "a step waits on every handle", f"it does not wait on {summarize(missed)}", **at)


@pytest.mark.points(2)
@pytest.mark.needs("test_launches")
def test_overlap(submission):
    """Reduce-scatters are all launched at once. Each all-gather travels while the next group is orthogonalized."""
    for _, at, launched in list_two_steps(submission, 2, {"num_groups": 4}, {}):
        reduces, gathers = ([x for x in launched if x.op == op] for op in ("reduce_scatter", "all_gather"))
        waits = sorted(x.waits[0] for x in reduces if not x.is_polled or x.sync)  # polling does not block
        early = sum(wait < max(x.place for x in reduces) for wait in waits)
        right = f"all {len(reduces)} reduce-scatters are launched before the first wait"
        wrong = f"the rank waits {early} times before it launches the last one"
        expect(not early, right, wrong, partial(causes.explain_reductions, reduces, gathers), **at)
        polled = sum(x.is_polled for x in reduces)
        why = causes.LATE_GATHERS if waits and gathers[0].place > waits[-1] else ""
        for number, wait in enumerate(waits):
            before = sum(x.place < wait for x in gathers)
            right = f"{number} all-gathers are launched before reduce-scatter {number} is awaited"
            expect(before >= number - polled, right, f"{before} are", why, **at)
        last = max(x.place for x in gathers)
        blocked = [x for x in gathers if (not x.is_polled or x.sync) and x.waits[0] < last]
        right = "no all-gather is awaited before all are launched"
        expect(not blocked, right, f"{len(blocked)} are", causes.EARLY_GATHER, **at)


@pytest.mark.points(2)
@pytest.mark.needs("test_assignment")
def test_flops(submission):
    """No rank computes more than 1.15 times its part of the matrix products, or than the largest matrix takes."""
    # With so many layers, the bound of assign_matrices, the mean plus the largest cost, is below the limit.
    settings = ([("Llama 3 8B", 6)], [("XL", 8), ("Llama 3 8B", 8)])
    for world, sizes in zip(submission.worlds(3, 4), settings):
        names = [f"{layers} small layers of {name}" for name, layers in sizes]
        runs = train(submission, world, *((SMALL[name] * layers, 1, {"counts": True}) for name, layers in sizes))
        for name, (results, problem) in zip(names, runs):
            costs = [10 * count_cost(shape) for shape in problem.shapes]
            limit = WORK * max(sum(costs) / world, max(costs))
            flops = [result["steps"][0]["flops"] for result in results]
            right = f"with {name}, each of {world} ranks computes at most {limit:,.0f} FLOPs per step"
            for rank, count in enumerate(flops):
                why = partial(causes.explain_work, problem.shapes, flops)
                expect(count <= limit, right, f"it computes {count:,}", why, rank=rank)
            right = f"torch computes the matrix products of {name}, so its counter sees about {sum(costs):,} FLOPs"
            expect(sum(flops) >= COUNTED * sum(costs), right, f"it sees {sum(flops):,} on all ranks")
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
    [(results, problem)] = train(submission, 2, (MIXED, 4, setting))
    expect_weights(results, problem)
    for rank, result in enumerate(results):
        right = "ShardedMuon is a subclass of torch.optim.Optimizer"
        expect(result["is_optimizer"], right, "it is not a subclass", rank=rank)
        right = "step calls the closure once, and returns what it returned"
        for step, answer in enumerate(result["steps"]):
            wrong = f"it called it {answer['calls']} times" + " and returned something else" * (not answer["is_loss"])
            is_right = answer["calls"] == 1 and answer["is_loss"]
            expect(is_right, right, wrong, causes.CLOSURE, rank=rank, step=step)
    matrix = torch.ones(4, 4)
    wrong = {
        "a vector": [matrix[0]],
        "a matrix and a parameter with 3 dimensions": [matrix, torch.ones(2, 2, 2)],
        "two dtypes": [matrix, matrix.double()],
    }
    [answers] = submission.run(scenario.refuse, {"problems": list(wrong.values())}, world_size=1)
    for name, answer in zip(wrong, answers):
        right = f"ShardedMuon raises ValueError for {name}"
        expect(answer == "ValueError", right, "it accepts them" if answer is None else f"it raised {answer}")


@pytest.mark.points(1)
@pytest.mark.needs("test_equals_one_process")
def test_momentum(submission):
    """Each matrix has its momentum on its owner and on no other rank, even if a rank owns nothing."""
    for results, problem in train(submission, 3, (MIXED, 2, {}), ([(4, 9), (9, 4)], 2, {})):
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
    setting = {"absent": absent, "transposed": [1, 4], "param_groups": [one, other], "saves": True, "labels": None}
    setting |= {"group": [1, 2], "groups": [[1, 2], [0]]} if world > 1 else {}
    # The second checkpoint comes before the first step. In the third, a rank owns nothing.
    kinds = (3, {"frozen": [2]}), (0, {"frozen": [2]}), (1, {"frozen": [0, 1, 2, 3, 4, 6]})
    for results, problem in train(submission, world, *((MIXED, steps, setting | frozen) for steps, frozen in kinds)):
        numbers = {i: str((one[0] + other[0]).index(i)) for i in problem.trainable()}
        momentum = {numbers[i]: value for i, value in problem.train()[1].items()}
        groups = [([0, 1, 2], problem.get_options(one[0][0], 0)), ([3, 4, 5, 6], problem.get_options(other[0][0], 0))]
        for rank in problem.job["group"]:
            saved = results[rank]["saved"]
            have = sorted(saved["momentum"], key=int)
            right = "before the first step, " * (not problem.gradients[0])
            right += f"state_dict()['state'] has momentum_buffer for {join_names(sorted(momentum, key=int))}"
            is_complete = set(have) == set(momentum) and None not in saved["momentum"].values()
            why = partial(causes.explain_numbers, have, momentum, numbers)
            expect(is_complete, right, f"it has {join_names(have) or 'nothing'}", why, rank=rank)
            wrong = f"they are on {join_names(saved['devices'])}"
            expect(saved["devices"] == ["cpu"], "state_dict returns tensors on the CPU", wrong, rank=rank)
            right = f"state_dict()['param_groups'] has these numbers and options: {groups}"
            expect(saved["groups"] == groups, right, f"it has {saved['groups']}", rank=rank)
        right = "the momentum in state_dict is that of one process"
        actual = [results[rank]["saved"]["momentum"] for rank in problem.job["group"]]
        events = results.events[problem.job["group"][0]]
        why = partial(causes.suspect_momentum, problem, numbers, momentum, events)
        expect_equal(right, actual, momentum, ranks=problem.job["group"], tolerance=EXACT, hypotheses=why)


@pytest.mark.points(1)
@pytest.mark.needs("test_state_dict")
def test_resharding(submission):
    """load_state_dict takes one process's checkpoint, at any world size, and each rank keeps its own part of it."""
    for world in submission.worlds(1, 3):
        saved = draw_problem(submission.rng, MIXED, 1, 1).gradients[0][0]
        load = dict(enumerate(saved)), [{"lr": 0.07, "momentum": 0.8, "weight_decay": 0.1, "steps": 3}]
        setting = {"transposed": [0, 3], "load": load, "saves": True, "labels": None}
        [(results, problem)] = train(submission, world, (MIXED, 3, setting))
        expect_weights(results, problem, "after a checkpoint has been loaded and ")
        for rank, result in enumerate(results):
            expect(result["is_kept"], "the loaded state dict keeps its entries", "some are removed", rank=rank)
        expect_momentum(results, problem)


# ---- what the checks use


def ask(submission, function, problems):
    """Return what a function of the submission returns for each list of arguments. All ranks must compute the same."""
    [world] = submission.worlds(2)
    job = {"function": function, "problems": problems}
    first, *others = submission.run(scenario.call_each, job, world_size=world)
    is_equal = all(other == first for other in others)
    expect(is_equal, f"all ranks compute the same {function}", "the ranks differ", causes.NOT_DETERMINISTIC)
    return first


def describe_shapes(shapes):
    """Return the name of a list, or its shapes."""
    names = [name for name, entries in LISTS.items() if entries == shapes]
    texts = [f"{rows} × {columns}" for rows, columns in shapes]
    return names[0] if names else f"matrices of {join_names(texts, 6)}" if texts else "no matrices"


def train(submission, world, *settings):
    """Train on a problem for each (shapes, steps, job), on the same ranks. Return pairs of results and problem."""
    [world] = submission.worlds(world)
    problems = [draw_problem(submission.rng, shapes, world, steps, **job) for shapes, steps, job in settings]
    jobs = [PerRank(problem.job | {"gradients": own} for own in problem.gradients) for problem in problems]
    with replace_cause(causes.explain_failed_run):
        return list(zip(submission.run_each(scenario.train, jobs), problems))


def list_two_steps(submission, world, *options):
    """Take two steps for each of these options. Yield results, `at` and launches of each rank and step."""
    for results, problem in train(submission, world, *((MIXED_TWICE, 2, {"options": own}) for own in options)):
        expect_weights(results, problem)
        for at, _, launched in list_steps(results.events if len(results) > 1 else [], 2):
            yield results, at, launched


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
    if not any(results.carried):
        return
    for rank, events in enumerate(results.events):
        numel = sum(x.numel for x in launches(events, 0) if x.op != "reduce_scatter")
        most = ROOM * sum(rows * columns for rows, columns in problem.shapes)
        right = f"besides reduce-scatters, a step launches at most {most:,.0f} elements"
        expect(numel <= most, right, f"it launches {numel:,}", rank=rank)
    calls = [call for own in results.carried for call in own if call.op != "reduce_scatter" and call.carried]
    gathered = Values(torch.frombuffer(bytearray(call.carried), dtype=DTYPES[call.dtype]) for call in calls)
    [weights], _ = problem.train()
    for i, (name, after) in enumerate(weights.items()):
        before, options = problem.job["start"][name], problem.get_options(i, 0)
        change = after - (1 - options["lr"] * options["weight_decay"]) * before
        direction = change / -options["lr"]
        forms = after, after - before, change, direction, direction / math.sqrt(max(1, len(after) / len(after[0])))
        right = f"all-gathers carry the new weights of {name}, or what the step adds to them"
        expect(any(gathered.contain(form, CLOSE) for form in forms), right, "they carry other numbers")


def expect_momentum(results, problem):
    """Expect optimizer.state to have the momentum of the matrices that the rank owns, and nothing else."""
    for rank, result in enumerate(results):
        names = [i for i, owner in enumerate(result["owners"]) if owner == rank]
        owned = [[i, 8 * math.prod(problem.shapes[i])] for i in names]
        right = f"optimizer.state has the momentum of the matrices that this rank owns: {join_names(names) or 'none'}"
        wrong = join_names([f"{count} bytes of matrix {i}" for i, count in result["owned"]], 4)
        is_everywhere = len(result["owned"]) == len(problem.trainable())
        why = causes.EVERYWHERE if is_everywhere else "" if result["owned"] else causes.NO_STATE
        expect(result["owned"] == owned, right, f"it has {wrong or 'nothing'}", why, rank=rank)
