"""Module 5 in another style: the plan finds buckets first and places them afterwards, gradients are attached when
forward begins and moved by one method per case, division comes before the sum, and main_grad is fed from zero."""

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin


class BufferLayout(SimpleNamespace):
    def __setattr__(self, name, value):
        raise AttributeError("a layout does not change")


def plan_layout(numels, bucket_numel, dp_size, pad_for_busbw=False):
    step = math.lcm(dp_size, 128) if not pad_for_busbw else math.lcm(dp_size, 128, 1 << 16)
    ranges, owner, buckets = [], [], []
    start, i = 0, 0
    while i < len(numels):
        cursor = start
        while i < len(numels):
            cursor = math.ceil(cursor / 64) * 64
            ranges.append((cursor, cursor + numels[i]))
            owner.append(len(buckets))
            cursor += numels[i]
            i += 1
            if bucket_numel is not None and cursor - start >= bucket_numel:
                break
        cursor = math.ceil(cursor / step) * step
        buckets.append((start, cursor))
        start = cursor
    return BufferLayout(param_ranges=tuple(ranges), bucket_of=tuple(owner), bucket_ranges=tuple(buckets), numel=start)


class GradBuffer:
    def __init__(self, params, bucket_numel, dp_size, grad_dtype=None, pad_for_busbw=False, with_params=False):
        self.params = tuple(params)
        own = self.params[0].dtype
        wide = own if grad_dtype is None else torch.promote_types(own, grad_dtype)
        self.wide = wide != own
        self.layout = plan_layout([p.numel() for p in self.params], bucket_numel, dp_size, pad_for_busbw)
        self.grad_data = self.params[0].new_zeros(self.layout.numel, dtype=wide)
        self.param_data = self.params[0].detach().new_zeros(self.layout.numel) if with_params else None
        self.view = {}
        self.fresh = dict.fromkeys(self.params, True)
        self._attach()

    def _attach(self):
        for p, (a, b) in zip(self.params, self.layout.param_ranges, strict=True):
            self.view[p] = self.grad_data.narrow(0, a, b - a).view_as(p)
            if self.wide:
                p.main_grad = self.view[p]
            elif p.grad is not None:
                p.grad = self.view[p].copy_(p.grad)
            if self.param_data is not None:
                place = self.param_data.narrow(0, a, b - a).view_as(p)
                place.copy_(p.detach())
                p.data = place

    def reallocate(self):
        self.grad_data = self.grad_data.clone()
        self.param_data = None if self.param_data is None else self.param_data.clone()
        self._attach()


class BufferedDDP(GradSyncMixin, nn.Module):
    def __init__(self, module, bucket_numel=40_000_000, grad_dtype=None, process_group=None):
        super().__init__()
        self.module, self.process_group = module, process_group
        self.size = dist.get_world_size(process_group)
        broadcast_module_state(module, process_group)
        families = {}
        for p in list(module.parameters())[::-1]:
            if p.requires_grad:
                families.setdefault(p.dtype, []).append(p)
        self.grad_buffers = [GradBuffer(f, bucket_numel, self.size, grad_dtype) for f in families.values()]
        self._plan = [
            (buffer, bounds, {p for p, owner in zip(buffer.params, buffer.layout.bucket_of, strict=True) if owner == i})
            for buffer in self.grad_buffers
            for i, bounds in enumerate(buffer.layout.bucket_ranges)
        ]
        self._handles, self._ready = [], set()
        for buffer in self.grad_buffers:
            for p in buffer.params:
                p.register_post_accumulate_grad_hook(lambda p, buffer=buffer: self._arrived(buffer, p))

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            for buffer in self.grad_buffers:
                if not buffer.wide:
                    for p in buffer.params:
                        if p.grad is None:
                            p.grad = buffer.view[p].zero_()
        return self.module(*args, **kwargs)

    def _arrived(self, buffer, p):
        if any(p in members for _, _, members in self._plan[: len(self._handles)]):
            raise RuntimeError("finish the first backward before the second")
        self._absorb(buffer, p)
        if not self.require_grad_sync:
            return
        self._ready.add(p)
        while len(self._handles) < len(self._plan) and self._plan[len(self._handles)][2] <= self._ready:
            self._launch()

    def _absorb(self, buffer, p):
        view = buffer.view[p]
        if not buffer.wide:
            if p.grad is None:
                p.grad = view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                p.grad = view.copy_(p.grad)
            return
        if buffer.fresh[p]:
            view.zero_()
            buffer.fresh[p] = False
        if p.grad is not None:
            view += p.grad
            p.grad = None

    def _launch(self):
        buffer, (start, end), _ = self._plan[len(self._handles)]
        buffer.grad_data[start:end] /= self.size  # Python assigns the slice to its own place: nothing moves
        data = buffer.grad_data[start:end]
        self._handles.append(dist.all_reduce(data, group=self.process_group, async_op=True))

    def finish_grad_sync(self):
        for buffer, _, members in self._plan[len(self._handles) :]:
            for p in members - self._ready:
                self._absorb(buffer, p)
            self._launch()
        for handle in reversed(self._handles):
            handle.wait()
        self._handles, self._ready = [], set()
        for buffer in self.grad_buffers:
            buffer.fresh = dict.fromkeys(buffer.params, True)
            if buffer.wide:
                for p in buffer.params:
                    p.grad = p.main_grad.to(p.dtype)
