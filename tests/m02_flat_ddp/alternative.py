"""Module 2 in another style: flat tensors that are kept from step to step, pieces that are views of them, division
before the sum, and the broadcast done here as well, without the earlier module."""

import torch
import torch.distributed as dist
from torch import nn


class FlatDDP(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        for tensor in [*module.buffers(), *module.parameters()]:
            whole = tensor.data.contiguous()
            dist.broadcast(whole, group=process_group, group_src=0)
            tensor.data.copy_(whole)
        self.flats, self.pieces = [], {}
        trainable = [p for p in module.parameters() if p.requires_grad]
        for dtype in sorted({p.dtype for p in trainable}, key=str):
            members = [p for p in reversed(trainable) if p.dtype == dtype]
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
            self.flats.append(flat)
            start = 0
            for p in members:
                self.pieces[p] = flat[start : start + p.numel()].view(p.shape)
                start += p.numel()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_grad_sync(self):
        size = dist.get_world_size(self.process_group)
        for p, piece in self.pieces.items():
            piece.zero_() if p.grad is None else torch.div(p.grad, size, out=piece)
        handles = [dist.all_reduce(flat, group=self.process_group, async_op=True) for flat in self.flats]
        for handle in handles:
            handle.wait()
        for p, piece in self.pieces.items():
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(piece)
