"""Module 6 in another style: `coalesce` is a class that looks at the calls before it hands them on, groups travel as
lists of concatenated shards through the list forms of the collectives, division comes before the sum, and gradients
are gathered only in finish_grad_sync."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..m05_grad_buffer.grad_buffer import BufferedDDP, GradBuffer


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
        self.param_indices = [i for i, bucket in enumerate(buffer.layout.bucket_of) if bucket in bucket_indices]
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
        for place, piece in zip(places, part.split([place.numel() for place in places]), strict=True):
            place.copy_(piece)

    def start_param_sync(self):
        self.pending["param"] = self.start_gather(self.buffer.param_data.detach())

    def finish_param_sync(self):
        self.pending.pop("param")()


class CoalescedDDP(BufferedDDP):
    def __init__(self, module, bucket_numel=40_000_000, buckets_per_group=1, grad_dtype=None, process_group=None):
        self.count, self.gather_grads = buckets_per_group, True
        super().__init__(module, bucket_numel, grad_dtype, process_group)

    def make_buffer(self, params, bucket_numel, grad_dtype):
        return GradBuffer(params, bucket_numel, dist.get_world_size(self.process_group), grad_dtype, with_params=True)

    def make_units(self):
        self.groups = []
        for buffer in self.grad_buffers:
            remaining = list(range(len(buffer.layout.bucket_ranges)))
            while remaining:
                count = len(remaining) if self.count is None else self.count
                taken, remaining = remaining[:count], remaining[count:]
                self.groups.append(BucketGroup(buffer, taken, self.process_group))
        return self.groups

    def finish_grad_sync(self):
        self.queue.launch_remaining()
        for group in self.groups:
            group.finish_grad_sync()
        if self.gather_grads:
            for finish in [group.start_gather(group.buffer.grad_data) for group in self.groups]:
                finish()
        self.queue.reset()
        for buffer in self.grad_buffers:
            buffer.finish_accumulation(self.gather_grads)

    def start_param_sync(self):
        for group in self.groups:
            group.start_param_sync()

    def finish_param_sync(self):
        for group in reversed(self.groups):
            group.finish_param_sync()
