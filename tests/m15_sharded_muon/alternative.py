"""Module 15 in another style: dealt there and back, cut in pieces, buffers that live on, divided before the sum."""

from collections import defaultdict
from itertools import accumulate

import torch
import torch.distributed as dist


def orthogonalize(matrix, steps=5):
    if matrix.size(0) > matrix.size(1):
        return orthogonalize(matrix.mT, steps).mT
    x = matrix.div(torch.linalg.vector_norm(matrix).add(1e-7))
    for _ in range(steps):
        gram = torch.mm(x, x.mT)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


def work(shape):
    low, high = min(shape), max(shape)
    return low * low * high * 2 + low**3


def assign_matrices(shapes, num_ranks):
    ordered = sorted(enumerate(shapes), key=lambda pair: (-work(pair[1]), pair[0]))
    turns = [*range(num_ranks), *reversed(range(num_ranks))]  # there and back
    owner_of = {index: turns[place % len(turns)] for place, (index, _) in enumerate(ordered)}
    return [owner_of[index] for index in range(len(shapes))]


def plan_groups(shapes, owners, num_ranks, num_groups):
    groups = defaultdict(lambda: [[] for _ in range(num_ranks)])
    for rank in range(num_ranks):
        own = sorted((index for index, owner in enumerate(owners) if owner == rank), key=lambda i: -work(shapes[i]))
        total, before = sum(shapes[index][0] * shapes[index][1] for index in own), 0
        for index in own:
            numel = shapes[index][0] * shapes[index][1]
            groups[int((before + numel / 2) / total * num_groups)][rank].append(index)
            before += numel
    return [groups[key] for key in sorted(groups)]


class ShardedMuon(torch.optim.Optimizer):
    def __init__(self, params, process_group=None, lr=0.02, momentum=0.95, weight_decay=0.0, steps=5, num_groups=4):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if any(p.ndim != 2 or p.dtype != params[0].dtype for p in params):
            raise ValueError("ShardedMuon needs matrices of one dtype")
        self.pg, self.me, size = process_group, dist.get_rank(process_group), dist.get_world_size(process_group)
        shapes = [p.shape for p in params]
        owners = assign_matrices(shapes, size)
        self.size, self.mine = size, {p for p, owner in zip(params, owners, strict=True) if owner == self.me}
        for p in self.mine:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.parts = []  # of each group: (parameter, rank, place in its row) of its matrices, all rows, this rank's row
        for rows in plan_groups(shapes, owners, size, num_groups):
            places = []
            for rank, row in enumerate(rows):
                for index, end in zip(row, accumulate(params[index].numel() for index in row), strict=True):
                    places.append((params[index], rank, slice(end - params[index].numel(), end)))
            whole = params[0].detach().new_zeros(size, max(place.stop for _, _, place in places))
            self.parts.append((places, whole, torch.zeros_like(whole[0])))

    @torch.no_grad()
    def step(self, closure=None):
        loss, pending = None, []
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for places, whole, own in self.parts:
            for p, rank, place in places:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                whole[rank, place] = grad.reshape(-1) / self.size
            pending.append(dist.reduce_scatter_tensor(own, whole.view(-1), group=self.pg, async_op=True))
        options = {p: group for group in self.param_groups for p in group["params"]}
        for number, (places, whole, own) in enumerate(self.parts):
            pending[number].wait()
            for p, _, place in (entry for entry in places if entry[1] == self.me):
                own[place] = self.compute(p, own[place].view(p.shape), options[p]).reshape(-1)
            pending[number] = dist.all_gather_into_tensor(whole.view(-1), own, group=self.pg, async_op=True)
        for (places, whole, _), handle in zip(reversed(self.parts), reversed(pending), strict=True):
            handle.wait()
            for p, rank, place in places:
                p.copy_(whole[rank, place].view(p.shape))
        return loss

    def compute(self, p, grad, options):
        lr, mu = options["lr"], options["momentum"]
        m = self.state[p]["momentum_buffer"]
        m.copy_(mu * m + grad)
        update = orthogonalize(torch.add(grad, m, alpha=mu), options["steps"])
        return p - lr * options["weight_decay"] * p - lr * max(1, p.size(0) / p.size(1)) ** 0.5 * update

    def state_dict(self):
        packed = super().state_dict()
        everyone = [None] * self.size
        dist.all_gather_object(everyone, packed["state"], group=self.pg)
        merged = {i: entry for entries in everyone for i, entry in entries.items()}
        packed["state"] = {i: {key: t.cpu() for key, t in merged[i].items()} for i in sorted(merged)}
        return packed

    def load_state_dict(self, state_dict):
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        own = {numbers[p]: state_dict["state"][numbers[p]] for p in self.mine}
        super().load_state_dict({**state_dict, "state": own})
