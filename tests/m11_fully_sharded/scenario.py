"""Functions that the ranks run in the checks of module 11. The expected values use the same trees of modules."""

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import OPTIMIZERS, border, compute_loss
from brigade.course.checks.forms import Among, DictOf, Like, ListOf, Maybe, OneOf, like, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.memory import LiveMemory
from brigade.ranks.rank.recording import phase
from helpers.training import (
    INTERFACE,
    DrawnGradient,
    accumulate,
    build,
    create_group,
    describe_interface,
    draw,
    forward_backward,
    list_steps_and_end,
    make_meta_model,
    move_to_device,
)

PACKAGE = "m11_fully_sharded"
STATE = DictOf(Like())  # the form of a state dict; the checks compare keys, dtypes and shapes


# ---- trees of modules for plan_units


class Leaf(nn.Module):
    """A module with one or two parameters."""

    def __init__(self, count: int = 1):
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.zeros(2)))


class Layer(nn.ModuleDict):
    """A type that checks use for units."""


class WideLayer(Layer):
    """A subclass of `Layer`."""


class Expert(nn.ModuleDict):
    """Another type that checks use for units."""


UNIT_TYPES = {
    "Block": (edge_case_models.Block,),
    "Linear": (nn.Linear,),
    "Layer": (Layer,),
    "WideLayer": (WideLayer,),
    "Expert": (Expert,),
    "Layer or Expert": (Layer, Expert),
}


def make_tree(tree: str | int) -> nn.Module:
    """Return the tree of modules with this name, or a random tree for a number."""
    if isinstance(tree, int):
        return make_random_tree(random.Random(tree))
    first, second, leave = Layer({"a": Leaf(2)}), Layer({"b": Leaf()}), Leaf(2)
    layers = nn.ModuleDict({"first": first, "second": second})
    if tree in ("tied across layers", "nothing but a tied weight"):
        second["b"].weight0 = first["a"].weight0
    elif tree == "tied inside a layer":
        first["a"].weight1 = first["a"].weight0
    elif tree == "tied to the root":
        leave.weight1 = first["a"].weight1
    elif tree == "one layer twice":
        layers["third"] = first
    parts = {
        "layers and more": {"enter": Leaf(), "layers": layers, "leave": leave},
        "a layer in a layer": {"outer": Layer({"inner": second, "more": Leaf(2)}), "leave": leave},
        "a subclass": {"enter": Leaf(), "layer": Layer({"a": Leaf()}), "wide": WideLayer({"b": Leaf()})},
        "names that begin alike": {"layer": first, "layer1": Leaf(), "layer10": second},
        "nothing but a tied weight": {"layers": layers, "third": Layer({"c": Leaf()})},
        "tied to the root": {"layers": layers, "leave": leave},
    }
    return nn.ModuleDict(parts[tree]) if tree in parts else layers


def make_random_tree(rng: random.Random) -> nn.Module:
    modules: list[nn.Module] = []

    def grow(depth: int) -> nn.Module:
        if not depth or rng.random() < 0.3:
            modules.append(Leaf(rng.randint(1, 2)))
            return modules[-1]
        kind = rng.choice([nn.ModuleDict, nn.ModuleDict, Layer, WideLayer, Expert])
        return kind({rng.choice("abc") + str(number): grow(depth - 1) for number in range(rng.randint(1, 3))})

    root = nn.ModuleDict({f"m{number}": grow(3) for number in range(3)} | {"last": Layer({"a": Leaf()})})
    for _ in range(rng.randint(0, 2)):
        rng.choice(modules).weight0 = rng.choice(modules).weight0
    return root


@returns(lambda cases: [ListOf(ListOf(str))] * len(cases))
def plan_units(cases: list[tuple[str | int, str]]) -> list[list[list[str]]]:
    """Return what plan_units returns for each tree and name of unit types."""
    function = student(PACKAGE, "plan_units")
    answers = [function(make_tree(tree), UNIT_TYPES[types]) for tree, types in cases]
    return [[[str(name) for name in unit] for unit in units] for units in answers]


@returns(lambda cases: [ListOf((str, int))] * len(cases))
def plan_schedules(cases: list[tuple[int, int, bool]]) -> list[list[tuple[str, int]]]:
    """Return what plan_schedule returns for each case."""
    function = student(PACKAGE, "plan_schedule")
    return [[(str(action), int(unit)) for action, unit in function(*case)] for case in cases]


# ---- the wrapper


class FreedShardError(Exception):
    """A shard has no memory after construction. Reading it could end the process."""


def wrap(job: dict, model: nn.Module) -> nn.Module:
    """Wrap the model with the submission's wrapper."""
    group = create_group(job)
    arguments = job.get("arguments", {}) | ({} if group is None else {"process_group": group})
    with phase("construct"):
        ddp = student(PACKAGE, "FullyShardedDDP")(model, UNIT_TYPES[job["unit_type"]], **arguments)
    for number, shard in enumerate(ddp.shards()):
        if (nbytes := shard.untyped_storage().nbytes()) < shard.nbytes:
            is_shared = any(shard.untyped_storage() is p.untyped_storage() for p in model.parameters())
            owner = "the storage of full weights" if is_shared else "its storage"
            raise FreedShardError(f"shards()[{number}] needs {shard.nbytes} bytes, but {owner} has {nbytes}")
    return ddp


def change_forward(model: nn.Module, kind: str = "") -> None:
    """Let a model of type Blocks compute the activations of its blocks again in backward ("checkpointed").

    If it is "scaled", a float32 buffer multiplies the inputs of the blocks, which become float32. Blocks have two more
    arguments (see `run_block`). All blocks except the first get keyword arguments, unless it is "scaled, by position".
    With "scaled, checkpointed", it is both.
    With "narrow norms", their norms compute in float32, so that each block has two dtypes.
    """
    if kind == "narrow norms":
        for block in model.blocks:
            block.norm.float().forward = partial(run_narrow, block.norm.forward)
        return
    if kind.startswith("scaled"):
        for block in model.blocks:
            block.forward = partial(run_block, block.forward)
        weight = model.first.weight
        model.register_buffer("scale", torch.linspace(0.5, 1.5, weight.shape[0], device=weight.device))
    if kind:
        model.forward = partial(run_changed, model, kind)


def run_changed(model: nn.Module, kind: str, x: Tensor, branch: int) -> Tensor:
    x = border(model.first(x), 0)
    for number, block in enumerate(model.blocks, 1):
        with set_checkpoint_early_stop(False):  # so that the forward hooks of the second forward run, too
            if kind == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                wide = torch.float32 if x.dtype == torch.float32 else torch.float64
                arguments = x * model.scale, x.to(wide), torch.arange(len(x), device=x.device)
                run = block
                if "checkpointed" in kind:
                    run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
                is_keyword = "by position" not in kind and number > 1
                x = run(**dict(zip(("x", "other", "rows"), arguments, strict=True))) if is_keyword else run(*arguments)
        x = border(x, number)
    return model.last(x.to(model.last.weight.dtype))


def run_narrow(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x.float()).to(x.dtype)


def run_block(forward: Callable[[Tensor], Tensor], x: Tensor, other: Tensor, rows: Tensor) -> Tensor:
    """Run a block. `other` must have the dtype of `x` after casts, and `rows` are the indices of all rows."""
    if x.dtype != other.dtype:
        raise TypeError(f"the dtypes of a block's arguments are {x.dtype} and {other.dtype}")
    return forward(x[rows])


def list_alive(model: nn.Module) -> list[str]:
    """Return the names of the parameters that have memory."""
    return [name for name, p in model.named_parameters() if p.untyped_storage().nbytes()]


def list_gradients(model: nn.Module) -> list[str]:
    """Return the names of the parameters that have a gradient."""
    return [name for name, p in model.named_parameters() if p.grad is not None]


def cast_layers(job: dict, model: nn.Module) -> None:
    """Give every second parameter the dtype job["cast"], if it is set."""
    for parameter in list(model.parameters())[:: 2 if "cast" in job else 10**6]:
        parameter.data = parameter.data.to(job.get("cast", parameter.dtype))


def list_names(job: dict) -> ListOf:
    """Return the form of a list of names of the parameters of a job's model."""
    return ListOf(Among(*(name for name, _ in make_meta_model(job).named_parameters())))


def form_constructed(job: dict) -> dict:
    """Return the form of what `construct` returns."""
    return {"shards": ListOf(Like()), "trainable": bool, "alive": list_names(job), "storages": int, "kept": int}


@returns(form_constructed)
def construct(job: dict) -> dict:
    """Construct the wrapper, and describe its shards."""
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    cast_layers(job, model)
    ddp = wrap(job, model)
    shards = list(ddp.shards())
    return {
        "shards": [shard.detach() for shard in shards],
        "trainable": all(isinstance(shard, nn.Parameter) and shard.requires_grad for shard in shards),
        "alive": list_alive(model),
        "storages": len({p.untyped_storage().data_ptr() for p in model.parameters()} - {0}),
        "kept": sum({s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in shards}.values()),
    }


PASSES = ("", "in an evaluation", "with no_sync")  # of `measure`


class Boundaries:
    """What is alive in each forward pre-hook and gradient hook of a model: `entries`, by text that names the hook.

    "alive" says of each parameter whether it has memory. Names at each hook would be too many values for a result.
    """

    def __init__(self, model: nn.Module, memory: LiveMemory | None = None, shards: Sequence[Tensor] = ()):
        self.memory, self.entries, self.shards = memory, {}, shards
        self.parameters = dict(model.named_parameters())
        self.kind, self.is_backward = "", False  # one of PASSES
        for name, submodule in model.named_modules():
            if next(submodule.parameters(recurse=False), None) is not None:
                submodule.register_forward_pre_hook(lambda *_, name=name: self.note("forward", name))
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.note("backward", name))

    def run(self, model: nn.Module, batch: dict) -> None:
        self.is_backward = False
        loss = compute_loss(model, batch)
        if self.kind == PASSES[1]:
            return
        self.is_backward = True
        loss.backward()

    def note(self, direction: str, name: str) -> None:
        if self.is_backward and direction == "forward":
            direction = "recomputation"
        known = [*self.shards, *(shard.grad for shard in self.shards)]
        nbytes = self.memory.count(weights=self.parameters.values(), known=known) if self.memory else {}
        alive = [parameter.untyped_storage().nbytes() > 0 for parameter in self.parameters.values()]
        self.entries[join_words(direction, name, self.kind)] = {"alive": alive, "bytes": nbytes}


def join_words(*words: str) -> str:
    return " ".join(filter(None, words))


def list_boundaries(job: dict) -> list[tuple[str, str, str]]:
    """Return the boundaries of `measure` in the order of a bare model: direction, name and pass."""
    branch = job["batches"][1][0]["branch"]
    return find_boundaries(job["model"], tuple(job["sizes"]), job["dtype"], job.get("forward", ""), branch)


@functools.lru_cache(maxsize=16)  # forms and checks ask for the same ones
def find_boundaries(
    model_name: str, sizes: tuple[int, ...], dtype: torch.dtype, forward: str, branch: int
) -> list[tuple[str, str, str]]:
    """Return the boundaries of a model and of the blocks that a branch skips, with any weights and batch."""
    model = edge_case_models.MODELS[model_name](sizes).to(dtype)
    change_forward(model, forward)
    batch = {"x": torch.zeros(1, sizes[0], dtype=dtype), "y": torch.zeros(1, 1, dtype=dtype), "branch": branch}
    found: list[tuple[str, str, str]] = []
    boundaries = Boundaries(model)
    boundaries.note = lambda direction, name: found.append(
        ("recomputation" if boundaries.is_backward and direction == "forward" else direction, name, boundaries.kind)
    )
    for boundaries.kind in PASSES:
        with torch.set_grad_enabled(boundaries.kind != PASSES[1]):
            boundaries.run(model, batch)
    return found


def form_measured(job: dict) -> dict:
    """Return the form of what `measure` returns."""
    names, every = list_names(job), list_boundaries(job)
    count = len(list(make_meta_model(job).parameters()))
    boundary = {"alive": Like(torch.bool, (count,)), "bytes": {"weights": int, "known": int, "other": int}}
    boundaries = {join_words(*place): boundary for place in every}
    bare = {join_words(*place): int for place in every if place[-1] == PASSES[0]}
    both = {"boundaries": boundaries, "bare": bare, "held": int, "sharded": int}
    return both | {"after": names, "whole": names, "unsynced": names}


@returns(form_measured)
def measure(job: dict) -> dict:
    """Take two steps. Return what is alive at every boundary of the second, for the wrapper and for the bare model.

    The bare model drops every gradient as soon as it is complete. An evaluation follows. A third step is in no_sync, so
    it keeps full gradients: "unsynced" is what is alive after its backward.
    """
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    change_forward(model, job.get("forward", ""))
    with LiveMemory() as built:
        ddp = wrap(job, model)
    held = built.count(weights=[*model.parameters(), *model.buffers()], known=ddp.shards())["other"]
    step, last = (batches[0] for batches in job["batches"])
    compute_loss(ddp, cut(step)).backward()
    ddp.finish_grad_sync()
    with LiveMemory() as memory:
        boundaries = Boundaries(model, memory, ddp.shards())
        boundaries.run(ddp, cut(last))
        ddp.finish_grad_sync()
        after, whole = list_alive(model), list_gradients(model)
        boundaries.kind = PASSES[1]
        with torch.no_grad():
            boundaries.run(ddp.eval(), cut(last))
        boundaries.kind = PASSES[2]
        with ddp.train().no_sync():
            boundaries.run(ddp, cut(last))
        unsynced = list_alive(model)
    bare = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    change_forward(bare, job.get("forward", ""))
    if dtype := job["arguments"].get("compute_dtype"):
        bare.to(dtype)
        last["x"] = last["x"].to(dtype)
    with LiveMemory() as memory:
        alone = Boundaries(bare, memory)
        for parameter in bare.parameters():
            parameter.register_post_accumulate_grad_hook(drop)
        alone.run(bare, cut(last))
    entries = {key: entry | {"alive": torch.tensor(entry["alive"])} for key, entry in boundaries.entries.items()}
    both = {"boundaries": entries, "bare": {k: one["bytes"]["other"] for k, one in alone.entries.items()}}
    sharded = sum(shard.nbytes for shard in ddp.shards())
    return both | {"after": after, "whole": whole, "unsynced": unsynced, "held": held, "sharded": sharded}


class LargeUnit(Layer):
    """A unit whose forward adds the sum of its weight to the output of the unit before."""

    def __init__(self, seed: int, numel: int):
        super().__init__()
        self.weight = nn.Parameter(draw(seed, numel).float())

    def forward(self, x: Tensor, seed: int) -> Tensor:
        return x + DrawnGradient.apply(self.weight, seed)


class LargeModel(nn.Module):
    """Large units in a row, behind a root with one weight."""

    def __init__(self, seed: int, count: int, numel: int):
        super().__init__()
        self.root = nn.Parameter(torch.zeros(2, device=device()))
        self.units = nn.ModuleList(LargeUnit(seed + i, numel) for i in range(count))

    def forward(self, seed: int) -> Tensor:
        x = self.root.sum()
        for i, unit in enumerate(self.units):
            x = unit(x, seed + i)
        return x


@returns(lambda job: None, lambda job: [0])
def train_large(job: dict) -> None:
    """Run forward, backward and finish_grad_sync on a large model."""
    ddp = wrap(job, LargeModel(job["start"], job["count"], job["numel"]))
    recording.note("step", step=0)
    ddp(job["seed"]).backward()
    ddp.finish_grad_sync()


def cut(batch: dict) -> dict:
    """Return a batch of one example, whose activations are small."""
    return move_to_device({key: v[:1] if isinstance(v, Tensor) else v for key, v in batch.items()})


def drop(parameter: Tensor) -> None:
    parameter.grad = None


def form_views(job: dict) -> dict:
    """Return the form of what `describe_views` returns."""
    names = list_names(job)
    views = {name: (int, int) for name, _ in make_meta_model(job).named_parameters()}
    return {"views": views, "moved": names, "alive": names, "gathered": form_weights(job)}


@returns(form_views)
def describe_views(job: dict) -> dict:
    """Gather and free all units. Return where each parameter's view is, and which parameters got other storages.

    A view is the number of its storage and its first element.
    """
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    ddp = wrap(job, model)
    storages = {name: p.untyped_storage() for name, p in model.named_parameters()}
    kept = list(storages.values())  # a storage's number is the place of the first parameter that uses it
    numbers = {name: next(n for n, other in enumerate(kept) if other is own) for name, own in storages.items()}
    gathered = select_weights(model, ddp.full_state_dict())
    evaluate(ddp, cut(job["batches"][0][0]))
    views = {name: (numbers[name], p.storage_offset()) for name, p in model.named_parameters()}
    moved = [name for name, p in model.named_parameters() if p.untyped_storage() is not storages[name]]
    return {"views": views, "moved": moved, "alive": list_alive(model), "gathered": gathered}


def evaluate(ddp: nn.Module, batch: dict) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        compute_loss(ddp, batch)


def form_weights(job: dict) -> dict:
    """Return the form of what `select_weights` returns. The checks compare dtypes and shapes."""
    return dict.fromkeys((name for name, _ in make_meta_model(job).named_parameters()), Maybe(Like()))


def select_weights(model: nn.Module, state: dict) -> dict:
    """Return what a state dict has for each parameter of the model, or None."""
    return {name: state.get(name) for name, _ in model.named_parameters()}


def like_trained(job: dict) -> dict:
    """Return the form of the weights of a job's model, whose forward may have changed some dtypes."""
    model = copy.deepcopy(make_meta_model(job))
    change_forward(model, job.get("forward", ""))
    return like(dict(model.named_parameters()))


def form_training(job: dict) -> dict:
    """Return the form of what `train` returns. The checks compare the numbers and sizes of shards and gradients."""
    steps, names = len(job["batches"]), list_names(job)
    forms = {
        "weights": form_weights(job),
        "trained": like_trained(job),
        "state": STATE,
        "gradients": ListOf(Maybe(Like())),
        "numels": ListOf(int),
        "interface": INTERFACE,
        "norm": float,
        "clipped": ListOf(Like()),
        "accumulated": [names] * steps,
        "reports": [ListOf(OneOf(int, names.form))] * steps,
        "early": [ListOf(int)] * steps,
        "optimizer": Maybe(DictOf(DictOf(Like()), int)),
        "is_shared": bool,
    }
    always = {"missing": [ListOf(int)] * steps, "alive": [names] * steps, "whole": [names] * steps}
    return always | {part: forms[part] for part in job["parts"]}


@returns(form_training, list_steps_and_end)
def train(job: dict, wrap: Callable[[dict, nn.Module], nn.Module] = wrap) -> dict:
    """Load state dicts if there are some, and train. Return which shards have no gradient after each step, which
    parameters have memory, and which have a gradient.

    Return also what job["parts"] names: the final "weights", or "trained" if only `witness/content.py` reads them; the
    whole "state" dict; the first "gradients" of the shards, their "numels", the "interface", the first "norm" and the
    "clipped" gradients; those "accumulated" in no_sync; "reports" and "early" (see `Reports`); the state of the
    "optimizer" and whether it "is_shared".
    The job may have: "load", a state dict and an optimizer's; "clip", the largest norm; "finish_each", to call
    finish_grad_sync after each micro-batch; "zero", "ddp" or "optimizer"; "interrupted", a step in which exceptions end
    the no_sync blocks; "crossed", a step in which either a forward or its backward is inside no_sync, but not both;
    "drop", to accumulate gradients that are then cleared. torch.empty returns tensors of NaN, so that nothing depends
    on chance.
    """
    torch.set_deterministic_debug_mode("warn")
    model = build(job)
    change_forward(model, job.get("forward", ""))
    ddp = wrap(job, model)
    optimizer = OPTIMIZERS[job["optimizer"]](shards := list(ddp.shards()))
    reports = Reports(ddp, model, shards) if "reports" in job["parts"] else None
    if job.get("forward") in ("scaled", "scaled, checkpointed"):
        ddp.forward = partial(run_by_turns, ddp.forward, itertools.count())
    if "load" in job:
        state, optimizer_state = job["load"]
        ddp.load_full_state_dict(state)
        with phase("checkpoint"):
            ddp.full_state_dict()
        if optimizer_state:
            ddp.load_full_optimizer_state_dict(optimizer, optimizer_state)
    results: dict[str, Any] = {key: [] for key in ("missing", "alive", "whole", "accumulated", "reports", "early")}
    results |= {"norm": float("nan"), "clipped": []}
    for step in range(len(job["batches"])):
        recording.note("step", step=step)
        take_gradients(job, step, ddp, model, optimizer, results)
        if reports:
            results["reports"].append(reports.entries.copy())
            results["early"].append(reports.list_early())
            reports.entries.clear()
        missing = [number for number, shard in enumerate(shards) if shard.grad is None]
        if step == 0:
            results["gradients"] = copy_gradients(shards)
        results["missing"].append(missing)
        results["alive"].append(list_alive(model))
        results["whole"].append(list_gradients(model))
        if "clip" in job and not missing:
            with phase("clip"):
                norm = ddp.clip_grad_norm_(job["clip"])
            if step == 0:
                results["norm"] = float(norm)
                results["clipped"] = copy_gradients(shards)
        with phase("step"):
            optimizer.step()
    recording.note("step", step=None)
    with phase("checkpoint"):
        results["state"] = ddp.full_state_dict()
        if "optimizer" in job["parts"]:
            is_saved = hasattr(ddp, "full_optimizer_state_dict")  # given, but may be absent
            saved = ddp.full_optimizer_state_dict(optimizer)["state"] if is_saved else None
            addresses = [value.data_ptr() for entry in (saved or {}).values() for value in entry.values()]
            results |= {"optimizer": saved, "is_shared": len({*addresses}) < len(addresses)}
    results |= {"interface": describe_interface(ddp, model), "weights": select_weights(model, results["state"])}
    results["trained"] = results["weights"]
    results["numels"] = [shard.numel() for shard in shards]
    return {key: results[key] for key in ("missing", "alive", "whole", *job["parts"])}


train.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry


class Reports:
    """`entries` contains the number of each shard that the wrapper reports in a step, or -1 for another tensor.

    Between them, it contains the names of gradients, when they are ready.
    """

    def __init__(self, ddp: nn.Module, model: nn.Module, shards: list[Tensor]):
        self.entries: list[int | str] = []
        self.shards, self.gradients = shards, {}  # the gradients of shards when they were reported
        ddp.shard_reduced = self.note  # an empty method in module 11
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.entries.append(name))

    def note(self, shard: Tensor) -> None:
        number = next((number for number, one in enumerate(self.shards) if one is shard), -1)
        self.entries.append(number)
        self.gradients[number] = None if shard.grad is None else shard.grad.clone()

    def list_early(self) -> list[int]:
        """Return the shards that have another gradient after the finish than when they were last reported."""
        pairs = [(number, self.gradients.get(number), shard.grad) for number, shard in enumerate(self.shards)]
        return [number for number, then, now in pairs if then is None or now is None or not torch.equal(then, now)]


def run_by_turns(forward: Callable[..., Any], numbers: Iterator[int], x: Tensor, branch: int) -> Any:
    """Call the wrapper's forward with positional arguments, and every second time with keyword arguments."""
    return forward(x=x, branch=branch) if next(numbers) % 2 else forward(x, branch)


def copy_gradients(shards: list[Tensor]) -> list[Tensor | None]:
    return [None if shard.grad is None else shard.grad.clone() for shard in shards]


def take_gradients(job: dict, step: int, ddp: nn.Module, model: nn.Module, optimizer: Any, results: dict) -> None:
    """Run the forward and backward passes of a step, and finish_grad_sync."""
    batches = job["batches"][step]
    if job.get("drop") and step == 0:
        accumulate(ddp, batches[:1], False)
        ddp.zero_grad()
    (ddp if job.get("zero") == "ddp" else optimizer).zero_grad()
    if job.get("finish_each"):
        for batch in batches:
            forward_backward(ddp, batch)
            ddp.finish_grad_sync()
        return
    is_crossed = step == job.get("crossed")
    if is_crossed:
        for batch in batches[:-1]:
            cross_no_sync(ddp, batch, is_reduced=False)
    else:
        accumulate(ddp, batches[:-1], step == job.get("interrupted"))
    if "accumulated" in job["parts"]:
        results["accumulated"].append(list_gradients(model))
    if is_crossed:
        cross_no_sync(ddp, batches[-1], is_reduced=True)
    else:
        forward_backward(ddp, batches[-1])
    with phase("finish"):
        ddp.finish_grad_sync()


# ---- steps in which forwards and backwards come at unusual places


EVALUATION, DISCARDED = "an evaluation", "a discarded forward"
PLACES = ("before the forward", "between forward and backward", "between backward and finish", "before the step")
EXTRA = [(kind, place) for kind in (EVALUATION, DISCARDED) for place in PLACES]
# Each order of calls has the gradients of both micro-batches. They are equal if one forward has two backward passes.
TWO_BACKWARDS = ("a second backward before the finish", "one backward for two forwards", "the first backward last")
TWICE = "two backward passes for one forward"
UNSYNCED = ("only no_sync", "no_sync last")
LATE = tuple(f"only no_sync and then {kind}" for kind in (EVALUATION, DISCARDED))
ORDERS = [*EXTRA, *TWO_BACKWARDS, TWICE, *UNSYNCED, *LATE]


def form_unusual(job: dict) -> OneOf:
    """Return the form of what `train_unusually` returns."""
    names = list_names(job)
    return OneOf({"refusal": str}, {"alive": names, "evaluated": names, "weights": form_weights(job)})


@returns(form_unusual, list_steps_and_end)
def train_unusually(job: dict, wrap: Callable[[dict, nn.Module], nn.Module] = wrap) -> dict:
    """Train with steps of the order job["order"]. Return the weights and what was alive, or why the wrapper refused."""
    model = build(job)
    change_forward(model, job.get("forward", ""))
    ddp = wrap(job, model)
    optimizer = OPTIMIZERS[job["optimizer"]](list(ddp.shards()))
    results: dict[str, Any] = {"alive": [], "evaluated": []}
    recording.note("order", number=job["number"])
    try:
        for step, batches in enumerate(job["batches"]):
            recording.note("step", step=step)
            optimizer.zero_grad()
            take_unusual_step(job["order"], ddp, model, [move_to_device(batch) for batch in batches], results)
            with phase("step"):
                optimizer.step()
    except RuntimeError as error:
        if type(error) is not RuntimeError or any(text in str(error) for text in ("gloo", "setStorage", "size of 0")):
            raise  # this is no refusal
        for number in [*range(step + 1, len(job["batches"])), None]:
            recording.note("step", step=number)
        return {"refusal": str(error)}
    recording.note("step", step=None)
    with phase("checkpoint"):
        return results | {"weights": select_weights(model, ddp.full_state_dict())}


def take_unusual_step(order: Any, ddp: nn.Module, model: nn.Module, batches: list[dict], results: dict) -> None:
    """Run the forward and backward passes of a step, and finish_grad_sync, in this order."""
    if isinstance(order, tuple):
        kind, where = order
        for place in PLACES:
            if place == where:
                with torch.set_grad_enabled(kind == DISCARDED):
                    compute_loss(ddp, batches[0])
                if kind == EVALUATION and place in (PLACES[0], PLACES[3]):
                    results["evaluated"] += list_alive(model)
            if place == PLACES[0]:
                loss = compute_loss(ddp, batches[0])
            elif place == PLACES[1]:
                loss.backward()
            elif place == PLACES[2]:
                ddp.finish_grad_sync()
                results["alive"] += list_alive(model)
        return
    if order in TWO_BACKWARDS[1:]:
        losses = [compute_loss(ddp, batch) for batch in batches]
        for loss in losses[::-1] if order == TWO_BACKWARDS[2] else [sum(losses)]:
            loss.backward()
    elif order == TWICE:
        loss = compute_loss(ddp, batches[0])
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        for number, batch in enumerate(batches):
            is_unsynced = order in (UNSYNCED[0], *LATE) or (order == UNSYNCED[1] and number)
            with ddp.no_sync() if is_unsynced else contextlib.nullcontext():
                compute_loss(ddp, batch).backward()
        if order in LATE:
            with torch.set_grad_enabled(order == LATE[1]):
                compute_loss(ddp, batches[0])
    with phase("finish"):
        ddp.finish_grad_sync()
    results["alive"] += list_alive(model)


def cross_no_sync(ddp: nn.Module, batch: dict, is_reduced: bool) -> None:
    """Run a forward inside no_sync and its backward outside (`is_reduced`), or the other way round."""
    contexts = (ddp.no_sync, contextlib.nullcontext)
    around_forward, around_backward = contexts if is_reduced else contexts[::-1]
    with around_forward(), phase("forward"):
        loss = compute_loss(ddp, move_to_device(batch))
    with around_backward(), phase("backward"):
        loss.backward()
