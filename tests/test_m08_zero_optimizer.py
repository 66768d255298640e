"""Graded checks of module 8: optimizer state that is divided among the ranks."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch

from brigade.course.checks.diagnose.evidence import Evidence
from brigade.course.checks.expectations import MANY_STEPS, expect_equal, explain_failures, format_ranks, replace_cause
from brigade.course.checks.forms import DictOf, Like, OneOf, find_mistake
from brigade.course.checks.reference import draw_generators
from brigade.ranks.claims import At, Step, each_step, in_phase, is_unchanged, show
from brigade.ranks.runner.ranks import PerRank
from helpers import training, zero
from helpers.buffers import compute_padded_numel
from helpers.memory import average, draw_sample, expect_delivered, run_with_little_memory
from helpers.odd_steps import expect_right_or_refused
from m05_grad_buffer.expected import compute_layout
from m08_zero_optimizer import causes
from m08_zero_optimizer import expected as m08_expected
from m08_zero_optimizer import scenario as m08_zero
from m08_zero_optimizer import scenario_sharded as m08_sharded

SGD = {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}, "params": "generator"}
ZERO = {
    "package": "m07_cached_shards",
    "wrapper": "CachedDDP",
    "arguments": {"bucket_numel": 150, "buckets_per_group": 2},
}
ADAM = {"optimizer": "Adam", "options": {"lr": 0.01, "amsgrad": True}}  # its state has three times the weights' bytes
LARGE, COUNT = 1 << 18, 8  # elements of each of so many weights; they and their state have 64 MiB in float64
GAP = 1 / 128  # the distance between neighbouring bfloat16 numbers from 1 to 2


# ---- 8a: ShardedOptimizer


@pytest.mark.parts("8a, parts (a) to (d): whole parameters")
@pytest.mark.points(3)
def test_sharded_equals_unsharded(submission):
    """After 5 to 20 steps, weights equal the unsharded optimizer's, even in sub-groups or if a rank owns nothing."""
    groups = [[1, 2, 3], [0]]
    adam = {"optimizer": "Adam", "options": {"lr": 0.01}, "params": "list"}
    adamw = {"optimizer": "AdamW", "options": {"lr": 0.01, "weight_decay": 0.1}, "params": "generator"}
    adafactor = {"optimizer": "Adafactor", "options": {"lr": 0.02}, "params": "list"}  # looks at whole parameters
    for world, model, job, steps, more in submission.pair_worlds(
        (2, 4, 3, 2, 4, 1),
        ("Branches", "Tied", "Frozen", "Plain", "Plain", "Plain"),
        (SGD, SGD | {"groups": groups}, adamw, adam | {"zero_by_model": True}, adafactor, adam),
        (8, 5, 8, 20, 5, 5),
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
        with replace_cause(causes.find_skipped_parameter):
            results = submission.run(m08_sharded.train, case.make_jobs(start=case.start(), **job), world_size=world)
        expect_unsharded(results, case, job)


@pytest.mark.points(2)
def test_sharded_state_is_shared(submission):
    """A rank keeps at most the average part of the state plus the largest parameter's. No state is on two ranks."""
    for world in submission.worlds(2, 3, 4):
        problems = draw_sharing_problems(submission.rng, world)
        common = {"optimizer": "Adam", "options": {"lr": 0.01}}
        results = submission.run(
            m08_sharded.measure_states,
            [problem | common for problem in problems.values()],
            world_size=world,
            mode="record",
        )
        for number, (name, problem) in enumerate(problems.items()):
            numels = [numel for group in problem["first"] + problem["late"] for numel in group]
            owned = [[i for i, is_own in enumerate(result[number]["owned"]) if is_own] for result in results]
            kept = [result[number]["bytes"] for result in results]
            state_bytes = [2 * numel * (8 if i in problem["wide"] else 4) for i, numel in enumerate(numels)]  # moments
            trainable = [nbytes for i, nbytes in enumerate(state_bytes) if i not in problem["frozen"]]
            whole, mean, largest = sum(trainable), sum(trainable) / world, max(trainable)
            what = f"with {name}, a rank keeps {{}} bytes of state (average: {mean:.0f}, largest parameter: {largest})"
            why = partial(causes.explain_state, owned, numels, problem)
            for rank, nbytes in enumerate(kept):
                At(rank).at_most(what, nbytes, largest + mean, why)
            what = f"with {name}, {world} ranks together keep {{}} bytes of state, and the unsharded optimizer {whole}"
            At().equal(what, sum(kept), whole, partial(causes.explain_sum_of_states, owned, kept, whole, problem))
    expect_little_state(submission, m08_sharded.train_large, ADAM | {"params": "list"}, mib=70)


@pytest.mark.points(1)
def test_sharded_launches(submission):
    """A step reduces and broadcasts each trainable parameter once, with the same root, and waits on every handle."""
    for world, model in submission.pair_worlds((2, 3), ("Tied", "Frozen")):
        case = submission.case(model, world, steps=3, dtype=torch.float64)
        jobs = case.make_jobs(start=case.start(), parts=[], **SGD)
        results = submission.run(m08_sharded.train, jobs, world_size=world)
        parameters = case.parameters().values()
        trained, frozen = ([p.numel() for p in parameters if p.requires_grad == own] for own in (True, False))
        what = f"a step launches one reduce and one broadcast for each trainable parameter of the {model} model"
        for step in each_step(results.events, 3):
            launched, wrong_root = step.launches(), m08_expected.find_wrong_root(case, step.events)
            made = sorted((one.op, one.numel) for one in launched)
            is_right = made == sorted(product(("reduce", "broadcast"), trained))
            launched.claim(what, is_right, cause=partial(causes.explain_launches, trained, frozen))
            launched.satisfy("gradients and weights do not change while they are reduced or broadcast", is_unchanged)
            awaited = "every rank, including the root, waits on the handle of every launch before the next step ends"
            launched.satisfy(awaited, lambda one: bool(one.waits) or one.step == 2, causes.explain_forgotten)
            same_root = "a parameter's weights are broadcast from the rank to which its gradient is reduced"
            At(step.rank).claim(same_root, not wrong_root, wrong_root, causes.OTHER_ROOT)


@pytest.mark.points(2)
def test_sharded_groups_and_schedulers(submission):
    """Parameter groups keep their options. Schedulers and groups added later work. A closure runs once per step."""
    for world, kind in submission.pair_worlds((3, 2, 3), ("lambda", "one cycle", "late")):
        case = submission.case("Plain", world, steps=6, dtype=torch.float64, hidden_layers=1)
        names = list(case.parameters())
        weights, biases = ([name for name in names if name.endswith(end)] for end in ("weight", "bias"))
        if kind == "lambda":
            decayed = {"names": weights, "options": {"weight_decay": 0.1, "lr": 0.03}}
            plain = {"names": biases, "options": {"momentum": 0.5}}
            job = SGD | {"params": [decayed, plain], "scheduler": "lambda", "zeros": True}
        elif kind == "one cycle":
            options = {"lr": 0.01, "betas": (0.9, 0.999)}
            job = SGD | {"optimizer": "Adam", "options": options, "scheduler": kind, "closure": True}
        else:
            late = {"names": names[-2:], "options": {"lr": 0.03}}
            first = {"names": names[:-2], "options": {}}
            job = {"optimizer": "AdamW", "options": {"lr": 0.01}, "params": [first], "late": late, "at": 2}
        parts = [*m08_sharded.TRAINED, "sizes", "num_others", *["losses", "returned"] * ("closure" in job)]
        jobs = case.make_jobs(start=case.start(), parts=parts, **job)
        results = submission.run(m08_sharded.train, jobs, world_size=world)
        expected, sizes = m08_expected.train_unsharded(case, job)["sizes"], [list_sizes(result) for result in results]
        for rank, own in enumerate(sizes):
            why = partial(causes.explain_sizes, sizes, expected)
            At(rank).equal("the groups in param_groups have {} parameters", own, expected, why)
        if "closure" in job:
            expect_closures(results, 6)
        expect_unsharded(results, case, job, partial(causes.suspect_scheduling, kind, job, names))


@pytest.mark.parts("8a, part (e): clipping")
@pytest.mark.points(1)
@pytest.mark.needs("test_sharded_equals_unsharded")
def test_sharded_clipping(submission):
    """clip_grad_norm_ returns the norm of all gradients and clips them by it. Then step does not reduce them again."""
    for world, hidden, groups in submission.pair_worlds((3, 4), (1, 0), ([[0, 1, 2]], [[1, 2, 3], [0]])):
        groups = groups if world > 1 else [[0]]
        max_norm = submission.rng.uniform(0.02, 0.1)
        job = SGD | {"max_norm": [max_norm, 10.0, max_norm, max_norm, 10.0], "skip": 3, "groups": groups}
        while True:
            case = submission.case("Plain", world, steps=5, dtype=torch.float64, group=groups[0], hidden_layers=hidden)
            case.batches[groups[0][-1]][3][0]["y"][0] = float("inf")  # in the step to skip
            expected = m08_expected.train_unsharded(case, job)["norms"]
            if all(2 * max_norm < norm < 5 for norm in expected if math.isfinite(norm)):
                break
        jobs = case.make_jobs(start=case.start(), parts=[*m08_sharded.TRAINED, "norms", "norm_dtypes"], **job)
        results = submission.run(m08_sharded.train, jobs, world_size=world)
        for step in each_step(results.events, 5, groups[0]):
            early, late = (step.launches("reduce").where(in_phase(phase)) for phase in ("clip", "step"))
            cause = causes.SKIPPED if step.number == 4 else causes.NOT_REDUCED
            what = "clip_grad_norm_ reduces the gradients, because it returns the norm of the averages"
            early.claim(what, bool(early), "it launches no reduce", cause)
            late.are_none("after clip_grad_norm_, step does not reduce the gradients again", causes.CLIPPED_TWICE)
        norms = [results[rank]["norms"] for rank in groups[0]]
        why = partial(causes.explain_norm, case, job, results.events[groups[0][0]])
        judge = partial(zero.expect_norms, norms, expected, zero.get_rounding(results), ranks=groups[0])
        judge(steps=1, why=why)
        # torch adds 1e-6 to the norm. A submission may omit this, and may round the factor to float32.
        expect_unsharded(results, case, job, causes.suspect_clipping, tolerance=1e-6)
        judge()
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, micro_batches=2, dtype=torch.float64)
    order = ["forward", "backward", "clip", "forward", "backward", "step"]
    jobs = case.make_jobs(start=case.start(), order=order, **SGD)
    expect_right_or_refused(
        "the step after a backward that follows clip_grad_norm_ uses both gradients",
        submission.run(m08_sharded.take_odd_step, jobs, world_size=world),
        m08_expected.compute_weights(case, zero.make_recipe("SGD")),
        evidence=Evidence(causes.AFTER_CLIPPING),
    )


def expect_little_state(submission, scenario, job, mib):
    """Expect two steps with large weights to be right in so little memory that only a part of the state fits in it."""
    start, steps = submission.rng.randrange(1 << 31), 2
    job = job | {"start": start, "count": COUNT, "numel": LARGE, "steps": steps}
    if run := run_with_little_memory(submission, scenario, job, mib, causes.WHOLE_STATE):
        results, seeds = run
        weights = []
        for i in range(COUNT):
            at = draw_sample(submission.rng, LARGE)
            weights.append(torch.nn.Parameter(training.draw(start + i, LARGE)[at]))
            optimizer = torch.optim.Adam(weights[-1:], **ADAM["options"])
            for step in range(steps):
                weights[-1].grad = average(seeds, step * COUNT + i, LARGE, at)
                optimizer.step()
        expected = torch.cat([weight.detach() for weight in weights])
        expect_delivered(results, steps - 1, expected, "the weights that the optimizer has on one process")


# ---- 8b: ZeroOptimizer


@pytest.mark.parts("8b, parts (f) to (h): shards of buckets")
@pytest.mark.points(3)
def test_zero_equals_unsharded(submission):
    """After 8 or 20 steps, weights equal the plain optimizer's. Optimizers that are not elementwise are rejected."""
    names = ["AdamW", *submission.rng.sample(list(zero.OPTIMIZERS), 3)]
    for world, model, name in submission.pair_worlds((1, 2, 3, 4), ("Plain", "Tied", "Reordered", "Frozen"), names):
        branches = list(range(world)) if model == "Reordered" else None
        groups, case = zero.draw_training(submission, model, world, branches)
        recipe, is_moving = zero.make_recipe(name), world == 3
        arguments = ZERO["arguments"] | {"buckets_per_group": {1: None, 2: 1}.get(world, 2)}
        parts = [*m08_zero.TRAINED, *["state_bytes"] * (len(case.group) > 1)]
        jobs = make_zero_jobs(case, recipe, groups=groups, arguments=arguments, reallocate=is_moving, parts=parts)
        results = submission.run(m08_zero.train, jobs, world_size=world)
        steps = len(case.batches[0])
        what = f"{steps} steps of {name} on {format_ranks(case.group)} give the same weights as the plain optimizer"
        if is_moving:
            what += ", although buffer.reallocate() moves the buffers before every step"
        numels = [p.numel() for p in reversed(case.parameters().values()) if p.requires_grad]
        layout = compute_layout(numels, arguments["bucket_numel"], len(case.group))
        weights = results[case.group[0]]["weights"]
        why = partial(causes.suspect_shards, case, recipe, is_moving, weights, layout)
        zero.expect_trained(
            what, results, m08_expected.compute_weights(case, recipe), case.start(), why, ranks=case.group
        )
        zero.require_shared_state([results[rank] for rank in case.group], case, name)
    [world] = submission.worlds(2)
    results = submission.run(
        m08_zero.collect_refusals, submission.case("Plain", world).make_jobs(**ZERO), world_size=world
    )
    for rank, answers in enumerate(results):
        for optimizer in m08_zero.NOT_ELEMENTWISE:
            answer = answers[optimizer]
            what = f"ZeroOptimizer rejects {optimizer}, which is not elementwise, with an exception that explains why"
            At(rank).claim(what, answer is not None, "it accepts the optimizer", causes.NOT_ELEMENTWISE)
            At(rank).claim(what, len(answer.split()) > 2, f"its message is {answer!r}", causes.NO_SENTENCE)


@pytest.mark.points(2)
def test_zero_state_is_shared(submission):
    """Moments and main parameters have at most 1/N of the buckets' elements on a rank. No gradients are copied."""
    names = submission.rng.sample(list(zero.OPTIMIZERS), 3)
    for world, model, name in submission.pair_worlds((2, 3, 4), ("Plain", "Frozen", "Tied"), names):
        dtype = torch.bfloat16 if world == 4 else torch.float32
        case = zero.draw_case(submission, model, world, steps=2, dtype=dtype)
        trainable = [p for p in case.parameters().values() if p.requires_grad]
        bound = compute_padded_numel(trainable, world) * 4 // world
        parts = [
            "weights",
            "state_bytes",
            *(["fp32_bytes", "grad_bytes"] if dtype == torch.bfloat16 else ["copied_bytes"]),
        ]
        jobs = make_zero_jobs(case, zero.make_recipe(name), parts=parts)
        results = submission.run(m08_zero.train, jobs, world_size=world)
        whole = zero.MOMENTS[name] * 4 * sum(p.numel() for p in trainable)
        part = f"1/{world} of the buckets in fp32 has {bound} bytes"
        for rank, result in enumerate(results):
            at, nbytes = At(rank), result["state_bytes"]
            at.claim("optimizer.optim is the inner optimizer", nbytes is not None, "there is no optim", causes.NO_INNER)
            what = f"a rank keeps {{}} of the {whole} bytes of {name}'s state ({part})"
            at.at_most(what, nbytes, zero.MOMENTS[name] * bound, causes.WHOLE_STATE)
            if dtype == torch.bfloat16:
                what = f"the fp32 main parameters in optimizer.optim take {{}} bytes ({part})"
                at.at_most(what, result["fp32_bytes"], bound, causes.WHOLE_MASTERS)
                what = "after a step, optimizer.optim has {} bytes of gradients outside the buffers"
                at.equal(what, result["grad_bytes"], 0, causes.GRADIENTS_KEPT)
            else:
                zero.expect_views(result, rank)
        total = sum(result["state_bytes"] for result in results)
        what = f"in optimizer.optim, the ranks together keep the state of the plain {name} in fp32: {whole} bytes"
        why = partial(causes.explain_missing_state, total, whole)
        At().claim(what, total >= 0.9 * whole, f"together, they keep {total} bytes", why)
    job = ZERO | {"recipe": ADAM, "arguments": {"bucket_numel": LARGE, "buckets_per_group": 2}, "dtype": torch.float64}
    expect_little_state(submission, m08_zero.train_large, job, mib=68)


@pytest.mark.points(1)
def test_zero_volume(submission):
    """A step sends the bytes of one all-reduce. Odd orders of backward and finish are right or refused."""
    for world, dtype in submission.pair_worlds((2, 3), (torch.float32, torch.bfloat16)):
        case = submission.case("Plain", world, steps=3, dtype=dtype)
        arguments = ZERO["arguments"] | {"grad_dtype": torch.float32, "buckets_per_group": 2}
        jobs = make_zero_jobs(case, zero.make_recipe("AdamW"), arguments=arguments, parts=["weights", "gather_grads"])
        results = submission.run(m08_zero.train, jobs, world_size=world)
        numel = compute_padded_numel(case.parameters().values(), world)
        name = str(dtype).removeprefix("torch.")
        until_step = f"until the optimizer's step, only reduce-scatters are launched, of all {numel} elements once"
        in_step = f"the optimizer's step launches only all-gathers of the weights, of {numel} elements in {name}"
        for step in each_step(results.events, 3):
            launched, nbytes = step.launches().without_flags(), numel * dtype.itemsize
            before, inside = launched.where(lambda one: one.phase != "step"), launched.where(in_phase("step"))
            is_right = {x.op for x in before} == {"reduce_scatter"} and sum(x.numel for x in before) == numel
            why = partial(causes.explain_gradient_launches, results[step.rank]["gather_grads"])
            before.claim(until_step, is_right, cause=why)
            is_right = {x.op for x in inside} == {"all_gather"} and sum(x.nbytes for x in inside) == nbytes
            inside.claim(in_step, is_right, cause=partial(causes.explain_volume, numel, name))
    expect_odd_orders(submission)


@pytest.mark.points(2)
@pytest.mark.needs("test_zero_equals_unsharded")
def test_zero_groups_and_schedulers(submission):
    """Parameter groups keep their options. Schedulers, changed options, closures and groups added later work."""
    steps = 12
    for world, late in submission.pair_worlds((2, 3), (False, True)):
        case = zero.draw_case(submission, "Plain", world, steps=steps, dtype=torch.float64)
        names = submission.rng.sample(list(case.parameters()), len(case.parameters()))
        first = {"names": names[::2], "options": {"lr": 0.02, "weight_decay": 0.2}}
        second = {"names": names[1::2], "options": {"lr": 0.004}}
        recipe = zero.make_recipe("AdamW", groups=[first], at=steps // 2, late=second, closure=True)
        if not late:
            recipe = zero.make_recipe(
                "AdamW", groups=[first, second], gamma=0.9, at=steps // 2, change={"weight_decay": 0.4}
            )
        parts = [*m08_zero.TRAINED, "state_bytes", "groups", "num_foreign", *["losses", "returned"] * late]
        results = submission.run(m08_zero.train, make_zero_jobs(case, recipe, parts=parts), world_size=world)
        for rank, result in enumerate(results):
            named = list_groups(result)
            what = "param_groups contain the model's whole parameters, in the groups that the user passed"
            is_right = named == [first["names"], second["names"]]
            At(rank).claim(what, is_right, f"the groups contain {'; '.join(map(show, named))}", causes.INNER_GROUPS)
        if late:
            expect_closures(results, steps)
        how = (
            f"closures and a second group, added before step {steps // 2}"
            if late
            else "two groups whose options change"
        )
        what = f"after {steps} steps of AdamW with {how}, the weights equal those from the plain optimizer"
        why = partial(causes.suspect_groups, case, recipe)
        zero.expect_trained(what, results, m08_expected.compute_weights(case, recipe), case.start(), why)
        zero.require_shared_state(results, case, "AdamW")


@pytest.mark.points(2)
@pytest.mark.needs("test_zero_equals_unsharded")
def test_zero_clipping(submission):
    """clip_grad_norm_ returns the norm of all gradients and clips them by it. NaN and infinity reach every rank."""
    steps = 10
    for world, model in submission.pair_worlds((2, 3), ("Frozen", "Tied")):
        # Gradients are large, so the 1e-6 that torch adds to a norm does not matter.
        scale = 1e6
        recipe = {"optimizer": "SGD", "options": {"lr": 0.05 / scale, "momentum": 0.9}, "loss_scale": scale}
        case = zero.draw_case(submission, model, world, steps=steps, dtype=torch.float64)
        norms = m08_expected.train_alone(case, recipe | {"max_norm": float("inf")})[2]
        recipe["max_norm"] = sorted(norms)[steps // 2]  # this clips about half of the steps
        parts = [*m08_zero.TRAINED, "state_bytes", "norms", "norm_dtypes"]
        results = submission.run(m08_zero.train, make_zero_jobs(case, recipe, parts=parts), world_size=world)
        weights, _, norms = m08_expected.train_alone(case, recipe)
        rounding = zero.get_rounding(results)
        why = partial(causes.explain_norms, len(case.parameters()))
        judge = partial(zero.expect_norms, [result["norms"] for result in results], norms, rounding, why=why)
        judge(steps=1)
        zero.expect_trained(
            f"after {steps} steps of SGD with gradients clipped to the global norm {recipe['max_norm']:.4g}, the "
            "weights equal those from the plain optimizer",
            results,
            weights,
            case.start(),
            partial(causes.suspect_no_clipping, case, recipe),
            tolerance=min(rounding, zero.NORMS[None]),
            otherwise=causes.NOT_SCALED,
        )
        judge()
        zero.require_shared_state(results, case, "SGD")
    for world, value in submission.pair_worlds((2, 3), (float("inf"), float("nan"))):
        case = submission.case("Plain", world, dtype=torch.float64)
        jobs = make_zero_jobs(case, zero.make_recipe("SGD", max_norm=1.0), parts=["weights", "norms"])
        name = submission.rng.choice(list(case.parameters()))
        jobs[submission.rng.randrange(world)]["poison"] = [name, value]
        results = submission.run(m08_zero.train, jobs, world_size=world)
        for rank, result in enumerate(results):
            [norm], what = result["norms"], f"if a gradient contains one {value}, the norm is not finite on any rank"
            At(rank).claim(what, not math.isfinite(norm), f"the norm is {norm:.6g}", causes.ONE_SHARD)
            finite = [name for name, w in result["weights"].items() if math.isnan(value) and w.isfinite().any()]
            what = "weights with finite entries after a step whose gradients have a norm of NaN: {}"
            At(rank).equal(what, finite, [], causes.NAN_NOT_SCALED)
    [world] = submission.worlds(2)
    start, recipe = {"weights.0": torch.zeros(400, dtype=torch.bfloat16)}, zero.make_recipe("SGD", max_norm=1.0)
    x = torch.full_like(start["weights.0"], 1088)  # in bf16, its square is 0.35 % too small
    jobs = make_dots_jobs(recipe, start, [[[x]]] * world, parts=["weights", "norms", "norm_dtypes"])
    results = submission.run(m08_zero.train_dots, jobs, world_size=world)
    norms, rounding = (
        [result["norms"] for result in results],
        max(zero.get_rounding(results), zero.NORMS[torch.float32]),
    )
    zero.expect_norms(norms, [1088 * math.sqrt(400)], rounding, why=causes.explain_rounded_squares)
    expect_equal(
        "after a clipped step, bfloat16 weights equal the plain optimizer's",
        [result["weights"] for result in results],
        {"weights.0": torch.full((400,), -recipe["options"]["lr"] / math.sqrt(400), dtype=torch.bfloat16)},
        tolerance=zero.NORMS[torch.bfloat16],
        hypotheses={causes.COPY_CLIPPED: [{"weights.0": -recipe["options"]["lr"] * x}] * world},
    )


@pytest.mark.parts("8b, parts (i) and (j): checkpoints")
@pytest.mark.points(2)
@pytest.mark.needs("test_zero_equals_unsharded")
def test_zero_checkpoints(submission):
    """On every rank, state_dict equals the plain optimizer's. Training resumes on any number of ranks."""
    half = 4
    names = submission.rng.sample(list(zero.OPTIMIZERS), 3)
    models = ("Tied", "Tied", "Frozen")  # frozen parameters have numbers, too
    for before, after, name, model in submission.pair_worlds((4, 1, 2), (2, 4, 3), names, models):
        [after] = submission.worlds(after)
        case = zero.draw_case(submission, model, max(before, after), before, steps=2 * half, dtype=torch.float64)
        parameters = case.parameters()
        params = submission.rng.sample(list(parameters), len(parameters))
        # The first one is frozen, if there are any. Otherwise, shards and parameters could have the same numbers.
        first = min(params, key=lambda name: parameters[name].requires_grad)
        params.sort(key=lambda name: name != first)
        groups = [{"names": params[:2], "options": {"lr": 0.02}}, {"names": params[2:], "options": {}}]
        recipe = zero.make_recipe(name, groups=groups)
        saving = recipe | {"gamma": 0.8}
        weights, state, _ = m08_expected.train_alone(case, saving, range(before), range(half))
        parts = [*m08_zero.TRAINED, "state_bytes", "state_dict"]
        jobs = make_zero_jobs(case, saving, before, slice(half), parts=parts)
        with replace_cause(causes.find_skipped_shard):
            saved = submission.run(m08_zero.train, jobs, world_size=before)
        zero.expect_trained(
            f"after {half} steps of {name}, the weights equal those from the plain optimizer",
            saved,
            weights,
            case.start(),
        )
        zero.require_shared_state(saved, case, name)
        for rank, result in enumerate(saved):
            expect_state_dict(result["state_dict"], state, params, rank, before)
        checkpoint = (saved[0]["weights"], saved[0]["state_dict"])
        resumed = partial(m08_expected.compute_weights, case, recipe, range(after), range(half, 2 * half))
        expect_plain_loads(partial(resumed, *checkpoint))
        checkpoints = {f"the state_dict of {before} rank{'s' * (before > 1)}": checkpoint}
        if after == 3:
            checkpoints["a plain optimizer's state_dict"] = (weights, state)
        for source, (start, load) in checkpoints.items():
            jobs = make_zero_jobs(case, recipe, after, slice(half, None), load=load)
            jobs = PerRank(job | {"state": job["state"] if rank else start} for rank, job in enumerate(jobs))
            misfitting, otherwise = causes.MISFITTING_MOMENTS, causes.NOT_COVERED
            hypotheses = partial(causes.suspect_loading, resumed, weights, state, recipe)
            if model == "Frozen":  # models without frozen parameters have passed, so everything is loaded there
                misfitting = otherwise = causes.MISNUMBERED_MOMENTS
                hypotheses = dict
            with replace_cause(partial(causes.find_misfitting_moments, cause=misfitting)):
                at_once = PerRank(job | {"batches": [], "parts": ["state_dict"]} for job in jobs)
                results, again = submission.run_each(m08_zero.train, [jobs, at_once])
            zero.expect_trained(
                f"after loading {source}, {half} steps of {name} on {after} ranks give the plain optimizer's weights",
                results,
                resumed(weights, state),
                weights,
                hypotheses,
                otherwise=otherwise,
            )
            for rank, result in enumerate(again):
                with replace_cause(lambda failed: causes.NOT_SAVED_AGAIN):
                    expect_state_dict(result["state_dict"], state, params, rank, after, "after load_state_dict, ")
    expect_reloaded(submission)


@pytest.mark.points(1)
@pytest.mark.needs("test_zero_checkpoints")
def test_zero_masters(submission):
    """16-bit weights equal the rounded fp32 main parameters, which checkpoints save. Plain checkpoints load too."""
    generator = torch.Generator().manual_seed(submission.rng.randrange(2**31))
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)
    sizes = submission.rng.sample(range(130, 400), 4)  # so large that shards cut each parameter
    scales = (1.0, 1 / 64, 1.0, 1.0)
    start = {
        f"weights.{i}": (scale * (1 + torch.randint(16, (size,), generator=generator) * GAP)).to(dtype)
        for i, (size, dtype, scale) in enumerate(zip(sizes, dtypes, scales, strict=True))
    }
    # Each step moves a weight by about 0.15 of the gap, and rounding would undo the step immediately. Only the gap of
    # the small weights is less than a step.
    [world] = submission.worlds(2)
    recipe = {"optimizer": "SGD", "options": {"lr": 0.15 * GAP}}
    inputs = [[draw_descent(start, own) for _ in range(20)] for own in draw_generators(submission.rng, world)]
    results = submission.run(m08_zero.train_dots, make_dots_jobs(recipe, start, inputs), world_size=world)
    masters, _ = m08_expected.train_dots_alone(recipe, m08_expected.widen(start), inputs)
    with replace_cause(lambda failed: causes.find_late_copy(results.events)):
        zero.expect_trained(
            "after 20 small steps of SGD, the weights equal the rounded fp32 main parameters",
            results,
            m08_expected.round_like(masters, start),
            start,
            partial(causes.suspect_no_masters, recipe, start, inputs, masters),
            tolerance={torch.bfloat16: 1.01 * GAP, torch.float32: 1e-5},
        )
    # Adam moves each weight by 0.09 of the gap per step: in 5 steps by less than half of the gap, in 10 steps by more.
    recipe = {"optimizer": "Adam", "options": {"lr": 0.09 * GAP}}
    before, after = (*submission.worlds(3), *submission.worlds(2))
    inputs = [[draw_descent(start)] * 5] * 3
    parts = [*m08_zero.TRAINED, "state_dict"]
    jobs = make_dots_jobs(recipe, start, inputs[:before], grad_dtype=torch.float32, parts=parts)
    saved = submission.run(m08_zero.train_dots, jobs, world_size=before)
    masters, state = m08_expected.train_dots_alone(recipe, m08_expected.widen(start), inputs)
    exact = {torch.bfloat16: GAP / 8, torch.float32: 1e-5}
    what = "after 5 small steps of Adam, the weights equal the rounded fp32 main parameters"
    zero.expect_trained(what, saved, m08_expected.round_like(masters, start), start, tolerance=exact)
    for rank, result in enumerate(saved):
        expect_state_dict(result["state_dict"], state, list(start), rank, before, tolerance=1e-5)
        expect_masters(result["state_dict"], masters, start, rank)
    rounded, state_dict = saved[0]["weights"], saved[0]["state_dict"]
    plain = {key: state_dict[key] for key in ("state", "param_groups")}
    make = partial(make_dots_jobs, recipe, inputs=inputs[:after], grad_dtype=torch.float32)
    jobs_per_call = [
        make(rounded, load=state_dict),
        make(start, load=plain, late_weights=list(rounded.values())),
        make(rounded, inputs=[[]] * after, load=state_dict, parts=["state_dict"]),  # no steps
    ]
    with replace_cause(causes.find_misfitting_moments):
        results, without, again = submission.run_each(m08_zero.train_dots, jobs_per_call)
    zero.expect_trained(
        f"after loading the state_dict of {before} ranks, 5 steps on {after} ranks start from its main parameters",
        results,
        m08_expected.compute_dots_weights(recipe, masters, inputs, state, start),
        rounded,
        partial(causes.suspect_rounded_masters, recipe, masters, start, inputs, state),
        tolerance=exact,
        otherwise=causes.MASTERS_NOT_COVERED,
    )
    zero.expect_trained(
        "after loading a state_dict without masters, 5 steps start from the weights at the time of the call",
        without,
        m08_expected.compute_dots_weights(recipe, m08_expected.widen(rounded), inputs, state, start),
        rounded,
        tolerance=exact,
        otherwise=causes.MASTERS_NOT_FROM_WEIGHTS,
    )
    for rank, result in enumerate(again):
        with replace_cause(partial(find_rounded_moments, result["state_dict"], state_dict, start)):
            when = "after load_state_dict, with fp32 moments, "
            expect_state_dict(result["state_dict"], state_dict, list(start), rank, after, when)
            expect_masters(result["state_dict"], masters, start, rank, when)


# ---- what the checks use

ODD_ORDERS = {  # what happens -> the actions, and the number of micro-batches whose gradients the step uses
    "a second finish_grad_sync": (["forward", "backward", "finish", "finish", "step"], 1),
    "a backward inside no_sync after finish_grad_sync": (
        ["forward", "backward", "finish", "forward", "backward in no_sync", "step"], 1,
    ),
    "this backward and a second finish_grad_sync": (
        ["forward", "backward", "finish", "forward", "backward in no_sync", "finish", "step"], 2,
    ),
    "a step without finish_grad_sync": (["forward", "backward", "step"], 1),
}  # fmt: skip


def expect_odd_orders(submission):
    """Expect a step without finish_grad_sync, after two, or after another backward to be right or refused."""
    [world] = submission.worlds(2)
    case, recipe = submission.case("Plain", world, micro_batches=2, dtype=torch.float64), zero.make_recipe("SGD")
    jobs = [make_zero_jobs(case, recipe, order=order) for order, _ in ODD_ORDERS.values()]
    all_results = submission.run_each(m08_zero.take_odd_step, jobs)
    batches = case.batches
    for (what, (order, count)), results in zip(ODD_ORDERS.items(), all_results, strict=True):
        case.batches = [[own[0][:count]] for own in batches]
        expect_right_or_refused(
            f"{what} gives the plain optimizer's weights",
            results,
            m08_expected.compute_weights(case, recipe),
            evidence=Evidence(causes.AFTER_FINISH if "finish" in order else causes.NO_FINISH),
        )


def expect_reloaded(submission):
    """Expect an optimizer that has taken steps to load an earlier state dict, even twice or one without state."""
    [world] = submission.worlds(2)
    case, recipe = submission.case("Plain", world, steps=4, dtype=torch.float64), zero.make_recipe("Adam")
    step, load = ["forward", "backward", "finish", "step", "zero_grad"], "load"
    orders = ["save", *step, load, *step], [*step, "save", *step, load, *step, load, *step]
    jobs = [make_zero_jobs(case, recipe, order=order) for order in orders]
    jobs = [PerRank(job | {"batches": [sum(job["batches"], [])]} for job in own) for own in jobs]
    all_results = submission.run_each(m08_zero.take_odd_step, jobs)
    first, state, _ = m08_expected.train_alone(case, recipe, steps=range(1))
    again = [first]
    for number in range(1, 4):
        steps = range(number, number + 1)
        again.append(
            m08_expected.compute_weights(case, recipe, steps=steps, start=again[-1], load=copy.deepcopy(state))
        )
    second = m08_expected.compute_weights(case, recipe, steps=range(1, 2), start=first)
    why = "the plain optimizer's weights, although an optimizer that has taken steps loads a state dict saved "
    for what, results, expected, cause in (
        ("before the first step", all_results[0], second, causes.OLD_STATE),
        ("after a step and loaded twice", all_results[1], again[-1], causes.SHARED_CHECKPOINT),
    ):
        for rank, result in enumerate(results):
            At(rank).claim(f"{why}{what}", result is not None, "RuntimeError", cause)
        expect_equal(why + what, list(results), expected, tolerance=MANY_STEPS, evidence=Evidence(cause))


def list_sizes(result):
    """Return the sizes of the parameter groups on a rank. The last one has all parameters of too many groups."""
    return [size for size in [*result["sizes"], result["num_others"] or None] if size is not None]


def list_groups(result):
    """Return the names of the parameters of each group on a rank, in their order there."""
    places = sorted((place, name) for name, place in result["groups"].items() if place >= 0)
    numbers = sorted({place // 1000 for place, _ in places})
    named = [[name for place, name in places if place // 1000 == number] for number in numbers]
    return named + [[f"{result['num_foreign']} tensors outside the model"]] * bool(result["num_foreign"])


def expect_closures(results, steps):
    """Expect one call of the closure per step, whose result step returns."""
    for rank, result in enumerate(results):
        at, count = At(rank), len(result["losses"])
        got, why = f"calls of the closure in {steps} steps: {count}", partial(causes.explain_calls, count, steps)
        at.claim("each call of step calls the closure once", count == steps, got, why)
        what = "step(closure) returns the result of the closure, the loss"
        at.claim(what, result["returned"] == result["losses"], "step returned something else", causes.CLOSURE)


def expect_unsharded(results, case, job, changes=dict, tolerance=MANY_STEPS):
    """Expect the unsharded optimizer's weights in the case's group, after the first step and after the last.

    `changes` gives causes, and changes of the job with which one process would get the wrong weights too.
    """
    left = [[name for name, is_left in results[rank]["left"].items() if is_left] for rank in case.group]
    for rank, names in zip(case.group, left, strict=True):
        why = partial(causes.explain_gradients_left, left)
        At(rank).equal("parameters with a gradient after optimizer.zero_grad() on any rank: {}", names, [], why)
    expected = m08_expected.train_unsharded(case, job)["weights"]
    for step, count in ((0, "one step"), (-1, f"{len(expected)} steps")):
        what = f"after {count} of {job['optimizer']} on the {case.model} model, weights equal the unsharded optimizer's"
        actual = [results[rank]["weights"][step] for rank in case.group]
        why = partial(causes.suspect_weights, case, job, changes, actual, step, results.events[case.group[0]])
        with explain_failures([], partial(causes.find_unawaited, results.events)):
            expect_equal(what, actual, expected[step], ranks=case.group, hypotheses=why, tolerance=tolerance)
    require_owners(results, case.group)


def require_owners(results, group):
    """Require that gradients are reduced to their owners, and that the owners broadcast weights."""
    what = "correct weights earn points only if each gradient is reduced to its owner, which broadcasts the weights"
    for rank in group if len(group) > 1 else []:
        launched = Step(results.events[rank], rank, None).launches()
        launched = launched.where(lambda one: one.step is not None and one.phase != "construct")
        launched = launched.where(lambda one: one.phase == "step" or one.numel > 16)  # except norms
        ops = {one.op for one in launched}
        cause = causes.ALL_REDUCED * ("all_reduce" in ops)
        launched.claim(what, ops == {"reduce", "broadcast"}, "all steps together made {these}", cause)


def draw_sharing_problems(rng, world):
    """Return sizes of parameters, by group and for groups added late, that show different mistakes in sharing."""
    unit = rng.randint(5, 20)
    layers = [numel for _ in range(8) for numel in [rng.randint(18, 20) * unit] + [unit] * (world - 1)]
    falling = [factor * unit for factor in range(12, 0, -1)]
    equal_bytes = [2 * unit] + [unit] * 2 * (world - 1)
    problems = {
        "8 layers of a large parameter and small ones": {"first": [layers]},
        "12 parameters, each smaller than the one before": {"first": [falling]},
        "6 groups of one parameter": {"first": [[unit * 9]] * 6},
        "6 groups of one parameter, of which 3 are added late": {"first": [[unit * 9]] * 3, "late": [[unit * 9]] * 3},
        "8 parameters, every second of them frozen": {"first": [[unit * 9] * 8], "frozen": list(range(0, 8, 2))},
        f"{6 * world} parameters of one shape, 6 of them in fp64": {
            "first": [[unit * 9] * 6 * world], "wide": list(range(0, 6 * world, world)),
        },
        "6 fp32 parameters, each before fp64 ones of as many bytes": {
            "first": [equal_bytes * 6], "wide": [i for i in range(6 * len(equal_bytes)) if i % len(equal_bytes)],
        },
    }  # fmt: skip
    return {name: {"frozen": [], "late": [], "wide": []} | problem for name, problem in problems.items()}


def make_zero_jobs(case, recipe, world=None, steps=slice(None), **more):
    """Return the jobs of the first `world` ranks: the recipe, and each rank's batches of these steps."""
    jobs = case.make_jobs(**{**ZERO, "recipe": recipe, **more})
    return PerRank(job | {"batches": job["batches"][steps]} for job in jobs[:world])


def expect_plain_loads(resume):
    """Expect that a plain optimizer can load the state_dict and train on."""
    try:
        resume()
    except Exception as error:
        At().claim("a plain optimizer can load the state_dict", False, f"{type(error).__name__}: {error}")


def expect_masters(state_dict, masters, weights, rank, when=""):
    """Expect the main parameters of all 16-bit weights in a state_dict, and no others."""
    kept = {f"weights.{number}": value for number, value in state_dict["masters"].items()}
    narrow = {name: value for name, value in masters.items() if weights[name].itemsize == 2}
    what = f"{when}in every state_dict(), masters has the fp32 main parameters of all 16-bit weights"
    why = "" if kept else 'state_dict does not contain the main parameters: "masters" is empty.'
    At(rank).equal(f"{what}, {{}}", show(sorted(kept)), show(sorted(narrow)), why)
    expect_equal(what, [kept], narrow, ranks=[rank], tolerance=1e-5)


def find_rounded_moments(state_dict, saved, weights, failed):
    """Return the cause of this name if a state_dict has the form of the one that was saved."""
    has_other_form = find_mistake(form_like(saved), state_dict)
    return "" if has_other_form else causes.find_rounded_moments(state_dict, saved, weights, failed)


def form_like(value):
    """Return the form of values such as those in a plain optimizer's state_dict. Its `step` may be a number."""
    if isinstance(value, dict):
        return {key: form_like(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(form_like, value))
    if isinstance(value, torch.Tensor):
        return value if value.dim() else OneOf(value, int, float)
    return None if value is None else type(value)


def expect_state_dict(actual, expected, params, rank, size, when="", tolerance=MANY_STEPS):
    """Expect the plain optimizer's state_dict, plus "masters", on one of `size` ranks.

    `params` are the names of its parameters in their order.
    """
    at, of = At(rank), f"{when}with {size} rank{'s' * (size > 1)}, in every state_dict(), "
    kinds = {key: type(value).__name__ for key, value in actual.items()} if isinstance(actual, dict) else {}
    what = f"{of}there are the plain optimizer's state (a dict) and param_groups (a list), and masters"
    is_right = {"state": "dict", "param_groups": "list"}.items() <= kinds.items() and "masters" in kinds
    got = show([f"{key} (a {kind})" for key, kind in kinds.items()]) if kinds else f"it is {actual!r}"
    at.claim(what, is_right, got, partial(causes.explain_keys, kinds))
    for index, plain in enumerate(expected["param_groups"]):
        group = dict(enumerate(actual["param_groups"])).get(index)
        group = group if isinstance(group, dict) else {}
        for key in plain:
            cause = causes.NOT_CONSECUTIVE if key == "params" else causes.OLD_OPTIONS
            what, got = f"{of}{key} of group {index} is {plain[key]}", f"it is {group.get(key)}"
            at.claim(what, group.get(key) == plain[key], got, cause)
    missing = [params[number] for number in expected["state"] if not isinstance(actual["state"].get(number), dict)]
    cause = causes.WRONG_NUMBERS if len(actual["state"]) == len(expected["state"]) else causes.LOST_STATE
    at.equal(f"{of}updated parameters without state under their own number: {{}}", missing, [], cause)
    actual_moments, expected_moments = {}, {}
    for number, entries in expected["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                name, entry = f"{key} of {params[number]}", actual["state"][number].get(key)
                entry = torch.tensor(float(entry)) if isinstance(entry, (int, float)) else entry
                shape = tuple(entry.shape) if isinstance(entry, torch.Tensor) else None
                why = partial(causes.explain_entry, shape, tuple(value.shape))
                at.equal(f"{of}the shape of {name} is {{}}", str(shape), str(tuple(value.shape)), why)
                actual_moments[name], expected_moments[name] = entry.double(), value.double()
    with replace_cause(lambda failed: causes.OWN_PARTS):
        what = f"{of}moments are those of the plain optimizer"
        expect_equal(what, [actual_moments], expected_moments, ranks=[rank], tolerance=tolerance)
    form = form_like(expected) | {"masters": DictOf(Like(torch.float32), int)}
    mistake = find_mistake(form, actual)
    at.claim(f"{of}there are the plain optimizer's entries, masters, and nothing else", not mistake, mistake)


def draw_descent(weights, generator=None):
    """Return inputs, and so gradients, with which every weight grows: -1, or at random between -1.5 and -0.5."""
    return [
        -(0.5 + torch.rand(w.shape, generator=generator)).to(w.dtype) if generator else -torch.ones_like(w)
        for w in weights.values()
    ]


def make_dots_jobs(recipe, weights, inputs, grad_dtype=None, **more):
    """Return each rank's job: the same weights, and its own inputs[rank][step]."""
    common = {**ZERO, "recipe": recipe, "weights": list(weights.values()), **more}
    arguments = ZERO["arguments"] | {"grad_dtype": grad_dtype}
    return PerRank(common | {"arguments": arguments, "batches": own} for own in inputs)
