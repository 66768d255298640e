"""Module 7 in another style: nothing is inherited from module 6. All views are made when the wrapper is made, and
again, all at once, when the flat tensors are found to lie elsewhere; sums are divided before."""

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin
from ..m05_grad_buffer.grad_buffer import GradBuffer
from ..m06_coalesced.coalesced import coalesce

NEW_NAMES = hasattr(dist, "reduce_scatter_single")
scatter = dist.reduce_scatter_single if NEW_NAMES else dist.reduce_scatter_tensor
gather = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor


class ShardCache:
    """Of one buffer: for each bucket the pairs (whole, own shard) of both flat tensors, and each gradient's place."""

    def __init__(self, buffer, rank, size):
        self.buffer, self.rank, self.size = buffer, rank, size
        self.wide = buffer.grad_data.dtype != buffer.params[0].dtype
        self.address = None
        self.ready, self.started = set(), set()  # gradients of this step, and main_grads
        self.refresh()

    def refresh(self):
        address = self.buffer.grad_data.data_ptr(), self.buffer.param_data.data_ptr()
        if address != self.address:
            self.address = address
            self.grads, self.weights = (self.cut(data) for data in (self.buffer.grad_data, self.buffer.param_data))
            self.places = [
                self.buffer.grad_data.narrow(0, start, end - start).view_as(p)
                for p, (start, end) in zip(self.buffer.params, self.buffer.layout.param_ranges, strict=True)
            ]

    def cut(self, data):
        wholes = [data.narrow(0, start, end - start) for start, end in self.buffer.layout.bucket_ranges]
        return [(whole, whole.view(self.size, -1)[self.rank]) for whole in wholes]


class CachedDDP(GradSyncMixin, nn.Module):
    def __init__(self, module, bucket_numel=40_000_000, buckets_per_group=1, grad_dtype=None, process_group=None):
        super().__init__()
        self.module, self.process_group = module, process_group
        self.gather_grads = True
        self.size = dist.get_world_size(process_group)
        broadcast_module_state(module, process_group)
        families = {}
        for p in list(module.parameters())[::-1]:
            if p.requires_grad:
                families.setdefault(p.dtype, []).append(p)
        self.grad_buffers = [
            GradBuffer(family, bucket_numel, self.size, grad_dtype, with_params=True) for family in families.values()
        ]
        self.caches = [ShardCache(b, dist.get_rank(process_group), self.size) for b in self.grad_buffers]
        self.groups = []  # (cache, slice of buckets, numbers of parameters)
        for cache in self.caches:
            layout = cache.buffer.layout
            count = len(layout.bucket_ranges)
            for first in range(0, count, buckets_per_group or count):
                chosen = slice(first, first + (buckets_per_group or count))
                members = {i for i, b in enumerate(layout.bucket_of) if b in range(count)[chosen]}
                self.groups.append((cache, chosen, members))
        self.handles, self.param_handles = [], []
        for cache in self.caches:
            for i, p in enumerate(cache.buffer.params):
                p.register_post_accumulate_grad_hook(lambda p, cache=cache, i=i: self.arrived(cache, i, p))

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            for cache in self.caches:
                cache.refresh()
                for p, place in zip(cache.buffer.params, cache.places, strict=True):
                    if p.grad is None and not cache.wide:
                        p.grad = place.zero_()
        return self.module(*args, **kwargs)

    def absorb(self, cache, i, p):
        place = cache.places[i]
        if p.grad is not None and p.grad.data_ptr() == place.data_ptr():
            return
        if not cache.wide or i not in cache.started:
            place.zero_()
        cache.started.add(i)
        if p.grad is not None:
            place.add_(p.grad)
        p.grad = None if cache.wide else place

    def arrived(self, cache, i, p):
        if any(cache is other and i in members for other, _, members in self.groups[: len(self.handles)]):
            raise RuntimeError("finish the first backward before the second")
        self.absorb(cache, i, p)
        if not self.require_grad_sync:
            return
        cache.ready.add(i)
        for next_cache, chosen, members in self.groups[len(self.handles) :]:
            if not members <= next_cache.ready:
                break
            self.launch(next_cache, chosen)

    def launch(self, cache, chosen):
        for whole, _ in cache.grads[chosen]:
            whole.div_(self.size)
        with coalesce(self.process_group) as handle:
            for whole, own in cache.grads[chosen]:
                scatter(own, whole, group=self.process_group)
        self.handles.append(handle)

    def complete(self, pairs):
        with coalesce(self.process_group) as handle:
            for whole, own in pairs:
                gather(whole, own, group=self.process_group)
        return handle

    def finish_grad_sync(self):
        for cache in self.caches:
            for i, p in enumerate(cache.buffer.params):
                if i not in cache.ready:
                    self.absorb(cache, i, p)
        for cache, chosen, _ in self.groups[len(self.handles) :]:
            self.launch(cache, chosen)
        for handle in self.handles:
            handle.wait()
        if self.gather_grads:
            for cache, chosen, _ in self.groups:
                self.complete(cache.grads[chosen]).wait()
        self.handles = []
        for cache in self.caches:
            cache.ready.clear()
            cache.started.clear()
            if cache.wide and self.gather_grads:
                for p, place in zip(cache.buffer.params, cache.places, strict=True):
                    p.grad = place.to(p.dtype)

    def start_param_sync(self):
        for cache in self.caches:
            cache.refresh()
        self.param_handles = [self.complete(cache.weights[chosen]) for cache, chosen, _ in self.groups[::-1]]

    def finish_param_sync(self):
        while self.param_handles:
            self.param_handles.pop().wait()
