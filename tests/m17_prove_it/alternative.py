"""Module 17 in another style: real layers, twins without a wrapper, and other numbers of ranks."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

from brigade.testing import step, watch

WORLD_SIZES_AVERAGE = (4, 1)
WORLD_SIZES_ORDER = (3,)
WORLD_SIZES_SHARDED = (2, 4)


class Branches(nn.Module):
    """Two branches; a batch takes one of them or both, in either order."""

    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, affine=False))
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.fixed = nn.Linear(width, width, bias=False).requires_grad_(False)

    def forward(self, x, path="lr"):
        h = torch.tanh(self.fixed(self.stem(x)))
        outputs = [{"l": self.left, "r": self.right}[letter](h) for letter in path]
        return torch.stack(outputs).square().mean()


def seeded(seed, function):
    torch.manual_seed(seed)
    return function()


def snapshot(module):
    return {name: value.clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}


def grads(module):
    return {name: p.grad.clone() if p.grad is not None else None for name, p in module.named_parameters()}


def same(got, wanted, tolerance=1e-4):
    return torch.allclose(torch.as_tensor(got).double(), wanted.double(), rtol=tolerance, atol=tolerance / 100)


def mean(gradients, like):
    return sum(like * 0 if g is None else g for g in gradients) / len(gradients)


def check_means(steps_of_ranks):
    """Each rank's step has "local" and "synced" gradients by name."""
    for number, entries in enumerate(zip(*steps_of_ranks, strict=True)):
        for name in entries[0]["synced"]:
            locals_ = [entry["local"][name] for entry in entries]
            present = [g for g in locals_ if g is not None]
            for rank, entry in enumerate(entries):
                got = entry["synced"][name]
                if present:
                    assert got is not None, f"step {number}, rank {rank}: {name} has no gradient"
                    assert same(got, mean(locals_, present[0])), f"step {number}, rank {rank}: {name} is no average"
                elif got is not None:
                    assert not got.any(), f"step {number}, rank {rank}: {name} comes from nowhere"


def drive_average(wrap):
    me, world = dist.get_rank(), dist.get_world_size()
    cut = (world + 1) // 2
    halves = [half for half in ([*range(cut)], [*range(cut, world)]) if half]
    groups = [dist.new_group(half) for half in halves]
    mine = next(i for i, half in enumerate(halves) if me in half)
    answers = {}
    for label, members, group in (("world", [*range(world)], None), ("half", halves[mine], groups[mine])):
        model = seeded(me + 1, Branches)
        model.stem[1].num_batches_tracked.fill_(me)
        mine_before = snapshot(model)
        wrapped = wrap(model, process_group=group)
        begin = snapshot(model)
        steps = []
        for number in range(2):
            x = seeded(100 * number + me, lambda: torch.randn(5, 4))
            wrapped(x, "l" if me == members[0] else "lr").backward()
            local = grads(model)
            wrapped.finish_grad_sync()
            steps.append({"local": local, "synced": grads(model)})
            for p in model.parameters():
                p.grad = None
        answers[label] = {"members": members, "own": mine_before, "begin": begin, "steps": steps}
    return answers


def judge_average(observed):
    for label in ("world", "half"):
        for rank in range(len(observed)):
            answer = observed[rank][label]
            first = observed[answer["members"][0]][label]["own"]
            for name, value in answer["begin"].items():
                assert torch.equal(value, first[name]), f"rank {rank} starts with its own {name}"
            check_means([observed[r][label]["steps"] for r in answer["members"]])
            assert all(s["synced"]["fixed.weight"] is None for s in answer["steps"]), "a frozen weight has a gradient"


def drive_awaited(wrap):
    model = watch(seeded(3, lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))))
    twin = deepcopy(model)
    wrapped, steps = wrap(model), []
    for number in range(2):
        x = seeded(10 * number + dist.get_rank(), lambda: torch.randn(2, 3))
        twin.zero_grad()
        twin(x).square().sum().backward()
        with step(number):
            wrapped(x).square().sum().backward()
            wrapped.finish_grad_sync()
        steps.append({"local": grads(twin), "synced": grads(model)})
        model.zero_grad()
    return steps


def judge_awaited(observed):
    check_means(list(observed))
    for each in observed.steps():
        sent = each.launches(count=8)
        sent.are_awaited()
        sent.are_asynchronous()
        sent.come_before_gradient(+2)
        for launch in sent:
            assert set(launch.wait_phases).isdisjoint({"backward"})


def drive_order(wrap):
    shapes = {"a": (4, 4), "b": (2, 4), "c": (8,), "d": (16,), "e": (40,), "f": (3,), "g": (5,)}
    me = dist.get_rank()

    class Terms(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in shapes.items():
                setattr(self, name, nn.Parameter(torch.ones(shape)))

        def forward(self, names, factor):
            total = torch.zeros(())
            for name in names:
                total = total + (getattr(self, name) * factor).sum()
            return total

    model = watch(Terms())
    wrapped = wrap(model, bucket_cap_mb=96 / 1024**2)  # 24 elements
    steps = []
    for number, paths in enumerate((["abcdefg"], ["abcdefg", "gfedcba", "dgacfbe"], ["acdeg", "bdf"], ["abcdefg"])):
        names, factor = paths[me % len(paths)], 1.0 + me + number
        with step(number):
            wrapped(names, factor).backward()
            wrapped.finish_grad_sync()
        local = {name: torch.full(shape, factor) if name in names else None for name, shape in shapes.items()}
        steps.append({"local": local, "synced": grads(model)})
        model.zero_grad()
    return steps


def judge_order(observed):
    check_means(list(observed))
    # Backwards: g and f have 8 elements, e is alone, d and c have 24, b and a have 24.
    for each in observed.steps():
        sent = each.launches("all_reduce", count=4)
        sent.carry(4 * (8 + 40 + 24 + 24))
        sent.are_asynchronous()
        sent.are_awaited()
        assert [launch.numel for launch in sent] == [8, 40, 24, 24]
        for launch in sent:
            assert "backward" not in launch.wait_phases
            assert launch.phase == "backward" or each.number == 2, f"rank {each.rank} launches after backward"
        if each.number in (0, 3):
            sent.come_before_gradient(+2)


class Interrupted(Exception):
    pass


def drive_accumulated(wrap):
    me = dist.get_rank()
    model = watch(seeded(0, lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))))
    twin = deepcopy(model)
    wrapped, steps, count = wrap(model), [], iter(range(100))

    def backward(number):
        x = seeded(1000 * number + 10 * next(count) + me, lambda: torch.randn(4, 3))
        twin(x).square().mean().backward()
        wrapped(x).square().mean().backward()

    def nothing(number):
        pass

    def nested(number):
        with wrapped.no_sync():
            with wrapped.no_sync():
                backward(number)
            backward(number)
        with wrapped.no_sync():
            backward(number)

    def broken(number):
        try:
            with wrapped.no_sync():
                backward(number)
                raise Interrupted
        except Interrupted:
            return
        raise AssertionError("the exception is lost")

    def quiet_only(number):
        with wrapped.no_sync():
            backward(number)
            backward(number)

    plan = [nothing, nested, broken, nothing, quiet_only, nested, nothing]
    for number, before in enumerate(plan):
        twin.zero_grad()
        with step(100 + number):
            before(number)
        with step(number):
            if before is not quiet_only:
                backward(number)
            wrapped.finish_grad_sync()
        steps.append({"local": grads(twin), "synced": grads(model)})
        wrapped.zero_grad(set_to_none=bool(number % 2))
    return steps


def judge_accumulated(observed):
    check_means(list(observed))
    for each in observed.steps():
        sent = each.launches()
        if each.number >= 100:
            assert len(sent) == 0, "communication inside no_sync"
        elif each.number == 4:
            assert len(sent) > 0
        else:
            assert len(sent) > 0 and all(launch.phase == "backward" for launch in sent)


def drive_sharded(wrap):
    me, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([rank]) for rank in range(world)]

    def make():
        return seeded(7, lambda: nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 20)))

    def batch(number, rank):
        return seeded(50 * number + rank, lambda: torch.randn(6, 30))

    def loss(model, x):
        return 10 * model(x).square().mean()

    model, twin = make(), make()
    zero = wrap(model, torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))
    plain = torch.optim.Adam(twin.parameters(), lr=0.01, betas=(0.8, 0.9))
    log = []
    for number, limit in enumerate((1e-2, 1e3, 1.0)):
        zero.zero_grad()
        plain.zero_grad()
        loss(zero.ddp, batch(number, me)).backward()
        sum(loss(twin, batch(number, rank)) / world for rank in range(world)).backward()
        zero.ddp.finish_grad_sync()
        norms = [float(zero.clip_grad_norm_(limit)), float(nn.utils.clip_grad_norm_(twin.parameters(), limit))]
        zero.step()
        plain.step()
        pairs = zip(snapshot(model).values(), snapshot(twin).values(), strict=True)
        log.append({"norms": norms, "weights": [list(pair) for pair in pairs]})
    saved, expected = zero.state_dict(), deepcopy(plain.state_dict())  # later steps change the latter
    held = sum(v.numel() for s in zero.optim.state.values() for v in s.values() if torch.is_tensor(v))

    resumed = deepcopy(twin)
    small = wrap(resumed, torch.optim.Adam, process_group=alone[me], lr=1.0)
    small.load_state_dict(saved)
    small.zero_grad(), plain.zero_grad()
    loss(small.ddp, batch(9, 0)).backward()
    loss(twin, batch(9, 0)).backward()
    small.ddp.finish_grad_sync()
    small.step(), plain.step()
    return {
        "log": log,
        "states": [saved["state"], expected["state"]],
        "held": held,
        "total": sum(p.numel() for p in model.parameters()),
        "resumed": [list(pair) for pair in zip(snapshot(resumed).values(), snapshot(twin).values(), strict=True)],
    }


def judge_sharded(observed):
    for rank, seen in enumerate(observed):
        for number, entry in enumerate(seen["log"]):
            got, wanted = entry["norms"]
            assert abs(got / wanted - 1) < 0.02, f"rank {rank}, step {number}: the norm is {got}, not {wanted}"
            for mine, theirs in entry["weights"]:
                assert same(mine, theirs, 1e-3), f"rank {rank}, step {number}: another weight"
        mine, theirs = seen["states"]
        assert mine.keys() == theirs.keys(), "the state dict has other parameters"
        for index, state in theirs.items():
            for key, value in state.items():
                assert key in mine[index] and same(mine[index][key], value, 1e-3), f"{key} of parameter {index}"
        limit = 2 * seen["total"] / len(observed)
        assert seen["held"] < 1.25 * limit + 64, f"rank {rank} has {seen['held']} numbers of state"
        for got, wanted in seen["resumed"]:
            assert same(got, wanted, 1e-3), f"rank {rank}: training goes on differently after loading"
