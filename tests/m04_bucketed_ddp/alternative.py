"""Module 4 in another style: one open bucket per dtype, flat tensors kept from step to step with gradients copied in
one by one as they become ready, AVG, and sets of parameters instead of counters. Gradients keep their local values
until finish_grad_sync, so a second backward starts the launches again."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn


def plan_buckets(params, bucket_cap_bytes):
    buckets, open_buckets = [], {}
    for p in list(params)[::-1]:
        size = p.numel() * p.element_size()
        bucket, nbytes = open_buckets.get(p.dtype, (None, 0))
        if bucket is None or nbytes + size > bucket_cap_bytes:
            bucket, nbytes = [], 0
            buckets.append(bucket)
        bucket.append(p)
        open_buckets[p.dtype] = bucket, nbytes + size
    return buckets


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, process_group=None):
        super().__init__()
        self.module, self.process_group = module, process_group
        for tensor in [*module.buffers(), *module.parameters()]:
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)
        trainable = [p for p in module.parameters() if p.requires_grad]
        self._buckets = plan_buckets(trainable, bucket_cap_mb * 1024 * 1024)
        self._number = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._flat = [
            torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype, device=b[0].device) for b in self._buckets
        ]
        self._pieces = {}
        for bucket, flat in zip(self._buckets, self._flat, strict=True):
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                self._pieces[p] = piece.view(p.shape)
        self._quiet = False
        self._reset()
        for p in trainable:
            p.register_post_accumulate_grad_hook(self._ready)

    def _reset(self):
        self._waiting = [set(bucket) for bucket in self._buckets]
        self._handles = []

    def _ready(self, p):
        if self._number[p] < len(self._handles):
            for handle in self._handles:
                handle.wait()
            self._reset()
        if self._quiet:
            return
        self._pieces[p].copy_(p.grad)
        self._waiting[self._number[p]].discard(p)
        while len(self._handles) < len(self._buckets) and not self._waiting[len(self._handles)]:
            self._launch()

    def _launch(self):
        flat = self._flat[len(self._handles)]
        self._handles.append(dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.process_group, async_op=True))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self):
        for missing in self._waiting[len(self._handles) :]:
            for p in missing:
                if p.grad is None:
                    self._pieces[p].zero_()
                else:
                    self._pieces[p].copy_(p.grad)
            self._launch()
        for handle, bucket in zip(self._handles, self._buckets, strict=True):
            handle.wait()
            for p in bucket:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(self._pieces[p])
        self._reset()

    @contextlib.contextmanager
    def no_sync(self):
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before
