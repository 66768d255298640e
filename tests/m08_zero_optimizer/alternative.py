"""Module 8 in another style."""

import torch
import torch.distributed as dist

# ShardedOptimizer
#
# Owners come from a pure function over all sizes so far: each parameter in its turn to the rank that has least. The
# inner optimizer is made by the first step. Division comes before the sum; collectives are synchronous, one by one, and
# what was reduced is remembered by gradient. Options are copied back and forth by name.


def owners(sizes, ranks):
    """The owner of each parameter, from their bytes; those of the first n do not depend on what follows."""
    held, result = [0] * ranks, []
    for nbytes in sizes:
        poorest = min(range(ranks), key=held.__getitem__)
        held[poorest] += nbytes
        result.append(poorest)
    return result


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, process_group=None, **defaults):
        self.make = lambda groups: optimizer_cls(groups, **defaults)
        self.group = process_group
        self.optim = None
        self.averages, self.watched = {}, {}  # parameter -> the gradient that holds the average, or would on its owner
        super().__init__(params, self.make([torch.nn.Parameter(torch.zeros(1))]).defaults)

    def trainable(self):
        """(parameter, its owner in the group) for all that train, in the order in which they were added."""
        everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return list(zip(everything, owners([p.nbytes for p in everything], dist.get_world_size(self.group))))

    def mine(self):
        me = dist.get_rank(self.group)
        return {p for p, owner in self.trainable() if owner == me}

    def refresh(self):
        """The inner optimizer has all groups, with my parameters and today's options."""
        mine = self.mine()
        wanted = [dict(group, params=[p for p in group["params"] if p in mine]) for group in self.param_groups]
        if self.optim is None:
            self.optim = self.make(wanted)
        for late in wanted[len(self.optim.param_groups) :]:
            self.optim.add_param_group(late)
        for inner, outer in zip(self.optim.param_groups, self.param_groups):
            for name in outer.keys() - {"params"}:
                inner[name] = outer[name]

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

    def refuse(self, p):
        if self.averages.get(p) is p.grad:
            raise RuntimeError("this gradient is an average")

    def everyone(self):
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    def clip_grad_norm_(self, max_norm):
        self.average()
        mine = self.mine()
        first = self.trainable()[0][0]
        total = sum(((p.grad.double() ** 2).sum() for p in mine), first.new_zeros((), dtype=torch.float64))
        parts = [torch.zeros_like(total) for _ in self.everyone()]
        dist.all_gather(parts, total, group=self.group)
        norm = float(sum(parts)) ** 0.5
        if not norm <= max_norm:
            for p in mine:
                p.grad.mul_(max_norm / norm)
        return norm

    def step(self, closure=None):
        loss = closure() if closure else None
        with torch.no_grad():
            self.average()
            self.averages.clear()
            self.refresh()
            self.optim.step()
            for p, owner in reversed(self.trainable()):
                dist.broadcast(p.data, src=self.everyone()[owner], group=self.group)
        return loss

    def zero_grad(self, set_to_none=True):
        self.averages.clear()
        super().zero_grad(set_to_none)


# ZeroOptimizer
#
# One flat tensor for all that a rank's shard of a bucket has of a parameter group, a copy in any dtype; and a list of
# optimizers that are known to be elementwise. Checkpoints gather whole shards.

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)


class Run:
    """What a shard has of a group: pieces (parameter, from, to, place in the buffer), and their flat copy."""

    def __init__(self, buffer, bucket, first, last, pieces):
        self.buffer, self.bucket, self.first, self.last, self.pieces = buffer, bucket, first, last, pieces
        values = self.collect(buffer.param_data)
        self.flat = torch.nn.Parameter(values.float() if values.itemsize == 2 else values)

    def collect(self, data):
        return torch.cat([data[place : place + end - start] for _, start, end, place in self.pieces])

    def spread(self, values, data, shift=0):
        begin = 0
        for _, start, end, place in self.pieces:
            data[place - shift : place - shift + end - start] = values[begin : begin + end - start]
            begin += end - start

    def collect_from(self, wholes):
        return torch.cat([wholes[p].reshape(-1)[start:end] for p, start, end, _ in self.pieces])


class ZeroOptimizer(torch.optim.Optimizer):
    def __init__(self, ddp, optimizer_cls, param_groups=None, **defaults):
        if optimizer_cls not in ELEMENTWISE:
            names = ", ".join(known.__name__ for known in ELEMENTWISE)
            raise TypeError(f"{optimizer_cls.__name__} is not among the optimizers that can be cut: {names}")
        self.ddp, self.group = ddp, ddp.process_group
        self.me, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        ddp.gather_grads = False
        self.runs = []  # of each parameter group
        self.optim = None
        one = torch.nn.Parameter(torch.zeros(1))
        groups = list(ddp.module.parameters()) if param_groups is None else param_groups
        super().__init__(groups, optimizer_cls([one], **defaults).defaults)
        self.optim = optimizer_cls([self._inner(i) for i in range(len(self.param_groups))], **defaults)

    def _options(self, i):
        return {key: value for key, value in self.param_groups[i].items() if not key.startswith("param")}

    def _inner(self, i):
        return self._options(i) | {"params": [run.flat for run in self.runs[i]]}

    def add_param_group(self, group):
        super().add_param_group(group)
        wanted = {p for p in self.param_groups[-1]["params"] if p.requires_grad}
        held = {p for buffer in self.ddp.grad_buffers for p in buffer.params}
        if wanted - held:
            del self.param_groups[-1]
            raise ValueError("these parameters are not in the buffers of the wrapped model")
        runs = []
        for buffer in self.ddp.grad_buffers:
            for bucket, (begin, end) in enumerate(buffer.layout.bucket_ranges):
                shard = (end - begin) // self.ranks
                first, last = begin + self.me * shard, begin + (self.me + 1) * shard
                pieces = []
                for p, (a, b) in zip(buffer.params, buffer.layout.param_ranges):
                    low, high = max(a, first), min(b, last)
                    if p in wanted and low < high:
                        pieces.append((p, low - a, high - a, low))
                if pieces:
                    runs.append(Run(buffer, bucket, first, last, pieces))
        self.runs.append(runs)
        if self.optim is not None:
            self.optim.add_param_group(self._inner(len(self.runs) - 1))

    def _all_runs(self):
        return [run for runs in self.runs for run in runs]

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.ddp.queue.num_pending != self.ddp.queue.num_grads:
            raise RuntimeError("call finish_grad_sync first")
        with torch.no_grad():
            for i, inner in enumerate(self.optim.param_groups):
                for key, value in self._options(i).items():
                    inner[key] = value
            for run in self._all_runs():
                run.flat.grad = run.collect(run.buffer.grad_data).to(run.flat.dtype)
                if run.buffer.param_data.itemsize > 2:
                    run.flat.copy_(run.collect(run.buffer.param_data))
            self.optim.step()
            for run in self._all_runs():
                run.spread(run.flat.detach(), run.buffer.param_data)
                run.flat.grad = None
        self.ddp.start_param_sync()
        self.ddp.finish_param_sync()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        device = self.ddp.grad_buffers[0].grad_data.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for run in self._all_runs():
            total += run.collect(run.buffer.grad_data).double().pow(2).sum()
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt().item()
        if not norm <= max_norm:
            for run in self._all_runs():
                run.spread(run.collect(run.buffer.grad_data) * (max_norm / norm), run.buffer.grad_data)
        return norm

    @torch.no_grad()
    def _whole(self, i, dtype, part):
        """For each parameter of group i the tensor whose parts are part(run)."""
        found = {}
        for buffer in self.ddp.grad_buffers:
            for bucket, (begin, end) in enumerate(buffer.layout.bucket_ranges):
                own = torch.zeros((end - begin) // self.ranks, dtype=dtype, device=buffer.grad_data.device)
                for run in self.runs[i]:
                    if run.buffer is buffer and run.bucket == bucket:
                        run.spread(part(run), own, shift=run.first)
                shards = [torch.empty_like(own) for _ in range(self.ranks)]
                dist.all_gather(shards, own, group=self.group)
                data = torch.cat(shards)
                for p, (a, b), place in zip(buffer.params, buffer.layout.param_ranges, buffer.layout.bucket_of):
                    if place == bucket:
                        found[p] = data[a - begin : b - begin].view(p.shape)
        return {p: found[p] for p in self.param_groups[i]["params"] if p in found}

    def state_dict(self):
        result = {"state": {}, "param_groups": [], "masters": {}}
        number = 0
        for i, group in enumerate(self.param_groups):
            mine = {}
            for run in self.runs[i]:
                for key, value in self.optim.state[run.flat].items():
                    mine[key] = value.dtype if isinstance(value, torch.Tensor) and value.dim() else value
            known = [None] * self.ranks
            dist.all_gather_object(known, mine, group=self.group)
            entries = {key: value for each in known for key, value in each.items()}
            wholes = {
                key: self._whole(i, value, lambda run, key=key: self.optim.state[run.flat][key])
                for key, value in entries.items()
                if isinstance(value, torch.dtype)
            }
            narrow = any(p.itemsize == 2 for p in group["params"])
            masters = self._whole(i, torch.float32, lambda run: run.flat.detach()) if narrow else {}
            for place, p in enumerate(group["params"], number):
                if entries and p.requires_grad:
                    result["state"][place] = {k: wholes[k][p] if k in wholes else v for k, v in entries.items()}
                if p in masters and p.itemsize == 2:
                    result["masters"][place] = masters[p]
            numbers = list(range(number, number + len(group["params"])))
            result["param_groups"].append(self._options(i) | {"params": numbers})
            number = numbers[-1] + 1 if numbers else number
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        everyone = [p for group in self.param_groups for p in group["params"]]
        masters = {everyone[place]: value for place, value in state_dict.get("masters", {}).items()}
        state = {everyone[place]: entries for place, entries in state_dict["state"].items()}
        for i, saved in enumerate(state_dict["param_groups"]):
            self.param_groups[i].update({k: v for k, v in saved.items() if not k.startswith("param")})
            for run in self.runs[i]:
                params = [p for p, *_ in run.pieces]
                if all(p in masters for p in params):
                    run.flat.copy_(run.collect_from(masters))
                elif run.buffer.param_data.itemsize == 2:
                    run.flat.copy_(run.collect(run.buffer.param_data))
                self.optim.state.pop(run.flat, None)
                if all(p in state for p in params):
                    self.optim.state[run.flat] = {
                        key: run.collect_from({p: state[p][key] for p in params})
                        if isinstance(value, torch.Tensor) and value.numel() == params[0].numel() > 1
                        else value.clone()
                        if isinstance(value, torch.Tensor)
                        else value
                        for key, value in state[params[0]].items()
                    }
