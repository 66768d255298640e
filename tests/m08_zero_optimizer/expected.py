"""What one process computes with the plain optimizer: the expected values of module 8's checks."""

import copy

import torch

from brigade.course.checks.reference import compute_loss
from m08_zero_optimizer import scenario as m08_zero
from m08_zero_optimizer import scenario_sharded as m08_sharded


def train_unsharded(case, job, ranks=None, steps=None, forget=False):
    """Return what `run_loop` returns in one process that trains on the batches of `ranks` (default: the case's group).

    With `forget`, each step has a new optimizer.
    """
    model = case.build()
    batches = [[case.batches[rank][step][0] for rank in ranks or case.group] for step in range(len(case.batches[0]))]
    batches = batches[:steps]

    def clip(max_norm):
        return job.get("clip", torch.nn.utils.clip_grad_norm_)(list(model.parameters()), max_norm)

    for part in [[step] for step in batches] if forget else [batches]:
        optimizer = getattr(torch.optim, job["optimizer"])(m08_sharded.select_params(job, model), **job["options"])
        if job.get("is_late"):
            use_old_options(optimizer)
        outcome = m08_sharded.run_loop(job, model, optimizer, part, clip)
    return outcome


def use_old_options(optimizer):
    """Let each step use the options of the step before, and the first step those of the construction."""
    old, now = [dict(group) for group in optimizer.param_groups], []

    def update(all_options):
        for group, options in zip(optimizer.param_groups[: len(all_options)], all_options, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    def take_old(*_):
        now[:] = [dict(group) for group in optimizer.param_groups]
        update(old)

    def restore(*_):
        update(now)
        old[:] = now

    optimizer.register_step_pre_hook(take_old)
    optimizer.register_step_post_hook(restore)


def find_wrong_root(case, events):
    """Return, in words, which parameter is broadcast from another rank than its gradient is reduced to; "" if none."""
    for name in case.parameters():
        launched = [event for event in events if event["kind"] == "launch" and event["name"] == name]
        launched = [event for event in launched if event["phase"] != "construct"]  # it may make the weights equal
        to, source = ([event["root"] for event in launched if event["op"] == op] for op in ("reduce", "broadcast"))
        if to and source and to[0] != source[0]:
            return (
                f"the gradient of {name} is reduced to rank {to[0]} of the group, but the weights are broadcast from "
                f"rank {source[0]}"
            )
    return ""


def train_alone(case, recipe, ranks=None, steps=None, start=None, load=None):
    """Return weights, state_dict and norms after the plain optimizer's `steps` on the batches of `ranks`."""
    model = case.build(start)
    ranks, steps = case.group if ranks is None else ranks, steps or range(len(case.batches[0]))

    def gradients(step):
        total = 0.0
        for rank in ranks:
            for batch in case.batches[rank][steps[step]]:
                loss = compute_loss(model, batch) * recipe.get("loss_scale", 1) / len(ranks)
                loss.backward()
                total += loss.item()
        return total

    return take_steps_alone(recipe, model, len(steps), gradients, load)


def compute_weights(*args, **options):
    """Return the weights of `train_alone`."""
    return train_alone(*args, **options)[0]


def take_steps_alone(recipe, model, steps, gradients, load=None):
    """Train like `train_alone`, for any model and a function that computes its gradients."""
    groups = m08_zero.make_groups(recipe, model)
    optimizer_cls = getattr(torch.optim, recipe["optimizer"])
    optimizer = optimizer_cls(model.parameters() if groups is None else groups, **recipe["options"])
    if recipe.get("is_late"):
        use_old_options(optimizer)
    if load is not None:
        optimizer.load_state_dict(copy.deepcopy(load))  # it may keep the tensors that it gets
    clip = recipe.get("clip", torch.nn.utils.clip_grad_norm_)
    outcome = m08_zero.take_steps(
        recipe, model, optimizer, steps, gradients, lambda limit: clip(list(model.parameters()), limit)
    )
    return {name: p.detach().clone() for name, p in model.named_parameters()}, optimizer.state_dict(), outcome["norms"]


def train_dots_alone(recipe, weights, inputs, load=None):
    """Return weights and state_dict of one process that steps on these weights, in their dtypes."""
    model = m08_zero.Dots(list(weights.values()))

    def gradients(step):
        for own in inputs:
            (model(own[step]) / len(inputs)).backward()
        return 0.0

    trained, state, _ = take_steps_alone(recipe, model, len(inputs[0]), gradients, load)
    return trained, state


def compute_dots_weights(recipe, weights, inputs, load=None, rounded=None):
    """Return the weights of `train_dots_alone`, in the dtypes of `rounded` or their own."""
    return round_like(train_dots_alone(recipe, weights, inputs, load)[0], rounded or weights)


def widen(weights):
    return {name: weight.float() for name, weight in weights.items()}


def round_like(masters, weights):
    """Return the main parameters, rounded to the dtypes of the weights."""
    return {name: master.to(weights[name].dtype) for name, master in masters.items()}
