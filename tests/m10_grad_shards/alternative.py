"""Module 10 in another style: no queue and no classes of earlier modules but the layout. Hooks copy into buckets that
are counted down; launches wait in a deque; the sum is divided after the reduce-scatter."""

import collections

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin
from ..m05_grad_buffer.grad_buffer import plan_layout
from ..m08_zero_optimizer.zero_optimizer import ZeroOptimizer

scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Family:
    """All parameters of one dtype."""

    def __init__(self, params, bucket_numel, grad_dtype, rank, size):
        self.params, self.rank, self.size = params, rank, size
        self.layout = plan_layout([p.numel() for p in params], bucket_numel, size)
        dtype = params[0].dtype
        self.dtype = grad_dtype if grad_dtype is not None and grad_dtype.itemsize > dtype.itemsize else dtype
        self.param_data = torch.zeros(self.layout.numel, dtype=dtype, device=params[0].device)
        for p, (a, b) in zip(params, self.layout.param_ranges, strict=True):
            self.param_data[a:b] = p.detach().reshape(-1)
            p.data = self.param_data[a:b].view_as(p)
        self.grad_data = torch.zeros(self.layout.numel // size, dtype=self.dtype, device=params[0].device)

    def own(self, bucket):
        a, b = self.layout.bucket_ranges[bucket]
        return slice(a // self.size, b // self.size)


class GradShardedDDP(GradSyncMixin, nn.Module):
    def __init__(self, module, bucket_numel=40_000_000, max_live_buckets=2, grad_dtype=None, process_group=None):
        super().__init__()
        if not max_live_buckets >= 1:
            raise ValueError("max_live_buckets must be positive")
        self.module, self.process_group, self.limit = module, process_group, max_live_buckets
        self.size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        broadcast_module_state(module, process_group)
        by_dtype = collections.defaultdict(list)
        for p in list(module.parameters())[::-1]:
            if p.requires_grad:
                by_dtype[p.dtype].append(p)
        self.grad_buffers = [Family(params, bucket_numel, grad_dtype, rank, self.size) for params in by_dtype.values()]
        self.buckets = [(f, b) for f in self.grad_buffers for b in range(len(f.layout.bucket_ranges))]
        self.memory, self.live, self.gather_grads = {}, collections.deque(), False
        self.start()
        for f in self.grad_buffers:
            for i, p in enumerate(f.params):
                p.register_post_accumulate_grad_hook(lambda p, f=f, i=i: self.receive(f, i, p))

    def start(self):
        self.missing = {(f, b): f.layout.bucket_of.count(b) for f, b in self.buckets}
        self.waiting = collections.deque(self.buckets)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def room(self, f, b):
        if (f, b) not in self.memory:
            start, end = f.layout.bucket_ranges[b]
            self.memory[f, b] = torch.zeros(end - start, dtype=f.dtype, device=f.param_data.device)
        return self.memory[f, b]

    def receive(self, f, i, p):
        b = f.layout.bucket_of[i]
        if (f, b) not in self.waiting:
            raise RuntimeError("the gradients of this step are already sent")
        offset = f.layout.param_ranges[i][0] - f.layout.bucket_ranges[b][0]
        self.room(f, b)[offset : offset + p.numel()] += p.grad.reshape(-1)
        p.grad = None
        if self.require_grad_sync:
            self.missing[f, b] -= 1
            while self.waiting and self.missing[self.waiting[0]] == 0:
                self.send(*self.waiting.popleft())

    def send(self, f, b):
        if len(self.live) == self.limit:
            self.collect()
        whole = self.room(f, b)
        part = torch.empty(len(whole) // self.size, dtype=f.dtype, device=whole.device)
        self.live.append((f, b, part, scatter(part, whole, group=self.process_group, async_op=True)))

    def collect(self):
        f, b, part, work = self.live.popleft()
        work.wait()
        f.grad_data[f.own(b)] += part / self.size
        del self.memory[f, b]

    def finish_grad_sync(self):
        while self.waiting:
            self.send(*self.waiting.popleft())
        while self.live:
            self.collect()
        self.start()

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self.memory.clear()
        for f in self.grad_buffers:
            f.grad_data.fill_(0)

    def start_param_sync(self):
        self.gathers = []
        for f, b in self.buckets:
            a, e = f.layout.bucket_ranges[b]
            whole = f.param_data[a:e]
            own = whole.view(self.size, -1)[f.rank]
            self.gathers.append(gather(whole, own, group=self.process_group, async_op=True))

    def finish_param_sync(self):
        for work in self.gathers:
            work.wait()


class Zero2Optimizer(ZeroOptimizer):
    def prepare_grads(self):
        if self.ddp.memory:
            raise RuntimeError("gradients are not averages before finish_grad_sync")
        grads = []
        for part in self.param_shards.values():
            family, i = self.positions[part.param]
            a, b = family.layout.bucket_ranges[family.layout.bucket_of[i]]
            length = (b - a) // family.size
            shift = a + family.rank * length - a // family.size  # from a place in the shard to one in the buffer
            place = slice(part.buffer_slice.start - shift, part.buffer_slice.stop - shift)
            grad = family.grad_data[place] if part.shard.numel() else family.grad_data[:0]
            part.shard.grad = grad.to(part.shard.dtype)
            if not part.is_master:
                part.shard.data = family.param_data[part.buffer_slice]
            grads.append(grad)
        return grads

    def zero_grad(self, set_to_none=True):
        self.ddp.zero_grad()
