"""Graded checks of module 8: optimizer state that is shared among the ranks."""

import copy
import math
from functools import partial

import pytest
import torch
from test_m05_grad_buffer import planned

from brigade.checks import edge_case_models
from brigade.checks.expectations import MANY_STEPS, expect, expect_equal, format_distinct, listing, same
from brigade.checks.reference import loss_of
from brigade.checks.verdict import CheckFailed
from brigade.events import launches, summary
from brigade.runner.ranks import PerRank
from scenarios import m08_sharded, m08_zero

# The relative error that a right norm may have, by the dtype in which it is returned. A Python number (None) does not
# say in which dtype it was computed, and float32 is precise enough.
NORMS = {torch.float64: MANY_STEPS, torch.float32: 1e-5, None: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def rounding_of(results):
    """Return the relative error that the norms of these ranks may have."""
    return max(NORMS.get(dtype, MANY_STEPS) for result in results for dtype in result["norm_dtypes"])


# ShardedOptimizer


def unsharded(case, job, ranks=None, steps=None, forget=False):
    """What one process has, training on the batches of `ranks` (the case's group) with the plain optimizer.

    With `forget` the optimizer is a new one in every step.
    """
    model = edge_case_models.build(case.model, case.sizes, case.start(), case.dtype)
    batches = [[case.batches[rank][step][0] for rank in ranks or case.group] for step in range(len(case.batches[0]))]
    batches = batches[:steps]

    def clip(max_norm):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if norm < max_norm and "grow" in job:
            for parameter in model.parameters():
                parameter.grad *= max_norm / (norm + 1e-6)
        return norm

    for part in [[step] for step in batches] if forget else [batches]:
        optimizer = getattr(torch.optim, job["optimizer"])(m08_sharded.params_of(job, model), **job["options"])
        found = m08_sharded.loop(job, model, optimizer, part, clip)
    return found


def wrong_root(case, events):
    """Says which parameter is not broadcast from the rank to which its gradient was reduced, if there is one."""
    parameters = case.parameters()
    sizes = [parameter.numel() for parameter in parameters.values()]
    for name, parameter in parameters.items():
        found = [event for event in events if event["kind"] == "launch" and event["numel"] == parameter.numel()]
        to, source = ([event["root"] for event in found if event["op"] == op] for op in ("reduce", "broadcast"))
        if sizes.count(parameter.numel()) == 1 and to and source and to[0] != source[0]:
            return f"the gradient of {name} goes to rank {to[0]} of the group, its weights come from rank {source[0]}"
    return ""


def first_step_hypotheses(case, job, found, events):
    """Causes of wrong weights after the first step, with the values that each would give."""
    start, size = case.start(), len(case.group)
    one = unsharded(case, job, steps=1)["weights"][0]
    own = [unsharded(case, job, [rank], steps=1)["weights"][0] for rank in case.group]
    owners = [
        {name: next((o[name] for o in own if same(o[name], tensors[name])), own[0][name]) for name in one}
        for tensors in found
    ]
    frozen = {name for name, parameter in case.parameters().items() if not parameter.requires_grad}
    stepped = {name for name in one if any(not same(tensors[name], start[name]) for tensors in found)}
    hypotheses = {}
    if wrong := wrong_root(case, events):
        hypotheses[f"{wrong}: both must be its owner?"] = found
    hypotheses["the owner steps with its own gradient: it is not reduced, or the result is not used?"] = owners
    for factor, cause in (
        (size, f"gradients are {size}× too large: summed over the ranks, not averaged?"),
        (size / case.world_size, f"gradients are divided by {case.world_size}, the size of the world?"),
        (1 / size, f"gradients are {size}× too small: divided twice?"),
        (size / 2, f"gradients are divided by 2 where the group has {size} ranks?"),
    ):
        if factor != 1:
            hypotheses[cause] = [{name: start[name] + factor * (one[name] - start[name]) for name in one}] * size
    if any(not torch.equal(tensors[name], start[name]) for name in frozen for tensors in found):
        hypotheses["a frozen parameter is stepped, and weight decay moves it: it must have no gradient?"] = [
            {name: (tensors if name in frozen else one)[name] for name in one} for tensors in found
        ]
    hypotheses["new weights reach some ranks only: every parameter must be broadcast from its owner?"] = [
        {name: start[name] if name in stepped else one[name] for name in one}
    ] * size
    hypotheses["no rank has stepped it: does a rank compare the owner with its rank in the group?"] = [start] * size
    return hypotheses


def expect_unsharded(results, case, job, hypotheses=None, tolerance=MANY_STEPS):
    """After the first step and after the last, the case's group has the weights that the unsharded optimizer gives.

    `hypotheses` maps a cause to changes of the job with which one process would get the wrong weights too.
    """
    for rank in case.group:
        expect(
            not results[rank]["left"],
            "after optimizer.zero_grad() no parameter has a gradient, whoever owns it",
            f"rank {rank}: {listing(results[rank]['left'])} have",
            "zero_grad of the inner optimizer reaches only the parameters that this rank owns",
        )
    truth = unsharded(case, job)["weights"]
    for step, count in ((0, "one step"), (-1, f"{len(truth)} steps")):
        what = f"weights after {count} of {job['optimizer']} are those of the unsharded optimizer ({case.model} model)"
        found = [results[rank]["weights"][step] for rank in case.group]
        try:
            expect_equal(what, found, truth[step], ranks=case.group, tolerance=tolerance)
        except CheckFailed:
            options = {
                cause: unsharded(case, job | changes)["weights"] for cause, changes in (hypotheses or {}).items()
            }
            if step == -1:
                cause = "state is lost in every step: the inner optimizer is made anew?"
                options[cause] = unsharded(case, job, forget=True)["weights"]
            causes = {cause: [weights[step]] * len(found) for cause, weights in options.items()}
            if step == -1 and not_reduced(results.events[case.group[0]], step=1):
                causes = {"no gradient was reduced after step 0, as if all were: does step end that?": found}
            if step == 0:
                causes |= first_step_hypotheses(case, job, found, results.events[case.group[0]])
            expect_equal(what, found, truth[step], ranks=case.group, hypotheses=causes, tolerance=tolerance)
    require_owners(results, case.group)


def require_owners(results, group):
    """The weights count only if gradients are reduced to their owners, and the owners broadcast weights."""
    for rank in group if len(group) > 1 else []:
        found = [x for x in launches(results.events[rank]) if x.step is not None and x.phase != "construct"]
        found = [launch for launch in found if launch.phase == "step" or launch.numel > 16]  # a norm may travel
        expect(
            {launch.op for launch in found} == {"reduce", "broadcast"},
            "right weights earn points only if every gradient is reduced to its owner, which broadcasts the weights",
            f"rank {rank}: all steps together have {summary(found)}",
            "an all-reduce gives every rank the averages, and every rank then keeps the state of all parameters",
        )


def not_reduced(events, step):
    """Whether the step reduces nothing, and the one before did."""
    before, now = ([launch for launch in launches(events, s) if launch.op == "reduce"] for s in (step - 1, step))
    return before and not now


SGD = {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}, "params": "generator"}


@pytest.mark.points(3)
def test_sharded_equals_unsharded(submission):
    """Over 20 steps weights are those of the unsharded optimizer, in sub-groups and where a rank owns nothing too."""
    groups = [[1, 2, 3], [0]]
    adam = {"optimizer": "Adam", "options": {"lr": 0.01}, "params": "list"}
    adamw = {"optimizer": "AdamW", "options": {"lr": 0.01, "weight_decay": 0.1}, "params": "generator"}
    adafactor = {"optimizer": "Adafactor", "options": {"lr": 0.02}, "params": "list"}  # looks at whole parameters
    for world, model, job, steps, more in zip(
        submission.worlds(2, 4, 3, 2, 4, 1),
        ("Branches", "Tied", "Frozen", "Plain", "Plain", "Plain"),
        (SGD, SGD | {"groups": groups}, adamw, adam | {"zero_by_model": True}, adafactor, adam),
        (20, 5, 20, 20, 5, 5),
        (
            {"branches": [1, -1], "hidden_layers": 0},
            {"group": groups[0], "hidden_layers": 1},
            {"hidden_layers": 1},
            {"hidden_layers": 1},
            {"hidden_layers": 0},  # 2 parameters for 4 ranks
            {"hidden_layers": 0},
        ),
    ):
        case = submission.case(model, world, steps=steps, dtype=torch.float64, **more)
        results = submission.run(m08_sharded.train, case.for_ranks(start=case.start(), **job), world_size=world)
        expect_unsharded(results, case, job)


def sharing_problems(rng, world):
    """What the state check shares out, by the mistake that each shows: sizes of parameter groups and of late ones."""
    unit = rng.randint(5, 20)
    layers = [numel for _ in range(8) for numel in [rng.randint(18, 20) * unit] + [unit] * (world - 1)]
    falling = [place * unit for place in range(12, 0, -1)]
    return {
        "8 layers of a large parameter and small ones": {"first": [layers], "frozen": [], "late": []},
        "12 parameters, each smaller than the one before": {"first": [falling], "frozen": [], "late": []},
        "6 groups of one parameter": {"first": [[unit * 9]] * 6, "frozen": [], "late": []},
        "6 groups of one parameter, of which 3 are added late": {
            "first": [[unit * 9]] * 3, "frozen": [], "late": [[unit * 9]] * 3,
        },
        "8 parameters, every second of them frozen": {
            "first": [[unit * rng.randint(2, 9) for _ in range(8)]], "frozen": list(range(0, 8, 2)), "late": [],
        },
    }  # fmt: skip


def sharing_cause(owned, numels, problem):
    """Why a rank has too much state, from the places of the parameters that each rank has state for."""
    trainable = [place for place in range(len(numels)) if place not in problem["frozen"]]
    idle = [rank for rank, places in enumerate(owned) if not places]
    if all(places == trainable for places in owned):
        return "every rank keeps the state of all parameters: is the inner optimizer given only those that it owns?"
    if len(problem["first"]) > 1:
        return "a rank's load is what it owns in all groups: does sharing begin anew in each?"
    if idle:
        return f"nothing is owned by rank {listing(idle)}: is a number of ranks fixed, or the same one always chosen?"
    if all(places == trainable[rank :: len(owned)] for rank, places in enumerate(owned)):
        return "parameter i belongs to rank i % world_size: one rank gets the weights, the other the biases"
    return "a parameter belongs to the rank that owns least so far, in elements, not in parameters"


@pytest.mark.points(2)
def test_sharded_state_is_shared(submission):
    """A rank's state is at most the mean plus that of the largest parameter; all ranks together have it once."""
    for world in submission.worlds(2, 3, 4):
        problems = sharing_problems(submission.rng, world)
        common = {"optimizer": "Adam", "options": {"lr": 0.01}}
        results = submission.run(
            m08_sharded.states, [problem | common for problem in problems.values()], world_size=world, mode="record"
        )
        for place, (name, problem) in enumerate(problems.items()):
            numels = [numel for group in problem["first"] + problem["late"] for numel in group]
            owned = [result[place]["places"] for result in results]
            found = [result[place]["bytes"] for result in results]
            per_element = 2 * 4  # Adam's two moments in fp32
            bound = per_element * (max(numels) + sum(numels) / world)
            whole = per_element * sum(numel for i, numel in enumerate(numels) if i not in problem["frozen"])
            for rank in range(world):
                expect(
                    found[rank] <= bound,
                    f"rank {rank} of {world} has at most the mean state plus that of the largest parameter, "
                    f"{bound:.0f} bytes of {whole} ({name})",
                    f"it has {found[rank]} bytes, the ranks have {found}",
                    sharing_cause(owned, numels, problem),
                )
            expect(
                sum(found) == whole,
                f"together {world} ranks have the state of the unsharded optimizer, {whole} bytes ({name})",
                f"they have {found}, {sum(found)} bytes",
                "parameters without an owner, or a group added later that was never stepped?"
                if sum(found) < whole
                else "parameters with two owners, or frozen ones with state?",
            )


@pytest.mark.points(1)
def test_sharded_launches(submission):
    """A step is one reduce and one broadcast for each trainable parameter, of one root, and all are waited on."""
    for world, model in zip(submission.worlds(2, 3), ("Tied", "Frozen")):
        case = submission.case(model, world, steps=3, dtype=torch.float64)
        results = submission.run(m08_sharded.train, case.for_ranks(start=case.start(), **SGD), world_size=world)
        trainable = [p.numel() for p in case.parameters().values() if p.requires_grad]
        for rank, events in enumerate(results.events):
            for step in range(3):
                where = f"rank {rank}, step {step}"
                found = launches(events, step)
                expect(
                    sorted((launch.op, launch.numel) for launch in found)
                    == sorted((op, numel) for op in ("reduce", "broadcast") for numel in trainable),
                    f"one reduce and one broadcast for each of {len(trainable)} trainable parameters ({model} model)",
                    f"{where}: {summary(found, 20)}",
                    launch_cause([launch.op for launch in found], len(trainable)),
                )
                raced = [launch for launch in found if launch.raced]
                expect(
                    not raced,
                    "gradients and weights are left alone while they travel",
                    f"{where}: {len(raced)} of {len(found)} were changed between launch and wait",
                )
                forgotten = [launch for launch in found if not launch.waits and step < 2]
                expect(
                    not forgotten,
                    "the handle of every launch is waited on, on its root too, before the next step is over",
                    f"{where}: {len(forgotten)} of {len(found)} were never waited on",
                    "where a rank only sends, the tensor may be written again only when it has been sent"
                    if forgotten and all(launch.op == "broadcast" for launch in forgotten)
                    else "wait() on every handle: one that is complete says nothing of the others",
                )
            wrong = wrong_root(case, events)
            expect(
                not wrong,
                "a parameter's weights come from the rank to which its gradient was reduced",
                wrong,
                "both must be its owner, as a rank in the group",
            )


def launch_cause(ops, count):
    """Why a step has other launches than `count` reduces and broadcasts."""
    if set(ops) - {"reduce", "broadcast"}:
        return "only the owner needs the average, and only it has the new weights: reduce, then broadcast"
    if not ops:
        return "nothing is exchanged"
    for op in ("reduce", "broadcast"):
        if ops.count(op) > count:
            return f"{ops.count(op)} {op}s: a frozen parameter, or a tied one twice, takes part?"
        if ops.count(op) < count:
            return f"{ops.count(op)} {op}s: some parameters are left out?"
    return ""


@pytest.mark.points(2)
def test_sharded_groups_and_schedulers(submission):
    """Groups keep options of their own, schedulers and late groups take effect, and a closure runs once a step."""
    for world, kind in zip(submission.worlds(3, 2, 3), ("lambda", "one cycle", "late")):
        case = submission.case("Plain", world, steps=6, dtype=torch.float64, hidden_layers=1)
        names = list(case.parameters())
        weights, biases = ([name for name in names if name.endswith(end)] for end in ("weight", "bias"))
        if kind == "lambda":
            decayed = {"names": weights, "options": {"weight_decay": 0.1, "lr": 0.03}}
            plain = {"names": biases, "options": {"momentum": 0.5}}
            job = SGD | {"params": [decayed, plain], "scheduler": "lambda", "zeros": True}
            hypotheses = {
                "the learning rate that the scheduler set is ignored: inner groups are copies, and must be updated "
                "before every step": {"scheduler": "none"},
                "each group keeps its own options: the first group's were used for all?": {
                    "params": [{"names": names, "options": decayed["options"]}]
                },
                "each group keeps its own options: only the defaults were used?": {
                    "params": "list",
                    "scheduler": "none",
                },
            }
        elif kind == "one cycle":
            options = {"lr": 0.01, "betas": (0.9, 0.999)}
            job = SGD | {"optimizer": "Adam", "options": options, "scheduler": kind, "closure": True}
            hypotheses = {
                "what the scheduler set is ignored: inner groups are copies, and must be updated before every step": {
                    "scheduler": "none"
                },
                "a scheduler may change any option (here the betas too), not only the learning rate": {
                    "scheduler": "one cycle of lr"
                },
            }
        else:
            late = {"names": names[-2:], "options": {"lr": 0.03}}
            job = {
                "optimizer": "AdamW",
                "options": {"lr": 0.01},
                "params": [{"names": names[:-2], "options": {}}],
                "late": late,
            }
            hypotheses = {"the group added later is never stepped": {"late": late | {"options": {"lr": 0.0}}}}
        results = submission.run(m08_sharded.train, case.for_ranks(start=case.start(), **job), world_size=world)
        truth = unsharded(case, job)
        for rank, result in enumerate(results):
            expect(
                result["sizes"] == truth["sizes"],
                f"param_groups hold all parameters on every rank, {truth['sizes']} of them",
                f"rank {rank}: {result['sizes']}",
                "a generator of parameters can be read only once?",
            )
            expect(
                len(result["losses"]) == 6,
                "step calls the closure once",
                f"rank {rank}: {len(result['losses'])} calls in 6 steps",
                "given to the inner optimizer, it computes this rank's own gradients again, after the reduction",
            )
            expect(
                result["returned"] == (result["losses"] if "closure" in job else []),
                "step(closure) returns what the closure returned",
                f"rank {rank}: {result['returned'][:3]}, where the closure returned {result['losses'][:3]}",
            )
        expect_unsharded(results, case, job, hypotheses)


@pytest.mark.points(1)
def test_sharded_clipping(submission):
    """clip_grad_norm_ returns the global norm and clips by it; step then does not reduce again."""
    for world, hidden, groups in zip(submission.worlds(3, 4), (1, 0), ([[0, 1, 2]], [[1, 2, 3], [0]])):
        groups = groups if world > 1 else [[0]]
        max_norm = submission.rng.uniform(0.02, 0.1)
        job = SGD | {"max_norms": [max_norm, 10.0, max_norm, max_norm, 10.0], "skip": 3, "groups": groups}
        while True:
            case = submission.case("Plain", world, steps=5, dtype=torch.float64, group=groups[0], hidden_layers=hidden)
            case.batches[groups[0][-1]][3][0]["y"][0] = float("inf")  # in the step to skip
            truth = unsharded(case, job)
            if all(2 * max_norm < norm < 5 for norm in truth["norms"] if math.isfinite(norm)):
                break
        results = submission.run(m08_sharded.train, case.for_ranks(start=case.start(), **job), world_size=world)
        for rank in groups[0]:
            for step in range(5):
                where = f"rank {rank}, step {step}"
                found = [launch.phase for launch in launches(results.events[rank], step) if launch.op == "reduce"]
                expect(
                    "clip" in found,
                    "clip_grad_norm_ reduces the gradients: their norm is that of the averages",
                    f"{where}: it launched no reduce",
                    "it takes them for reduced, because the step before was skipped (the norm was not finite): does "
                    "zero_grad end that?"
                    if step == 4
                    else "",
                )
                expect(
                    "step" not in found,
                    "after clip_grad_norm_, which reduces the gradients, step does not reduce them again",
                    f"{where}: step launched {found.count('step')} reduces",
                    "the owner's average, already clipped, is averaged with gradients that are not?",
                )
        norms, rounding = [result["norms"] for result in results], rounding_of(results)
        expect_norm(norms, truth["norms"], 0, case, job, results.events[groups[0][0]], rounding)
        # Adding 1e-6 to the norm, as torch does, or not: both are right. So is a factor that has float32 rounding.
        changes = {
            "nothing was clipped": {"max_norms": [1e9] * 5},
            "gradients are multiplied by max_norm / norm where that is above 1 too": {"grow": True},
        }
        expect_unsharded(results, case, job, changes, tolerance=1e-6)
        for step in range(1, 5):
            expect_norm(norms, truth["norms"], step, case, job, results.events[groups[0][0]], rounding)


def expect_norm(norms, truth, step, case, job, events, rounding):
    """Expect the true norm of this step from all ranks of the group, with a relative error of at most `rounding`."""
    mine, expected = [norms[rank][step] for rank in case.group], truth[step]
    shown, *others = format_distinct(expected, *mine)
    found = f"ranks {listing(case.group)} have {', '.join(others)}"
    if not math.isfinite(expected):
        expect(
            not any(math.isfinite(norm) for norm in mine),
            "infinity in one rank's gradients shows in the norm that clip_grad_norm_ returns, on every rank",
            f"step {step}: {found}",
        )
        return
    expect(
        all(abs(norm - expected) <= rounding * expected for norm in mine),
        f"clip_grad_norm_ returns the norm of all averaged gradients, {shown} in step {step}, on every rank",
        found,
        "" if step else norm_cause(case, job, mine, expected, events),
    )


def norm_cause(case, job, mine, expected, events):
    """Why the first step's norms, of the ranks in the group, are not the global one, `expected`; or nothing.

    `events` are the record of one of them.
    """
    if any(map(math.isnan, mine)):
        return "NaN: a gradient was read before the handle of its reduction was waited on?"
    size = len(case.group)
    for factor, cause in (
        (size, "gradients are summed over the ranks, not averaged?"),
        (size / case.world_size, f"gradients are divided by {case.world_size}, the size of the world?"),
        (1 / size, "gradients are divided twice?"),
        (size / 2, f"gradients are divided by 2 where the group has {size} ranks?"),
    ):
        if factor != 1 and all(math.isclose(norm, factor * expected, rel_tol=1e-4) for norm in mine):
            return cause
    own = [unsharded(case, job, [rank], steps=1)["norms"][0] for rank in case.group]
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(mine, own)):
        return "that is the norm of the rank's own gradients: clip_grad_norm_ reduces first?"
    rest = [rank for rank in range(case.world_size) if rank not in case.group]
    whole = [unsharded(case, job, ranks, steps=1)["norms"][0] for ranks in (case.group, rest) if ranks]
    if rest and math.isclose(mine[0], math.hypot(*whole), rel_tol=1e-4):
        return "that is the norm over all ranks of the world, not of the group?"
    if max(mine) - min(mine) > 1e-4 * max(mine):
        return "each rank has the norm of what it owns: add the squares of all ranks before the root?"
    norms = {name: float(gradient.norm()) for name, gradient in case.gradients().items() if gradient is not None}
    squares = [0.0] * size  # of what each rank owns
    for name, parameter in case.parameters().items():
        reduces = [event for event in events if event["kind"] == "launch" and event["op"] == "reduce"]
        roots = [event["root"] for event in reduces if event["numel"] == parameter.numel()]
        squares[roots[0] if roots else 0] += norms[name] ** 2
    for added in (sum(norms.values()), sum(map(math.sqrt, squares))):
        if math.isclose(mine[0], added, rel_tol=1e-4):
            return "norms are added up: it is the root of the sum of all squares, each counted once?"
    return ""


# ZeroOptimizer

ZERO = {
    "package": "m07_cached_shards",
    "wrapper": "CachedDDP",
    "arguments": {"bucket_numel": 150, "buckets_per_group": 2},
}
OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
MOMENTS = {"SGD": 1, "Adam": 2, "AdamW": 2}
SHARE = "Rank r of the group has the r-th of the N equal parts of each bucket"


def recipe_of(name, **more):
    """What `m08_zero.take_steps` reads, for the optimizer of this name with its options above."""
    return {"optimizer": name, "options": OPTIMIZERS[name]} | more


def zero_jobs(case, recipe, world=None, steps=slice(None), **more):
    """What each of the first `world` ranks is told: the recipe, and its batches of these steps."""
    told = case.for_ranks(**{**ZERO, "recipe": recipe, **more})
    return PerRank(job | {"batches": job["batches"][steps]} for job in told[:world])


def one_process(case, recipe, ranks=None, steps=None, start=None, load=None, clip=None):
    """Weights, state_dict and norms after the plain optimizer's steps (all by default) on the batches of `ranks`."""
    model = edge_case_models.build(case.model, case.sizes, case.start() if start is None else start, case.dtype)
    ranks, steps = case.group if ranks is None else ranks, steps or range(len(case.batches[0]))

    def gradients(step):
        total = 0.0
        for rank in ranks:
            for batch in case.batches[rank][steps[step]]:
                loss = loss_of(model, batch) * recipe.get("loss_scale", 1) / len(ranks)
                loss.backward()
                total += loss.item()
        return total

    return trained_alone(recipe, model, len(steps), gradients, load, clip)


def weights_alone(*args, **options):
    """The weights of `one_process`."""
    return one_process(*args, **options)[0]


def trained_alone(recipe, model, steps, gradients, load=None, clip=None):
    """As `one_process`, for any model and what computes its gradients."""
    groups = m08_zero.groups_of(recipe, model)
    optimizer_cls = getattr(torch.optim, recipe["optimizer"])
    optimizer = optimizer_cls(model.parameters() if groups is None else groups, **recipe["options"])
    if load is not None:
        optimizer.load_state_dict(copy.deepcopy(load))  # it may keep the tensors it is given
    clip = clip or torch.nn.utils.clip_grad_norm_
    found = m08_zero.take_steps(
        recipe, model, optimizer, steps, gradients, lambda limit: clip(list(model.parameters()), limit)
    )
    return {name: p.detach().clone() for name, p in model.named_parameters()}, optimizer.state_dict(), found["norms"]


def expect_trained(what, results, truth, start, hypotheses=None, *, ranks=None, tolerance=MANY_STEPS, otherwise=""):
    """Every rank has the weights `truth`, and a ZeroOptimizer; else CheckFailed with the likely cause.

    `hypotheses` are functions that compute the weights a mistake gives; `otherwise` is the cause where none does.
    """
    ranks = list(ranks or range(len(results)))
    for rank in ranks:
        expect(
            results[rank]["is_optimizer"],
            "a ZeroOptimizer is a torch.optim.Optimizer",
            f"rank {rank}: it is none",
            "class ZeroOptimizer(torch.optim.Optimizer)?",
        )
        expect(
            not results[rank]["gather_grads"],
            "ZeroOptimizer sets ddp.gather_grads to False: a rank needs the averages of its own shards only",
            f"rank {rank}: ddp.gather_grads is True",
            "gradients are still gathered, as for a plain optimizer that steps on everything?",
        )
    found = [results[rank]["weights"] for rank in ranks]
    try:
        expect_equal(what, found, truth, ranks=ranks, tolerance=tolerance)
    except CheckFailed as failed:
        cause = cause_of(found, truth, start, hypotheses or {}, tolerance, otherwise)
        raise failed.with_cause(cause) from None


def require_shared_state(results, case, name):
    """The weights count only if each rank keeps the state of `name` for its own shards, as `optimizer.optim`'s."""
    params, size = case.parameters().values(), len(results)
    itemsize = max(4, *(parameter.itemsize for parameter in params))
    bound = MOMENTS[name] * itemsize * padded_numel(params, size) // size
    for rank, result in enumerate(results if size > 1 else []):
        expect(
            result["state_bytes"] is not None and result["state_bytes"] <= bound,
            f"right weights earn points only if each of {size} ranks keeps at most {bound} bytes of state in "
            "optimizer.optim, for its own shards",
            f"rank {rank}: it has {'no optimizer.optim' if result['state_bytes'] is None else result['state_bytes']}",
            "each rank has state for whole parameters, not for what its shards hold of them",
        )


def cause_of(found, truth, start, hypotheses, tolerance, otherwise):
    """The mistake that explains wrong weights; `otherwise` where it is none of the hypotheses."""
    if any(bool(tensor.isnan().any()) for weights in found for tensor in weights.values()):
        return "NaN: weights were read before the handle of their all-gather was waited on?"
    if any(not close(weights, found[0], tolerance) for weights in found):
        return "the ranks do not agree: are weights gathered from all ranks, after the step on the own shard?"
    for cause, weights in hypotheses.items():
        if close(found[0], weights(), tolerance):
            return cause
    if otherwise:
        return otherwise
    if close(found[0], start, 0.0):
        return f"no weight has moved: does each rank step on the shard that it sends? {SHARE}."
    still = [name for name in truth if moved(truth[name], start[name]) > moved(found[0][name], start[name]) + 0.01]
    if still:
        return (
            f"entries of {listing(still)} have not moved, or were put back: does a rank step on all of its shards, "
            f"wherever they cut a parameter? {SHARE}."
        )
    return ""


def moved(now, start):
    """The part of the entries that are not what they were."""
    return float((now != start).double().mean())


def close(one, other, tolerance):
    """Whether two sets of weights are equal, by the rule of `expect_equal`."""
    try:
        expect_equal("", [one], other, tolerance=tolerance)
    except CheckFailed:
        return False
    return True


def padded_numel(params, world):
    """The elements of all buckets of a buffer of these parameters."""
    numels = [p.numel() for p in reversed(list(params)) if p.requires_grad]
    return planned(numels, ZERO["arguments"]["bucket_numel"], world)["numel"]


@pytest.mark.points(3)
def test_zero_equals_unsharded(submission):
    """Over 20 steps weights are those of the plain optimizer; optimizers that are not elementwise are refused."""
    names = ["AdamW", *submission.rng.sample(list(OPTIMIZERS), 3)]
    for world, model, name in zip(submission.worlds(1, 2, 3, 4), ("Plain", "Tied", "Reordered", "Frozen"), names):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case(
            model,
            world,
            steps=20,
            micro_batches=2 if model == "Tied" else 1,
            dtype=torch.float64,
            branches=list(range(world)) if model == "Reordered" else None,
            group=groups[0],
        )
        recipe, moving = recipe_of(name), world == 3
        arguments = ZERO["arguments"] | {"buckets_per_group": {1: None, 2: 1}.get(world, 2)}
        told = zero_jobs(case, recipe, groups=groups, arguments=arguments, reallocate=moving)
        results = submission.run(m08_zero.train, told, world_size=world)
        what = f"weights after 20 steps of {name} on ranks {listing(case.group)} are those of the plain optimizer"
        hypotheses = {
            f"gradients are {how} by the number of ranks, though the finish has averaged them?": partial(
                weights_alone, case, recipe | {"loss_scale": factor}
            )
            for how, factor in (("divided", 1 / len(case.group)), ("multiplied", len(case.group)))
        }
        if moving:
            what += ", though buffer.reallocate() moves the buffers before every step"
            hypotheses["tensors are kept from the start, where `reallocate` replaces them?"] = case.start
        expect_trained(what, results, weights_alone(case, recipe), case.start(), hypotheses, ranks=case.group)
        require_shared_state([results[rank] for rank in case.group], case, name)
    [world] = submission.worlds(2)
    results = submission.run(m08_zero.refusals, submission.case("Plain", world).for_ranks(**ZERO), world_size=world)
    for rank, answers in enumerate(results):
        for optimizer, answer in zip(("torch.optim.Adafactor", "a layer-wise LARS", "torch.optim.LBFGS"), answers):
            expect(
                answer is not None and len(answer.split()) > 2,
                f"ZeroOptimizer refuses {optimizer} with a sentence, for it does not treat every element by itself",
                f"rank {rank}: " + ("it was taken" if answer is None else f"an exception that says {answer!r}"),
                "a shard cuts parameters, and on the parts such an optimizer computes something else",
            )


@pytest.mark.points(2)
def test_zero_state_is_shared(submission):
    """A rank's optimizer state takes its share of the buckets for each moment, and for the fp32 masters, no more."""
    names = submission.rng.sample(list(OPTIMIZERS), 3)
    for world, model, name in zip(submission.worlds(2, 3, 4), ("Plain", "Frozen", "Tied"), names):
        dtype = torch.bfloat16 if world == 4 else torch.float32
        case = submission.case(model, world, steps=2, dtype=dtype)
        results = submission.run(m08_zero.train, zero_jobs(case, recipe_of(name)), world_size=world)
        trainable = [p for p in case.parameters().values() if p.requires_grad]
        bound = padded_numel(trainable, world) * 4 // world
        for rank, result in enumerate(results):
            expect(
                result["state_bytes"] is not None,
                "optimizer.optim is the local inner optimizer",
                f"rank {rank}: there is no optimizer.optim",
            )
            expect(
                result["state_bytes"] <= MOMENTS[name] * bound,
                f"each of {world} ranks keeps at most {bound} bytes for each moment of {name} (there are "
                f"{MOMENTS[name]}): 1/{world} of the buckets, which have {bound * world} bytes in fp32",
                f"rank {rank}: {result['state_bytes']} bytes, where the unsharded optimizer has "
                f"{MOMENTS[name] * 4 * sum(p.numel() for p in trainable)}",
                "each rank has state for whole parameters, not for what its shards hold of them?",
            )
            masters = result["inner_bytes"].get("float32", 0)
            expect(
                dtype != torch.bfloat16 or masters <= bound,
                f"the fp32 masters take at most {bound} bytes on each of {world} ranks",
                f"rank {rank}: optimizer.optim steps on {masters} bytes of fp32",
                "each rank has the masters of whole parameters?",
            )
        total = sum(result["state_bytes"] for result in results)
        least = 0.9 * MOMENTS[name] * 4 * sum(p.numel() for p in trainable)
        expect(
            total >= least,
            f"optimizer.optim holds the state of {name}: that of all ranks together is the plain optimizer's, in fp32",
            f"{total} bytes together, expected {least / 0.9:.0f} and padding",
            "the state is in another optimizer, or in 16 bits: is `optim` what steps?",
        )


@pytest.mark.points(1)
def test_zero_volume(submission):
    """A step moves the bytes of one all-reduce: gradients are reduce-scattered, weights gathered in their own dtype."""
    for world, dtype in zip(submission.worlds(2, 3), (torch.float32, torch.bfloat16)):
        case = submission.case("Plain", world, steps=3, dtype=dtype)
        arguments = ZERO["arguments"] | {"grad_dtype": torch.float32, "buckets_per_group": 2}
        jobs = zero_jobs(case, recipe_of("AdamW"), arguments=arguments)
        results = submission.run(m08_zero.train, jobs, world_size=world)
        numel = padded_numel(case.parameters().values(), world)
        for rank, events in enumerate(results.events):
            for step in range(3):
                found = [launch for launch in launches(events, step) if launch.numel > 16]  # a flag may travel
                before = [launch for launch in found if launch.phase != "step"]
                inside = [launch for launch in found if launch.phase == "step"]
                where = f"rank {rank}, step {step}: "
                expect(
                    {launch.op for launch in before} <= {"reduce_scatter"} and sum(x.numel for x in before) == numel,
                    f"before the optimizer's step, reduce-scatters carry all {numel} elements of the buckets once, and "
                    "nothing else is launched",
                    where + summary(before),
                    "gradients are gathered too: does ZeroOptimizer set ddp.gather_grads to False?"
                    if any(launch.op == "all_gather" for launch in before)
                    else "",
                )
                name = str(dtype).removeprefix("torch.")
                expect(
                    {launch.op for launch in inside} == {"all_gather"}
                    and sum(launch.nbytes for launch in inside) == numel * dtype.itemsize,
                    f"the optimizer's step gathers the weights, {numel} elements in {name}, and launches nothing else: "
                    "with the reduce-scatters, the volume of one all-reduce",
                    where + summary(inside),
                    volume_cause(inside, numel, name),
                )


def volume_cause(inside, numel, dtype):
    """Why the launches of an optimizer's step are too many, or nothing."""
    if any(launch.op in ("all_reduce", "broadcast") for launch in inside):
        return "a rank gives its own shard and needs the others': an all-gather, half the bytes of an all-reduce"
    if {launch.dtype for launch in inside} - {dtype}:
        return "masters are gathered, where the weights are enough?"
    if sum(launch.numel for launch in inside) > numel:
        return "gradients are gathered too, or weights twice?"
    return "weights are not gathered with ddp.start_param_sync() and ddp.finish_param_sync()?"


@pytest.mark.points(2)
def test_zero_groups_and_schedulers(submission):
    """Parameter groups keep their options, schedulers and changes take effect, groups can come late, closures work."""
    steps = 12
    for world, late in zip(submission.worlds(2, 3), (False, True)):
        case = submission.case("Plain", world, steps=steps, dtype=torch.float64)
        names = submission.rng.sample(list(case.parameters()), len(case.parameters()))
        first = {"names": names[::2], "options": {"lr": 0.02, "weight_decay": 0.2}}
        second = {"names": names[1::2], "options": {"lr": 0.004}}
        recipe = recipe_of("AdamW", groups=[first], at=steps // 2, late=second, closure=True)
        if not late:
            recipe = recipe_of("AdamW", groups=[first, second], gamma=0.9, at=steps // 2, change={"weight_decay": 0.4})
        results = submission.run(m08_zero.train, zero_jobs(case, recipe), world_size=world)
        for rank, result in enumerate(results):
            expect(
                result["groups"] == [first["names"], second["names"]],
                "param_groups hold the model's own parameters, whole, as they were given",
                f"rank {rank}: they have {[len(group) for group in result['groups']]} parameters, of which "
                f"{sum(name == '' for group in result['groups'] for name in group)} are not the model's",
                "param_groups are the user's; what each rank steps on belongs to `optim`",
            )
            expect(
                result["returned"],
                "step(closure) calls the closure once and returns what it returns, the loss",
                f"rank {rank}: it returned something else",
            )
        expect_trained(
            f"weights after {steps} steps of AdamW with two groups, "
            + (f"one of them added before step {steps // 2}, and closures" if late else "whose options change"),
            results,
            weights_alone(case, recipe),
            case.start(),
            group_hypotheses(case, recipe),
        )
        require_shared_state(results, case, "AdamW")


def group_hypotheses(case, recipe):
    """Mistakes with parameter groups, and the weights they give."""
    if "late" in recipe:
        late = recipe["late"]
        changed = {
            "the group added later is never stepped: the inner optimizer has groups of its own?": {
                "late": late | {"options": {"lr": 0.0, "weight_decay": 0.0}}
            },
            "the group added later loses its own options?": {"late": late | {"options": {}}},
            "the group added later has the options of the first?": {
                "late": late | {"options": recipe["groups"][0]["options"]}
            },
        }
    else:
        groups = recipe["groups"]
        changed = {
            "a scheduler's learning rates do not reach the inner optimizer, whose groups are its own?": {"gamma": 1.0},
            "the learning rate is taken over in every step, but not the other options?": {"change": {}},
            "options that change do not reach the inner optimizer, whose groups are its own?": {
                "gamma": 1.0,
                "change": {},
            },
            "the groups' own options are lost?": {"groups": [g | {"options": {}} for g in groups]},
            "all groups have the options of the first?": {
                "groups": [g | {"options": groups[0]["options"]} for g in groups]
            },
        }
    return {cause: partial(weights_alone, case, recipe | changes) for cause, changes in changed.items()}


@pytest.mark.points(2)
def test_zero_clipping(submission):
    """clip_grad_norm_ returns the norm of all gradients and clips by it; NaN and infinity show on every rank."""
    steps = 10
    for world, model in zip(submission.worlds(2, 3), ("Frozen", "Tied")):
        # Of large gradients, so that the 1e-6 which torch adds to a norm is no part of the question.
        scale = 1e6
        recipe = {"optimizer": "SGD", "options": {"lr": 0.05 / scale, "momentum": 0.9}, "loss_scale": scale}
        case = submission.case(model, world, steps=steps, dtype=torch.float64)
        norms = one_process(case, recipe | {"max_norm": float("inf")})[2]
        recipe["max_norm"] = sorted(norms)[steps // 2]  # it clips about half of the steps
        results = submission.run(m08_zero.train, zero_jobs(case, recipe), world_size=world)
        truth, _, norms = one_process(case, recipe)
        rounding = rounding_of(results)
        expect_norms([result["norms"][:1] for result in results], norms[:1], "in the first step", rounding)
        expect_trained(
            f"weights after {steps} steps of SGD, clipped by the global norm to {recipe['max_norm']:.4g}",
            results,
            truth,
            case.start(),
            {
                "gradients are not clipped: is what clip_grad_norm_ scales what step reads?": partial(
                    weights_alone, case, recipe | {"max_norm": float("inf")}
                ),
                "gradients whose norm is below max_norm must stay as they are": partial(
                    weights_alone, case, recipe, clip=scale_to
                ),
            },
            tolerance=min(rounding, NORMS[None]),
            otherwise="every rank scales its shards by max_norm / norm, with the norm that it returns?",
        )
        expect_norms([result["norms"] for result in results], norms, f"over {steps} steps", rounding)
        require_shared_state(results, case, "SGD")
    for world, value in zip(submission.worlds(2, 3), (float("inf"), float("nan"))):
        case = submission.case("Plain", world, dtype=torch.float64)
        jobs = zero_jobs(case, recipe_of("SGD", max_norm=1.0))
        name = submission.rng.choice(list(case.parameters()))
        jobs[submission.rng.randrange(world)]["poison"] = [name, value]
        results = submission.run(m08_zero.train, jobs, world_size=world)
        for rank, result in enumerate(results):
            expect(
                not math.isfinite(result["norms"][0]),
                f"where one gradient has a single {value}, the norm is not finite on any rank",
                f"rank {rank}: it is {result['norms'][0]:.6g}",
                "it lies in the shard of one rank, and reaches the others through the sum over the ranks only",
            )


def scale_to(params, max_norm):
    """As torch's clip_grad_norm_, but gradients that are too short become longer."""
    norm = torch.nn.utils.clip_grad_norm_(params, float("inf"))
    for parameter in params:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm)
    return norm


def expect_norms(found, truth, when, rounding):
    """Expect each rank's norms to be those of one process, with relative errors of at most `rounding`."""
    for rank, norms in enumerate(found):
        wrong = [(got, want) for got, want in zip(norms, truth) if not abs(got - want) <= rounding * want]
        if not wrong:
            continue
        got, want = wrong[0]
        if any(other != norms for other in found):
            cause = "the ranks do not agree: each has the norm of its own shards, and their squares are not summed?"
        elif abs(got * len(found) ** 0.5 - want) <= 1e-6 * want:
            cause = "the squares are averaged over the ranks, not summed?"
        else:
            cause = (
                "the root of the sum of all squares, of the own shards only: elsewhere the buffer has what the "
                "reduce-scatter left there?"
            )
        got, want = format_distinct(got, want)
        expect(
            False,
            f"clip_grad_norm_ returns the norm of all gradients together, {when}",
            f"it is {got}, expected {want}",
            cause,
            rank=rank,
        )


@pytest.mark.points(2)
def test_zero_checkpoints(submission):
    """A state_dict is the plain optimizer's, on every rank, and training goes on from it with any number of ranks."""
    half = 4
    names = submission.rng.sample(list(OPTIMIZERS), 3)
    for before, after, name in zip(submission.worlds(4, 2, 1), submission.worlds(2, 3, 4), names):
        case = submission.case("Tied", max(before, after), steps=2 * half, dtype=torch.float64)
        params = submission.rng.sample(list(case.parameters()), len(case.parameters()))
        groups = [{"names": params[:2], "options": {"lr": 0.02}}, {"names": params[2:], "options": {}}]
        recipe = recipe_of(name, groups=groups)
        saving = recipe | {"gamma": 0.8}
        weights, state, _ = one_process(case, saving, range(before), range(half))
        jobs = zero_jobs(case, saving, before, slice(half), save=True)
        saved = submission.run(m08_zero.train, jobs, world_size=before)
        expect_trained(f"weights after {half} steps of {name}", saved, weights, case.start())
        require_shared_state(saved, case, name)
        for rank, result in enumerate(saved):
            expect_state_dict(result["state_dict"], state, params, rank, before)
        checkpoint = (saved[0]["weights"], saved[0]["state_dict"])
        resumed = partial(weights_alone, case, recipe, range(after), range(half, 2 * half))
        expect_plain_loads(partial(resumed, *checkpoint))
        checkpoints = {f"the state_dict of {before} ranks": checkpoint}
        if after == 3:
            checkpoints["a plain optimizer's state_dict"] = (weights, state)
        for source, (start, load) in checkpoints.items():
            told = zero_jobs(case, recipe, after, slice(half, None), load=load)
            jobs = PerRank(job | {"state": job["state"] if rank else start} for rank, job in enumerate(told))
            results = submission.run(m08_zero.train, jobs, world_size=after)
            expect_trained(
                f"from {source}, {half} more steps of {name} on {after} ranks give the plain optimizer's weights",
                results,
                resumed(weights, state),
                weights,
                {cause: partial(resumed, weights, left) for cause, left in what_is_left(state, recipe).items()},
                otherwise="of each moment a rank takes what its own shards cover, with the ranks that there are now?",
            )


def what_is_left(state, recipe):
    """For each mistake of load_state_dict, what of the state_dict is left."""
    fresh = [recipe["options"] | group["options"] for group in recipe["groups"]]
    without_scalars = {
        number: {key: v * 0 if isinstance(v, torch.Tensor) and v.dim() == 0 else v for key, v in entries.items()}
        for number, entries in state["state"].items()
    }
    return {
        "the state is not loaded: moments start from zero?": state | {"state": {}},
        "the groups' options, such as the learning rate, are not loaded?": state
        | {"param_groups": [group | options for group, options in zip(state["param_groups"], fresh)]},
        "scalars of the state, such as Adam's step, are not loaded?": state | {"state": without_scalars},
    }


def expect_plain_loads(resume):
    """A plain optimizer takes the state_dict and goes on."""
    try:
        resume()
    except Exception as error:
        expect(False, "a plain optimizer's load_state_dict takes the state_dict", f"{type(error).__name__}: {error}")


def expect_state_dict(found, truth, params, rank, size):
    """The state_dict of one of `size` ranks is `truth`, the plain optimizer's, with masters.

    Its parameters are `params` in their order.
    """
    where = f"rank {rank} of {size}"
    what = "state_dict() returns on every rank what the plain optimizer's would be, and masters: "
    kinds = {key: type(value).__name__ for key, value in found.items()} if isinstance(found, dict) else {}
    expect(
        {"state": "dict", "param_groups": "list"}.items() <= kinds.items() and "masters" in kinds,
        what + "a dict with state, a dict, param_groups, a list, and masters",
        f"{where}: " + (listing([f"{key}, a {kind}" for key, kind in kinds.items()]) or repr(found)),
        'there are "masters" even if no parameter has 16 bits: an empty dict?'
        if "state" in kinds
        else "every rank calls it, and every rank is given all of it?",
    )
    for place, plain in enumerate(truth["param_groups"]):
        group = dict(enumerate(found["param_groups"])).get(place, {})
        for key in {"params", "lr", "weight_decay", "betas", "momentum"} & set(plain):
            expect(
                group.get(key) == plain[key],
                what + f"{key} of group {place} is {plain[key]}",
                f"{where}: it is {group.get(key)}",
                "parameters are numbered through all groups, whatever this rank has of them?"
                if key == "params"
                else "the options of param_groups as they are now?",
            )
    missing = [params[number] for number in truth["state"] if not isinstance(found["state"].get(number), dict)]
    expect(
        not missing,
        what + "the state of every parameter that has been stepped, by its number",
        f"{where}: there is none of {listing(missing)}",
        "a rank without a part of a parameter must be given its state by the others?",
    )
    got, expected = {}, {}
    for number, entries in truth["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                name = f"{key} of {params[number]}"
                expected[name], entry = value.double(), found["state"][number].get(key)
                entry = torch.tensor(float(entry)) if isinstance(entry, (int, float)) else entry
                shape = tuple(entry.shape) if isinstance(entry, torch.Tensor) else None
                expect(
                    shape == tuple(value.shape),
                    what + f"{name} has the shape {tuple(value.shape)}",
                    f"{where}: " + ("there is none" if shape is None else f"it has the shape {shape}"),
                    "it is a part only, or not in the parameter's shape?",
                )
                got[name] = entry.double()
    try:
        expect_equal(what + "its moments", [got], expected, ranks=[rank], tolerance=MANY_STEPS)
    except CheckFailed as failed:
        cause = "each rank knows its own shards only: are the parts of all ranks put together, each in its place?"
        raise failed.with_cause(cause) from None


GAP = 1 / 128  # between bfloat16 numbers from 1 to 2


@pytest.mark.points(1)
def test_zero_masters(submission):
    """16-bit weights are fp32 masters, rounded, however small the steps are; a checkpoint keeps the masters."""
    generator = torch.Generator().manual_seed(submission.rng.randrange(2**31))
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)
    sizes = submission.rng.sample(range(60, 400), 4)
    start = {
        f"weights.{i}": (1 + torch.randint(16, (size,), generator=generator) * GAP).to(dtype)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes))
    }
    # Each step moves a weight by about 0.15 of the gap, which rounding would take back at once.
    [world] = submission.worlds(2)
    recipe = {"optimizer": "SGD", "options": {"lr": 0.15 * GAP}}
    inputs = [[downhill(start, generator) for _ in range(20)] for _ in range(world)]
    results = submission.run(m08_zero.train_dots, dots_jobs(recipe, start, inputs), world_size=world)
    masters, _ = dots_alone(recipe, wide(start), inputs)
    expect_trained(
        "weights after 20 small steps of SGD are those of fp32 masters, rounded",
        results,
        like(masters, start),
        start,
        {
            "16-bit weights are stepped on, where rounding takes a small step back: they need fp32 masters?": partial(
                dots_weights, recipe, start, inputs
            ),
            "masters are stepped on, and not copied back into the weights?": partial(
                dict, {name: weight if weight.itemsize == 2 else masters[name] for name, weight in start.items()}
            ),
        },
        tolerance={torch.bfloat16: 1.01 * GAP, torch.float16: 1.01 * GAP / 8, torch.float32: 1e-5},
    )
    # Adam moves each weight by 0.09 of the gap in a step: by less than half of it in 5 steps, by more in 10.
    recipe = {"optimizer": "Adam", "options": {"lr": 0.09 * GAP}}
    before, after = (*submission.worlds(3), *submission.worlds(2))
    inputs = [[downhill(start)] * 5] * 3
    jobs = dots_jobs(recipe, start, inputs[:before], grad_dtype=torch.float32, save=True)
    saved = submission.run(m08_zero.train_dots, jobs, world_size=before)
    masters, state = dots_alone(recipe, wide(start), inputs)
    exact = {torch.bfloat16: GAP / 8, torch.float16: GAP / 64, torch.float32: 1e-5}
    what = "weights after 5 small steps of Adam are those of fp32 masters, rounded"
    expect_trained(what, saved, like(masters, start), start, tolerance=exact)
    jobs = dots_jobs(recipe, saved[0]["weights"], inputs[:after], grad_dtype=torch.float32, load=saved[0]["state_dict"])
    results = submission.run(m08_zero.train_dots, jobs, world_size=after)
    expect_trained(
        f"from the state_dict of {before} ranks, 5 more steps on {after} ranks go on from the masters as they were",
        results,
        dots_weights(recipe, masters, inputs, state, start),
        saved[0]["weights"],
        {
            "masters are made anew from the rounded weights: does state_dict have them, and load_state_dict take them, "
            'by "masters"?': partial(dots_weights, recipe, wide(like(masters, start)), inputs, state, start)
        },
        tolerance=exact,
        otherwise="of each master a rank takes what its own shards cover, with the ranks that there are now?",
    )


def downhill(weights, generator=None):
    """Inputs, and so gradients, that let every weight grow: -1, or at random between -1.5 and -0.5."""
    return [
        -(0.5 + torch.rand(w.shape, generator=generator)).to(w.dtype) if generator else -torch.ones_like(w)
        for w in weights.values()
    ]


def dots_jobs(recipe, weights, inputs, grad_dtype=None, **more):
    """What each rank is told: the same weights, and its inputs[rank][step]."""
    common = {**ZERO, "recipe": recipe, "weights": list(weights.values()), **more}
    arguments = ZERO["arguments"] | {"grad_dtype": grad_dtype}
    return PerRank(common | {"arguments": arguments, "batches": own} for own in inputs)


def dots_alone(recipe, weights, inputs, load=None):
    """Weights and state_dict of one process that steps on these weights, in their dtypes."""
    model = m08_zero.Dots(list(weights.values()))

    def gradients(step):
        for own in inputs:
            (model(own[step]) / len(inputs)).backward()
        return 0.0

    trained, state, _ = trained_alone(recipe, model, len(inputs[0]), gradients, load)
    return trained, state


def dots_weights(recipe, weights, inputs, load=None, rounded=None):
    """The weights of `dots_alone`, in the dtypes of `rounded` or their own."""
    return like(dots_alone(recipe, weights, inputs, load)[0], rounded or weights)


def wide(weights):
    return {name: weight.float() for name, weight in weights.items()}


def like(masters, weights):
    """Masters, rounded to the dtypes of the weights."""
    return {name: master.to(weights[name].dtype) for name, master in masters.items()}
