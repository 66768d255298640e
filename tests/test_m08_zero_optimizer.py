"""Graded checks of module 8: optimizer state that is shared among the ranks."""

import math
from functools import partial

import pytest
import torch
from test_m05_grad_buffer import compute_layout

from brigade.checks.expectations import MANY_STEPS, expect, expect_equal, format_distinct, join_names
from brigade.events import launches, summarize
from brigade.runner.ranks import PerRank
from diagnosis import m08_zero_optimizer as diagnosis
from expected.m08_zero_optimizer import (
    dots_alone,
    dots_weights,
    like,
    one_process,
    unsharded,
    weights_alone,
    wide,
    wrong_root,
)
from scenarios import m08_sharded, m08_zero

# The relative error that a right norm may have, by the dtype in which it is returned. A Python number (None) does not
# say in which dtype it was computed, and float32 is precise enough.
NORMS = {torch.float64: MANY_STEPS, torch.float32: 1e-5, None: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SGD = {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}, "params": "generator"}
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
GAP = 1 / 128  # between bfloat16 numbers from 1 to 2


# ---- ShardedOptimizer


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
        results = submission.run(m08_sharded.train, case.make_jobs(start=case.start(), **job), world_size=world)
        expect_unsharded(results, case, job)


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
                    partial(diagnosis.too_much_state, owned, numels, problem),
                )
            expect(
                sum(found) == whole,
                f"together {world} ranks have the state of the unsharded optimizer, {whole} bytes ({name})",
                f"they have {found}, {sum(found)} bytes",
                partial(diagnosis.wrong_sum_of_states, sum(found), whole),
            )


@pytest.mark.points(1)
def test_sharded_launches(submission):
    """A step is one reduce and one broadcast for each trainable parameter, of one root, and all are waited on."""
    for world, model in zip(submission.worlds(2, 3), ("Tied", "Frozen")):
        case = submission.case(model, world, steps=3, dtype=torch.float64)
        results = submission.run(m08_sharded.train, case.make_jobs(start=case.start(), **SGD), world_size=world)
        trainable = [p.numel() for p in case.parameters().values() if p.requires_grad]
        for rank, events in enumerate(results.events):
            for step in range(3):
                where = f"rank {rank}, step {step}"
                found = launches(events, step)
                expect(
                    sorted((launch.op, launch.numel) for launch in found)
                    == sorted((op, numel) for op in ("reduce", "broadcast") for numel in trainable),
                    f"one reduce and one broadcast for each of {len(trainable)} trainable parameters ({model} model)",
                    f"{where}: {summarize(found, 20)}",
                    partial(diagnosis.wrong_launches, [launch.op for launch in found], len(trainable)),
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
                    partial(diagnosis.not_awaited, forgotten),
                )
            wrong = wrong_root(case, events)
            expect(
                not wrong,
                "a parameter's weights come from the rank to which its gradient was reduced",
                wrong,
                diagnosis.OTHER_ROOT,
            )


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
        elif kind == "one cycle":
            options = {"lr": 0.01, "betas": (0.9, 0.999)}
            job = SGD | {"optimizer": "Adam", "options": options, "scheduler": kind, "closure": True}
        else:
            late = {"names": names[-2:], "options": {"lr": 0.03}}
            job = {
                "optimizer": "AdamW",
                "options": {"lr": 0.01},
                "params": [{"names": names[:-2], "options": {}}],
                "late": late,
            }
        results = submission.run(m08_sharded.train, case.make_jobs(start=case.start(), **job), world_size=world)
        truth = unsharded(case, job)
        for rank, result in enumerate(results):
            expect(
                result["sizes"] == truth["sizes"],
                f"param_groups hold all parameters on every rank, {truth['sizes']} of them",
                f"rank {rank}: {result['sizes']}",
                diagnosis.GENERATOR,
            )
            expect(
                len(result["losses"]) == 6,
                "step calls the closure once",
                f"rank {rank}: {len(result['losses'])} calls in 6 steps",
                diagnosis.INNER_CLOSURE,
            )
            expect(
                result["returned"] == (result["losses"] if "closure" in job else []),
                "step(closure) returns what the closure returned",
                f"rank {rank}: {result['returned'][:3]}, where the closure returned {result['losses'][:3]}",
            )
        expect_unsharded(results, case, job, partial(diagnosis.wrong_scheduling, kind, job, names))


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
        results = submission.run(m08_sharded.train, case.make_jobs(start=case.start(), **job), world_size=world)
        for rank in groups[0]:
            for step in range(5):
                where = f"rank {rank}, step {step}"
                found = [launch.phase for launch in launches(results.events[rank], step) if launch.op == "reduce"]
                expect(
                    "clip" in found,
                    "clip_grad_norm_ reduces the gradients: their norm is that of the averages",
                    f"{where}: it launched no reduce",
                    diagnosis.SKIPPED if step == 4 else "",
                )
                expect(
                    "step" not in found,
                    "after clip_grad_norm_, which reduces the gradients, step does not reduce them again",
                    f"{where}: step launched {found.count('step')} reduces",
                    diagnosis.CLIPPED_TWICE,
                )
        norms, rounding = [result["norms"] for result in results], rounding_of(results)
        expect_norm(norms, truth["norms"], 0, case, job, results.events[groups[0][0]], rounding)
        # Adding 1e-6 to the norm, as torch does, or not: both are right. So is a factor that has float32 rounding.
        expect_unsharded(results, case, job, diagnosis.wrong_clipping, tolerance=1e-6)
        for step in range(1, 5):
            expect_norm(norms, truth["norms"], step, case, job, results.events[groups[0][0]], rounding)


# ---- ZeroOptimizer


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
        what = f"weights after 20 steps of {name} on ranks {join_names(case.group)} are those of the plain optimizer"
        if moving:
            what += ", though buffer.reallocate() moves the buffers before every step"
        why = partial(diagnosis.scaled_again, case, recipe, moving)
        expect_trained(what, results, weights_alone(case, recipe), case.start(), why, ranks=case.group)
        require_shared_state([results[rank] for rank in case.group], case, name)
    [world] = submission.worlds(2)
    results = submission.run(m08_zero.refusals, submission.case("Plain", world).make_jobs(**ZERO), world_size=world)
    for rank, answers in enumerate(results):
        for optimizer, answer in zip(("torch.optim.Adafactor", "a layer-wise LARS", "torch.optim.LBFGS"), answers):
            expect(
                answer is not None and len(answer.split()) > 2,
                f"ZeroOptimizer refuses {optimizer} with a sentence, for it does not treat every element by itself",
                f"rank {rank}: " + ("it was taken" if answer is None else f"an exception that says {answer!r}"),
                diagnosis.NOT_ELEMENTWISE,
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
                diagnosis.WHOLE_STATE,
            )
            masters = result["inner_bytes"].get("float32", 0)
            expect(
                dtype != torch.bfloat16 or masters <= bound,
                f"the fp32 masters take at most {bound} bytes on each of {world} ranks",
                f"rank {rank}: optimizer.optim steps on {masters} bytes of fp32",
                diagnosis.WHOLE_MASTERS,
            )
        total = sum(result["state_bytes"] for result in results)
        least = 0.9 * MOMENTS[name] * 4 * sum(p.numel() for p in trainable)
        expect(
            total >= least,
            f"optimizer.optim holds the state of {name}: that of all ranks together is the plain optimizer's, in fp32",
            f"{total} bytes together, expected {least / 0.9:.0f} and padding",
            diagnosis.OTHER_OPTIM,
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
                    where + summarize(before),
                    partial(diagnosis.gathered_gradients, before),
                )
                name = str(dtype).removeprefix("torch.")
                expect(
                    {launch.op for launch in inside} == {"all_gather"}
                    and sum(launch.nbytes for launch in inside) == numel * dtype.itemsize,
                    f"the optimizer's step gathers the weights, {numel} elements in {name}, and launches nothing else: "
                    "with the reduce-scatters, the volume of one all-reduce",
                    where + summarize(inside),
                    partial(diagnosis.wrong_volume, inside, numel, name),
                )


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
                diagnosis.INNER_GROUPS,
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
            partial(diagnosis.wrong_groups, case, recipe),
        )
        require_shared_state(results, case, "AdamW")


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
            partial(diagnosis.not_clipped, case, recipe),
            tolerance=min(rounding, NORMS[None]),
            otherwise=diagnosis.NOT_SCALED,
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
                diagnosis.ONE_SHARD,
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
                partial(diagnosis.partly_resumed, resumed, weights, state, recipe),
                otherwise=diagnosis.NOT_COVERED,
            )


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
        partial(diagnosis.no_masters, recipe, start, inputs, masters),
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
        partial(diagnosis.rounded_masters, recipe, masters, start, inputs, state),
        tolerance=exact,
        otherwise=diagnosis.MASTERS_NOT_COVERED,
    )


# ---- what the checks use


def rounding_of(results):
    """Return the relative error that the norms of these ranks may have."""
    return max(NORMS.get(dtype, MANY_STEPS) for result in results for dtype in result["norm_dtypes"])


def expect_unsharded(results, case, job, changes=diagnosis.nothing, tolerance=MANY_STEPS):
    """After the first step and after the last, the case's group has the weights that the unsharded optimizer gives.

    `changes` gives causes, and changes of the job with which one process would get the wrong weights too.
    """
    for rank in case.group:
        expect(
            not results[rank]["left"],
            "after optimizer.zero_grad() no parameter has a gradient, whoever owns it",
            f"rank {rank}: {join_names(results[rank]['left'])} have",
            diagnosis.ZEROED_PARTLY,
        )
    truth = unsharded(case, job)["weights"]
    for step, count in ((0, "one step"), (-1, f"{len(truth)} steps")):
        what = f"weights after {count} of {job['optimizer']} are those of the unsharded optimizer ({case.model} model)"
        found = [results[rank]["weights"][step] for rank in case.group]
        why = partial(diagnosis.wrong_weights, case, job, changes, found, step, results.events[case.group[0]])
        expect_equal(what, found, truth[step], ranks=case.group, hypotheses=why, tolerance=tolerance)
    require_owners(results, case.group)


def require_owners(results, group):
    """The weights count only if gradients are reduced to their owners, and the owners broadcast weights."""
    for rank in group if len(group) > 1 else []:
        found = [x for x in launches(results.events[rank]) if x.step is not None and x.phase != "construct"]
        found = [launch for launch in found if launch.phase == "step" or launch.numel > 16]  # a norm may travel
        expect(
            {launch.op for launch in found} == {"reduce", "broadcast"},
            "right weights earn points only if every gradient is reduced to its owner, which broadcasts the weights",
            f"rank {rank}: all steps together have {summarize(found)}",
            diagnosis.ALL_REDUCED,
        )


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


def expect_norm(norms, truth, step, case, job, events, rounding):
    """Expect the true norm of this step from all ranks of the group, with a relative error of at most `rounding`."""
    mine, expected = [norms[rank][step] for rank in case.group], truth[step]
    shown, *others = format_distinct(expected, *mine)
    found = f"ranks {join_names(case.group)} have {', '.join(others)}"
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
        "" if step else partial(diagnosis.wrong_norm, case, job, mine, expected, events),
    )


def recipe_of(name, **more):
    """What `m08_zero.take_steps` reads, for the optimizer of this name with its options above."""
    return {"optimizer": name, "options": OPTIMIZERS[name]} | more


def zero_jobs(case, recipe, world=None, steps=slice(None), **more):
    """What each of the first `world` ranks is told: the recipe, and its batches of these steps."""
    told = case.make_jobs(**{**ZERO, "recipe": recipe, **more})
    return PerRank(job | {"batches": job["batches"][steps]} for job in told[:world])


def expect_trained(
    what, results, truth, start, hypotheses=diagnosis.nothing, *, ranks=None, tolerance=MANY_STEPS, otherwise=""
):
    """Every rank has the weights `truth`, and a ZeroOptimizer; else CheckFailed with the likely cause.

    `hypotheses` gives, by cause, functions that compute the weights of a mistake; `otherwise` is the cause where none
    does.
    """
    ranks = list(ranks or range(len(results)))
    for rank in ranks:
        expect(
            results[rank]["is_optimizer"],
            "a ZeroOptimizer is a torch.optim.Optimizer",
            f"rank {rank}: it is none",
            diagnosis.NO_OPTIMIZER,
        )
        expect(
            not results[rank]["gather_grads"],
            "ZeroOptimizer sets ddp.gather_grads to False: a rank needs the averages of its own shards only",
            f"rank {rank}: ddp.gather_grads is True",
            diagnosis.GATHERED,
        )
    found = [results[rank]["weights"] for rank in ranks]
    with diagnosis.weights_explained(found, truth, start, hypotheses, tolerance, otherwise):
        expect_equal(what, found, truth, ranks=ranks, tolerance=tolerance)


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
            diagnosis.WHOLE_STATE,
        )


def padded_numel(params, world):
    """The elements of all buckets of a buffer of these parameters."""
    numels = [p.numel() for p in reversed(list(params)) if p.requires_grad]
    return compute_layout(numels, ZERO["arguments"]["bucket_numel"], world)["numel"]


def expect_norms(found, truth, when, rounding):
    """Expect each rank's norms to be those of one process, with relative errors of at most `rounding`."""
    for rank, norms in enumerate(found):
        wrong = [(got, want) for got, want in zip(norms, truth) if not abs(got - want) <= rounding * want]
        if not wrong:
            continue
        got, want = wrong[0]
        shown, exact = format_distinct(got, want)
        expect(
            False,
            f"clip_grad_norm_ returns the norm of all gradients together, {when}",
            f"it is {shown}, expected {exact}",
            partial(diagnosis.wrong_norms, found, got, want),
            rank=rank,
        )


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
        f"{where}: " + (join_names([f"{key}, a {kind}" for key, kind in kinds.items()]) or repr(found)),
        partial(diagnosis.no_masters_key, kinds),
    )
    for place, plain in enumerate(truth["param_groups"]):
        group = dict(enumerate(found["param_groups"])).get(place, {})
        for key in {"params", "lr", "weight_decay", "betas", "momentum"} & set(plain):
            expect(
                group.get(key) == plain[key],
                what + f"{key} of group {place} is {plain[key]}",
                f"{where}: it is {group.get(key)}",
                partial(diagnosis.wrong_option, key),
            )
    missing = [params[number] for number in truth["state"] if not isinstance(found["state"].get(number), dict)]
    expect(
        not missing,
        what + "the state of every parameter that has been stepped, by its number",
        f"{where}: there is none of {join_names(missing)}",
        diagnosis.LOST_STATE,
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
                    diagnosis.CUT_STATE,
                )
                got[name] = entry.double()
    with diagnosis.own_parts_suspected():
        expect_equal(what + "its moments", [got], expected, ranks=[rank], tolerance=MANY_STEPS)


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
