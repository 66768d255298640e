"""Module 8 in another style."""

import copy

import torch
import torch.distributed as dist


class Outer(torch.optim.Optimizer):
    """Average, copy the options by name, step on what this rank has, and share the new weights."""

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.average()
            self.refresh()
            self.optim.step()
            self.share()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        grads = self.average()
        squares = [(grad.double() ** 2).sum() for grad in grads]
        total = sum(squares, self.param_groups[0]["params"][0].new_zeros((), dtype=torch.float64))
        parts = [torch.zeros_like(total) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, total, group=self.group)
        norm = float(sum(parts)) ** 0.5
        if not norm <= max_norm:
            for grad in grads:
                grad.mul_(max_norm / norm)
        return norm

    def copy_options(self):
        for inner, outer in zip(self.optim.param_groups, self.param_groups, strict=True):
            for name in outer.keys() - {"params"}:
                inner[name] = outer[name]


# ShardedOptimizer
#
# Owners come from a pure function over all sizes so far: each parameter in its turn to the rank that has least. The
# inner optimizer is made by the first step. Division comes before the sum, collectives are synchronous, one by one, and
# what was reduced is remembered by gradient.


def owners(sizes, ranks):
    """The owner of each parameter, from their bytes; those of the first n do not depend on what follows."""
    held, result = [0] * ranks, []
    for nbytes in sizes:
        poorest = min(range(ranks), key=held.__getitem__)
        held[poorest] += nbytes
        result.append(poorest)
    return result


class ShardedOptimizer(Outer):
    def __init__(self, params, optimizer_cls, process_group=None, **defaults):
        self.make = lambda groups: optimizer_cls(groups, **defaults)
        self.group, self.optim = process_group, None
        self.averages, self.watched = {}, {}  # parameter -> the gradient that holds the average, or would on its owner
        super().__init__(params, self.make([torch.nn.Parameter(torch.zeros(1))]).defaults)

    def trainable(self):
        """(parameter, its owner in the group) for all that train, in the order in which they were added."""
        everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return list(
            zip(everything, owners([p.nbytes for p in everything], dist.get_world_size(self.group)), strict=True)
        )

    def mine(self):
        me = dist.get_rank(self.group)
        return {p for p, owner in self.trainable() if owner == me}

    def refresh(self):
        mine = self.mine()
        wanted = [dict(group, params=[p for p in group["params"] if p in mine]) for group in self.param_groups]
        if self.optim is None:
            self.optim = self.make(wanted)
        for late in wanted[len(self.optim.param_groups) :]:
            self.optim.add_param_group(late)
        self.copy_options()

    def average(self):
        for p, owner in self.trainable():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if self.averages.get(p) is not p.grad:
                p.grad.div_(dist.get_world_size(self.group))
                dist.reduce(p.grad, dst=self.everyone()[owner], group=self.group)
                self.averages[p] = p.grad
                if p not in self.watched:
                    self.watched[p] = p.register_post_accumulate_grad_hook(self.refuse)
        return [p.grad for p in self.mine()]

    def refuse(self, p):
        if self.averages.get(p) is p.grad:
            raise RuntimeError("this gradient is an average")

    def everyone(self):
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    def share(self):
        self.averages.clear()
        for p, owner in reversed(self.trainable()):
            dist.broadcast(p.data, src=self.everyone()[owner], group=self.group)

    def zero_grad(self, set_to_none=True):
        self.averages.clear()
        super().zero_grad(set_to_none)


# ZeroOptimizer
#
# One flat tensor for all that a rank's shard of a bucket has of a parameter group, a copy in any dtype; and a list of
# optimizers that are known to be elementwise. For a checkpoint, every rank sends its pieces as objects.

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)


class Run:
    """Neighbours in a shard: pieces (parameter, slice of it, slice of the buffer) without gaps, and one flat view."""

    def __init__(self, buffer, pieces):
        self.buffer, self.pieces = buffer, pieces
        weights = self.whole(buffer.param_data)
        self.is_master = weights.itemsize == 2
        self.flat = torch.nn.Parameter(weights.float() if self.is_master else weights)

    def whole(self, data):
        return data[self.pieces[0][2].start : self.pieces[-1][2].stop]

    def views(self, data):
        return [data[place] for _, _, place in self.pieces]

    def join(self, find):
        return torch.cat([find(p).reshape(-1)[part] for p, part, _ in self.pieces])

    def split(self, flat):
        return flat.detach().split([part.stop - part.start for _, part, _ in self.pieces])


class ZeroOptimizer(Outer):
    def __init__(self, ddp, optimizer_cls, param_groups=None, **defaults):
        if optimizer_cls not in ELEMENTWISE:
            names = ", ".join(known.__name__ for known in ELEMENTWISE)
            raise TypeError(f"{optimizer_cls.__name__} is not among the optimizers that can be cut: {names}")
        self.ddp, self.group, ddp.gather_grads = ddp, ddp.process_group, False
        self.runs, self.optim = [], None
        one = optimizer_cls([torch.nn.Parameter(torch.zeros(1))], **defaults)
        super().__init__(list(ddp.module.parameters()) if param_groups is None else param_groups, one.defaults)
        self.optim = optimizer_cls([inner for inner, _ in self.runs], **defaults)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        wanted = {p for p in group["params"] if p.requires_grad}
        if wanted - {p for buffer in self.ddp.grad_buffers for p in buffer.params}:
            del self.param_groups[-1]
            raise ValueError("these parameters are not in the buffers of the wrapped model")
        runs = []
        for buffer in self.ddp.grad_buffers:
            for begin, end in buffer.layout.bucket_ranges:
                length = (end - begin) // dist.get_world_size(self.group)
                first = begin + dist.get_rank(self.group) * length
                pieces = []
                for p, (a, b) in zip(buffer.params, buffer.layout.param_ranges, strict=True):
                    low, high = max(a, first), min(b, first + length)
                    if p in wanted and low < high:
                        if pieces and pieces[-1][2].stop != low:
                            runs.append(Run(buffer, pieces))
                            pieces = []
                        pieces.append((p, slice(low - a, high - a), slice(low, high)))
                if pieces:
                    runs.append(Run(buffer, pieces))
        self.runs.append((group | {"params": [run.flat for run in runs]}, runs))
        if self.optim is not None:
            self.optim.add_param_group(self.runs[-1][0])

    def all_runs(self):
        return [run for _, runs in self.runs for run in runs]

    def average(self):
        if self.ddp.queue.num_pending != self.ddp.queue.num_grads:
            raise RuntimeError("call finish_grad_sync first")
        return [view for run in self.all_runs() for view in run.views(run.buffer.grad_data)]

    def refresh(self):
        self.copy_options()
        for run in self.all_runs():
            run.flat.grad = run.whole(run.buffer.grad_data).to(run.flat.dtype)
            if not run.is_master:
                run.flat.data = run.whole(run.buffer.param_data)

    def share(self):
        for run in self.all_runs():
            run.flat.grad = None
            for view, values in zip(run.views(run.buffer.param_data), run.split(run.flat), strict=True):
                view.copy_(values)
        self.ddp.start_param_sync()
        self.ddp.finish_param_sync()

    def numbers(self):
        return {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def state_dict(self):
        numbers, mine = self.numbers(), []
        for run in self.all_runs():
            entries = dict(self.optim.state[run.flat], **{"master": run.flat} if run.is_master else {})
            for key, value in entries.items():
                is_cut = isinstance(value, torch.Tensor) and value.shape == run.flat.shape
                values = run.split(value) if is_cut else [value] * len(run.pieces)
                for (p, part, _), own in zip(run.pieces, values, strict=True):
                    mine.append((numbers[p], key, part if is_cut else None, own))
        everybody = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everybody, mine, group=self.group)
        result, shapes = super().state_dict() | {"state": {}, "masters": {}}, [p.shape for p in numbers]
        for number, key, part, own in sum(everybody, []):
            entries = result["masters"] if key == "master" else result["state"].setdefault(number, {})
            key = number if key == "master" else key
            if part is None:
                entries[key] = own
            else:
                whole = entries.setdefault(key, own.new_zeros(shapes[number]))
                whole.view(-1)[part] = own
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict | {"state": {}})
        numbers, state, masters = self.numbers(), state_dict["state"], state_dict.get("masters", {})
        for run in self.all_runs():
            if run.is_master:
                run.flat.copy_(run.join(lambda p: masters.get(numbers[p], p)))
            self.optim.state.pop(run.flat, None)
            if first := state.get(numbers[run.pieces[0][0]]):
                self.optim.state[run.flat] = {
                    key: copy.deepcopy(value) if key == "step" else run.join(lambda p, key=key: state[numbers[p]][key])
                    for key, value in first.items()
                }
