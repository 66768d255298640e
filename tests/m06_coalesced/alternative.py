"""Module 6 in another style: `coalesce` is a class that looks at the calls before it hands them on, groups travel as
lists of concatenated shards through the list forms of the collectives, division comes before the sum, and the wrapper
keeps its own views of whatever buffer it is given."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ..m05_grad_buffer.grad_buffer import GradBuffer


class coalesce:
    def __init__(self, process_group=None):
        self.group = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
        self.inner = None

    def __enter__(self):
        if self.group in c10d._world.pg_coalesce_state:
            raise ValueError("one block at a time, please")
        c10d._world.pg_coalesce_state[self.group] = []
        return self

    def __exit__(self, kind, *_):
        calls = c10d._world.pg_coalesce_state.pop(self.group)
        if kind is not None or not calls:
            return False
        if len({(call.op, str(call.redop), call.tensor.dtype) for call in calls}) > 1:
            raise ValueError("one kind of collective, one reduce op and one dtype in a block, please")
        with c10d._coalescing_manager(self.group, async_ops=True) as self.inner:
            c10d._world.pg_coalesce_state[self.group].extend(calls)
        return False

    def wait(self):
        if self.inner is not None:
            self.inner.wait()


class BucketGroup:
    def __init__(self, buffer, bucket_indices, process_group=None):
        self.buffer, self.group = buffer, process_group
        self.ranges = [buffer.layout.bucket_ranges[i] for i in bucket_indices]
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.pending = {}

    def shards(self, flat, rank):
        return [flat.narrow(0, a + rank * ((b - a) // self.size), (b - a) // self.size) for a, b in self.ranges]

    def start_grad_sync(self):
        data = self.buffer.grad_data
        parts = [torch.cat(self.shards(data, rank)).div_(self.size) for rank in range(self.size)]
        mine = torch.empty_like(parts[0])
        self.pending["grad"] = dist.reduce_scatter(mine, parts, group=self.group, async_op=True), mine

    def finish_grad_sync(self):
        work, mine = self.pending.pop("grad")
        work.wait()
        self.spread(mine, self.buffer.grad_data, self.rank)

    def start_gather(self, data):
        mine = torch.cat(self.shards(data, self.rank))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(parts, mine, group=self.group, async_op=True)

        def finish():
            work.wait()
            for rank, part in enumerate(parts):
                self.spread(part, data, rank)

        return finish

    def spread(self, part, data, rank):
        places = self.shards(data, rank)
        for place, piece in zip(places, part.split([place.numel() for place in places])):
            place.copy_(piece)

    def start_param_sync(self):
        self.pending["param"] = self.start_gather(self.buffer.param_data.detach())

    def finish_param_sync(self):
        self.pending.pop("param")()


class CoalescedDDP(nn.Module):
    def __init__(self, module, bucket_numel=40_000_000, buckets_per_group=1, grad_dtype=None, process_group=None):
        super().__init__()
        self.module, self.process_group, self.gather_grads, self._quiet = module, process_group, True, 0
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)
        families = {}
        for p in list(module.parameters())[::-1]:
            if p.requires_grad:
                families.setdefault(p.dtype, []).append(p)
        size = dist.get_world_size(process_group)
        self.grad_buffers = [GradBuffer(f, bucket_numel, size, grad_dtype, with_params=True) for f in families.values()]
        self.groups, self._members, self._home = [], [], {}
        for buffer in self.grad_buffers:
            remaining = list(range(len(buffer.layout.bucket_ranges)))
            while remaining:
                count = len(remaining) if buckets_per_group is None else buckets_per_group
                taken, remaining = remaining[:count], remaining[count:]
                self.groups.append(BucketGroup(buffer, taken, process_group))
                self._members.append({p for p, b in zip(buffer.params, buffer.layout.bucket_of) if b in taken})
            for i, p in enumerate(buffer.params):
                self._home[p] = buffer, i
                p.register_post_accumulate_grad_hook(self._arrived)
        self._fresh, self._ready, self._started = set(self._home), set(), 0

    def _view(self, p):
        buffer, i = self._home[p]
        start, end = buffer.layout.param_ranges[i]
        return buffer.grad_data[start:end].view_as(p)

    def _is_wide(self, p):
        return self._home[p][0].grad_data.dtype != p.dtype

    def _absorb(self, p):
        view = self._view(p)
        if self._is_wide(p):
            if p in self._fresh:
                view.zero_()
            if p.grad is not None:
                view.add_(p.grad)
            p.grad, p.main_grad = None, view
        elif p.grad is None or p.grad.data_ptr() != view.data_ptr():
            p.grad = view.zero_() if p.grad is None else view.copy_(p.grad)
        self._fresh.discard(p)

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            for p in self._home:
                if p.grad is None and not self._is_wide(p):
                    p.grad = self._view(p).zero_()
        return self.module(*args, **kwargs)

    def _arrived(self, p):
        if any(p in members for members in self._members[: self._started]):
            raise RuntimeError("finish the first backward before the second")
        self._absorb(p)
        if self._quiet:
            return
        self._ready.add(p)
        while self._started < len(self.groups) and self._members[self._started] <= self._ready:
            self.groups[self._started].start_grad_sync()
            self._started += 1

    def finish_grad_sync(self):
        for number in range(self._started, len(self.groups)):
            for p in self._members[number] - self._ready:
                self._absorb(p)
            self.groups[number].start_grad_sync()
        for group in self.groups:
            group.finish_grad_sync()
        if self.gather_grads:
            for finish in [group.start_gather(group.buffer.grad_data) for group in self.groups]:
                finish()
            for p in filter(self._is_wide, self._home):
                p.grad = self._view(p).to(p.dtype)
        self._fresh, self._ready, self._started = set(self._home), set(), 0

    def start_param_sync(self):
        for group in self.groups:
            group.start_param_sync()

    def finish_param_sync(self):
        for group in reversed(self.groups):
            group.finish_param_sync()

    @contextlib.contextmanager
    def no_sync(self):
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
