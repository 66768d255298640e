"""Graded checks of module 9: weights that are gathered while the next forward runs."""

from bisect import bisect
from functools import partial

import pytest
import torch

from brigade.course.checks.expectations import MANY_STEPS, expect_equal, join_names, replace_cause
from brigade.ranks.claims import Step, each_step, in_phase
from brigade.ranks.events import list_step_events
from helpers import training
from helpers.buffers import BUCKET_NUMEL, list_groups
from helpers.late_launches import blame_visits
from helpers.zero import draw_training, expect_trained, make_recipe, require_shared_state
from m08_zero_optimizer import scenario as m08_zero
from m08_zero_optimizer.expected import compute_weights
from m09_prefetched_weights import causes, scenario

JOB = {
    "package": "m09_prefetched_weights",
    "wrapper": "PrefetchedDDP",
    "optimizer_class": ("m09_prefetched_weights", "PrefetchedZeroOptimizer"),
}

# With so many parameters in each group, some groups contain the end of one block and the start of the next.
ACROSS_BLOCKS = 3


def make_jobs(case, recipe, buckets_per_group=2, bucket_numel=BUCKET_NUMEL, **more):
    """Return each rank's job. With `bucket_numel=1` every parameter has its own bucket."""
    arguments = {"bucket_numel": bucket_numel, "buckets_per_group": buckets_per_group}
    return case.make_jobs(**{**JOB, "arguments": arguments, "recipe": recipe, **more})


@pytest.mark.points(4)
def test_equals_unsharded(submission):
    """Weights equal the plain optimizer's, even with closures, clipping, skipped layers and evaluations."""
    models = ("Plain", "Tied", "Branches", "Frozen")
    details = ({"closure": True}, {}, {}, {"max_norm": 0.5})
    for world, model, detail in submission.pair_worlds((1, 2, 3, 4), models, details):
        branches = [0, 1, 0][:world] if model == "Branches" else None
        groups, case = draw_training(submission, model, world, branches)
        recipe = make_recipe("Adam" if model == "Branches" else "AdamW", **detail)
        bucket_numel = 1 if world == 3 else BUCKET_NUMEL
        # Where no evaluation awaits the weights, a forward must find weights that are still on the way.
        visits = training.VISITS if world == 4 else ()
        limits = (None if world == 1 else 1, bucket_numel)
        is_shared = bucket_numel == BUCKET_NUMEL and len(case.group) > 1
        parts = [*m08_zero.TRAINED, *["state_bytes"] * is_shared]
        jobs = make_jobs(case, recipe, *limits, groups=groups, finish=True, visits=visits, parts=parts)
        judge = partial(expect_unsharded, submission, jobs, case, recipe, is_shared)
        with blame_visits(submission, jobs, judge, m08_zero.train):
            judge(submission.run(m08_zero.train, jobs, world_size=world))
    expect_clipped_main_parameters(submission)


@pytest.mark.points(3)
def test_step_waits_for_no_weights(submission):
    """step launches one asynchronous all-gather per group, and returns without waiting for any of them."""
    for world, model, per_group in submission.pair_worlds((2, 3), ("Plain", "MixedDtypes"), (2, 1)):
        case = submission.case(model, world, steps=3, hidden_layers=5)
        jobs = make_jobs(case, make_recipe("SGD"), per_group)
        results = submission.run(scenario.observe, jobs, world_size=world)
        numels = sorted(numel for _, numel, _ in list_forward_groups(case.build(), world, per_group))
        for step in each_step(results.events, 3):
            gathers, why = list_gathers(step), partial(causes.explain_gathers, numels)
            gathers.are_one_for_each("group", "all_gather", numels, in_order=False, cause=why)
            others = step.launches().without_flags().where(lambda one: (one.op, one.phase) != ("all_gather", "step"))
            others.satisfy("all other launches of a step are reduce-scatters", lambda one: one.op == "reduce_scatter")
            expect_not_awaited(gathers, "step returns without waiting for the weights")


@pytest.mark.points(4)
def test_weights_are_awaited_just_before_use(submission):
    """Forward waits for each group just before the first module that has one of its parameters, in launch order."""
    # With one bucket per dtype, the group of the first layer also has the last layer.
    models, bucket_numels = ("Plain", "MixedDtypes", "MixedDtypes", "Listed", "Blocks"), (1, BUCKET_NUMEL, None, 1, 1)
    for world, model, bucket_numel in submission.pair_worlds((2, 3, 2, 2, 2), models, bucket_numels):
        per_group = ACROSS_BLOCKS if model == "Blocks" else 1
        hidden_layers = 5 if bucket_numel else 3
        case = submission.case(model, world, steps=4, hidden_layers=hidden_layers, forward_borders=True)
        still = {"optimizer": "SGD", "options": {"lr": 1e-6}}  # then the values at all borders are known
        jobs = make_jobs(case, still, per_group, bucket_numel, proven=4)
        results = submission.run(scenario.observe, jobs, world_size=world)
        module = case.build()
        expected = count_waits(module, list_forward_groups(module, world, per_group, bucket_numel))
        for step in each_step(results.events, 4):
            if step.number >= 2:  # in the first forward, it is unknown which modules are called
                expect_places(step, expected, model == "Listed")


@pytest.mark.points(2)
@pytest.mark.needs("test_equals_unsharded")
def test_groups_that_no_forward_used(submission):
    """If forward skips a layer, a layer that shares its weight or group waits for it, or else the next step does."""
    for world, model in submission.pair_worlds((2, 3, 2), ("Branches", "TiedBranches", "Blocks")):
        case = submission.case(model, world, steps=4, forward_borders=True, hidden_layers=3)
        per_group = ACROSS_BLOCKS if model == "Blocks" else 1
        jobs = make_jobs(case, make_recipe("Adam"), per_group, bucket_numel=1, proven=1)
        for job in jobs:  # the first forward uses the layer `left` or the first block, which the later ones skip
            for [batch] in job["batches"][1:]:
                batch["branch"] = -1 if model == "Branches" else 1  # `right`, or all other blocks
        results = submission.run(scenario.observe, jobs, world_size=world)
        for step in each_step(results.events, 4):
            early, end = find_early_module(step.events, step.number), find_write(step.events, step.number + 1)
            step.claim(
                "a module runs only when its own weights are complete, even those that it shares with a skipped layer",
                not early,
                f"{early and early['name']} starts with incomplete weights: {join_names(list_incomplete(early))}",
                partial(causes.explain_forward, step.events, list(case.parameters()), step.number),
            )
            gathers = step.launches("all_gather")
            what = "step returns without waiting for the weights, also for those that the next forward does not use"
            expect_not_awaited(gathers, what)
            left = gathers.where(lambda one, end=end: one.raced or all(place >= end for place in one.waits))
            left.are_none("the next step waits for unused groups before it writes weights", causes.explain_unused)
        require_prefetch(results.events, range(world))


@pytest.mark.points(2)
def test_complete_weights_elsewhere(submission):
    """state_dict, evaluations, a second step, and the optimizer's load_state_dict all use complete weights."""
    [world] = submission.worlds(2)
    readers = {  # how the weights are read -> the model, and how many steps the optimizer takes in total
        "ddp.state_dict()": ("Plain", 1),
        "an evaluation": ("Plain", 1),
        "an evaluation with a ParameterList": ("Listed", 1),
        "an evaluation with a layer that training never calls": ("Branches", 1),
        "a second step": ("Listed", 2),
        "load_state_dict and add_param_group": ("Plain", 3),
    }
    cases, recipes, jobs_per_call = [], [], []
    for reader, (model, steps) in readers.items():
        # 16-bit weights have main parameters, which start from the weights if a checkpoint lacks them.
        dtype = torch.bfloat16 if steps == 3 else torch.float64
        case = submission.case(model, world, dtype=dtype, branches=[1] * world)  # evaluations take branch 0
        # In bfloat16, steps must be large: the tolerance is 1/32 of the largest weight.
        recipe = {"optimizer": "SGD", "options": {"lr": 0.5 if steps == 3 else 0.05}}
        if steps == 3:  # add a group before the last step
            *first, weight, bias = case.parameters()
            recipe["groups"] = [{"names": first, "options": {}}]
            recipe["late"] = {"names": [weight, bias], "options": {}}
        cases.append(case)
        recipes.append(recipe)
        probe = torch.linspace(-1, 1, 2 * case.sizes[0], dtype=case.dtype).view(2, -1)
        # With a bucket for each parameter, nobody else waits for the weights of a layer or a ParameterList.
        bucket_numel = BUCKET_NUMEL if model == "Plain" else 1
        jobs_per_call.append(make_jobs(case, recipe, 1, bucket_numel, read=reader, probe=probe))
    all_results = submission.run_each(scenario.read_weights, jobs_per_call)
    settings = zip(readers.items(), cases, recipes, jobs_per_call, all_results, strict=True)
    for (reader, (_, steps)), case, recipe, jobs, results in settings:
        expected = step_alone(case, recipe, steps)
        if "evaluation" in reader:
            model = case.build(expected)
            expected = {"output": model(jobs[0]["probe"]).detach()}
        why = partial(causes.explain_reading, reader, submission, jobs, results, list(case.parameters()))
        with replace_cause(why):
            expect_equal(
                f"after step, {reader} {'use' if 'late' in recipe else 'uses'} the plain optimizer's weights",
                list(results),
                expected,
                tolerance=2**-5 if case.dtype == torch.bfloat16 else MANY_STEPS,
                hypotheses={causes.NOT_COPIED: [case.start()] * world} if "late" in recipe else {},
            )
        require_prefetch(results.events, range(world))


# ---- what the checks use


def expect_unsharded(submission, jobs, case, recipe, is_shared, results):
    """Expect the plain optimizer's weights, a prefetch and, if `is_shared`, state for a rank's own shards only."""
    steps, optimizer = len(case.batches[0]), recipe["optimizer"]
    what = f"weights after {steps} steps of {optimizer} equal those of the plain optimizer ({case.model} model)"
    with replace_cause(partial(causes.explain_incomplete, submission, jobs, results, case)):
        expect_trained(what, results, compute_weights(case, recipe), case.start(), ranks=case.group)
    if is_shared:
        require_shared_state([results[rank] for rank in case.group], case, recipe["optimizer"])
    require_prefetch(results.events, case.group if len(case.group) > 1 else [])


def expect_clipped_main_parameters(submission):
    """Expect a clipped step of SGD with 16-bit weights, which have main parameters, to be the plain optimizer's."""
    [world] = submission.worlds(2)
    start, recipe = torch.zeros(400, dtype=torch.bfloat16), make_recipe("SGD", max_norm=1.0)
    job = {"weights": [start], "batches": [[torch.full_like(start, 8)]], "recipe": recipe, "finish": True}
    job["parts"] = ["weights"]
    arguments = {"bucket_numel": BUCKET_NUMEL, "buckets_per_group": 1}
    results = submission.run(m08_zero.train_dots, JOB | job | {"arguments": arguments}, world_size=world)
    lr = recipe["options"]["lr"]  # the norm of 400 equal numbers is 20 times one of them
    expect_equal(
        "after a step that is clipped to the norm 1, bfloat16 weights equal the plain optimizer's",
        [result["weights"] for result in results],
        {"weights.0": torch.full_like(start, -lr / 20)},
        tolerance=2**-7,
        hypotheses={causes.NOT_CLIPPED: [{"weights.0": torch.full_like(start, -8 * lr)}] * world},
    )


def list_gathers(step):
    """Return the all-gathers that the optimizer's step launches."""
    return step.launches("all_gather").where(in_phase("step"))


def expect_not_awaited(gathers, what):
    """Expect the optimizer's step that has launched these all-gathers to wait for none of them."""
    why = partial(causes.explain_early_wait, len(gathers))
    gathers.satisfy(what, lambda one: not is_awaited_in_step(one), why, "it waits for {count} of {all} all-gathers")


def expect_places(step, expected, is_listed):
    """Expect the forward of a step to wait for the groups just before the modules that need them, in launch order."""
    gathers = list_gathers(Step(step.events, step.rank, step.number - 1))
    what = f"forward waits for all {len(gathers)} all-gathers of the previous step"
    gathers.satisfy(what, lambda one: bool(one.waits), causes.explain_forgotten)
    actual = locate_waits(step.events, step.number, gathers)
    gathers.claim(
        f"forward waits for groups just before the module that needs them first: {describe_waits(expected)}",
        all(actual.get(name, 0) == expected.get(name, 0) for name in {*actual, *expected}),
        describe_waits(actual) or "no wait",
        partial(causes.explain_places, actual, expected, is_listed),
    )
    starts = [place for place, event in enumerate(step.events) if event["kind"] == "module"]
    hooks = [bisect(starts, launch.waits[0]) for launch in gathers]
    order = [gathers[i] for i in sorted(range(len(hooks)), key=hooks.__getitem__)]  # free inside of one hook
    is_right = order == [*gathers] or is_listed  # the wrapper waits for the groups of a ParameterList first
    got = f"forward waits for launches {join_names([gathers.index(x) + 1 for x in order])}, in this order"
    what, why = "step launches the all-gathers in the order in which forward waits for them", causes.explain_order
    gathers.claim(what, is_right, got, partial(why, hooks))


def list_forward_groups(model, world, buckets_per_group, bucket_numel=BUCKET_NUMEL):
    """Return the groups, (dtype, elements, names of parameters), in forward order."""
    parameters = dict(model.named_parameters())
    places = {name: place for place, name in enumerate(parameters)}
    groups = list_groups(parameters, world, buckets_per_group, bucket_numel)
    return sorted(groups, key=lambda group: min(places[name] for name in group[-1]))


def count_waits(model, groups):
    """Return, by module in call order, how many groups have their first parameter there; "" is the wrapper or model."""
    owner_of = {}
    for name, module in model.named_modules():
        is_called = not isinstance(module, torch.nn.ParameterList | torch.nn.ModuleList)
        for parameter, _ in module.named_parameters(recurse=False):
            owner_of[f"{name}.{parameter}"] = name if is_called else ""
    order = ["", *(name for name, _ in model.named_modules() if name)]
    counts = dict.fromkeys(order, 0)
    for *_, members in groups:
        counts[min((owner_of[name] for name in members), key=order.index)] += 1
    return counts


def locate_waits(events, step, gathers):
    """Return how many of the launches `gathers` are first awaited in forward just before each module's start.

    "" is before the model's own forward. A wait while a module runs counts for the next one that starts.
    """
    places = {launch.waits[0] for launch in gathers if launch.waits}
    counts, num_waits = {}, 0
    for place, event in list_step_events(events, step):
        num_waits += event["phase"] == "forward" and place in places
        if event["phase"] == "forward" and event["kind"] == "module":
            key = event["name"] if event["at"] == "start" else f"the end of {event['name'] or 'the model'}"
            counts[key] = counts.get(key, 0) + num_waits
            num_waits = 0
    return counts


def describe_waits(counts):
    """Return where forward waits for how many groups, in words, from counts as in `locate_waits`."""
    places = {name: f"before {name}" if name else "in the wrapper's forward before any module" for name in counts}
    return join_names([f"{count} {places[name]}" for name, count in counts.items() if count])


def find_early_module(events, step):
    """Return the start of the first module in a step's forward whose own weights are incomplete; None if none is."""
    starts = [x for _, x in list_step_events(events, step) if x["kind"] == "module" and x["at"] == "start"]
    return next(filter(list_incomplete, starts), None)


def list_incomplete(start):
    """Return which of its own weights are incomplete at the start of a module; none if `start` is None."""
    return [name for name in start["own"] if name in start["incomplete"]] if start else []


def find_write(events, step):
    """Return the position at which the inner optimizer writes weights in a step, or else that of the step's end."""
    in_step = list_step_events(events, step)
    end = in_step[-1][0] + 1 if in_step else len(events)
    return next((place for place, event in in_step if event["kind"] == "write"), end)


def step_alone(case, recipe, steps):
    """Return the weights after `steps` steps of the plain optimizer on the first batch's gradients.

    The parameters of the recipe's group "late" take part only in the last step.
    """
    model, gradients = case.build(), case.gradients()
    late = recipe.get("late", {"names": []})["names"]
    optimizer = getattr(torch.optim, recipe["optimizer"])(model.parameters(), **recipe["options"])
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = None if name in late and step < steps - 1 else gradients[name]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def is_awaited_in_step(launch):
    """Return whether the optimizer's step that launched it also waits for it."""
    return launch.sync or ("step" in launch.wait_phases and launch.step in launch.wait_steps)


def require_prefetch(events_by_rank, ranks):
    """Require that weights are gathered, and that step does not wait for them."""
    what = "correct weights earn points only if step gathers the weights and returns without waiting for them"
    for rank in ranks:
        gathers = list_gathers(Step(events_by_rank[rank], rank, None))
        are_awaited = all(map(is_awaited_in_step, gathers))
        gathers.claim(what, not are_awaited, "step waits for {these}", causes.AS_MODULE_8)
