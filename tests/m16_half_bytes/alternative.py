"""Module 16 in another style: module 6's wrapper, closures, rows that keep this rank's own values exact."""

import torch
import torch.distributed as dist

from ..m06_coalesced.coalesced import BucketGroup, CoalescedDDP


class Promise:
    def __init__(self, works, deliver):
        self.works, self.deliver = works, deliver

    def wait(self):
        if self.deliver:
            for work in self.works:
                work.wait()
            self.deliver()
        self.works, self.deliver = [], None


def start_reduce_scatter(output, input, process_group=None, wire_dtype=torch.bfloat16):
    if wire_dtype.itemsize > input.itemsize:
        raise ValueError(f"{wire_dtype} is wider than {input.dtype}")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    wire = torch.empty(2, size, output.numel(), dtype=wire_dtype, device=input.device)
    wire[0].view(-1).copy_(input)
    mine = input.view(size, -1)[rank].clone()
    works = [dist.all_to_all_single(wire[1], wire[0], None, None, process_group, True)] if size > 1 else []

    def deliver():
        for other in range(size):
            if other != rank:
                mine.add_(wire[1, other])
        output.copy_(mine.div_(size))

    return Promise(works, deliver)


class Buckets(BucketGroup):
    def start_grad_sync(self):
        self.grad_handle = Promise([], lambda: None)
        for part, bucket in self.shards(self.buffer.grad_data):
            self.grad_handle.works.append(start_reduce_scatter(part, bucket, self.process_group))

    def start_all_gather(self, data):
        if data.data_ptr() != self.buffer.grad_data.data_ptr():
            return super().start_all_gather(data)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        wires = [bucket.to(torch.bfloat16) for _, bucket in self.shards(data)]
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        parts = [wire.chunk(size)[rank].clone() for wire in wires]
        works = [gather(wire, part, self.process_group, True) for wire, part in zip(wires, parts, strict=True)]

        def deliver():
            for (_, bucket), wire in zip(self.shards(data), wires, strict=True):
                bucket[:] = wire

        return Promise([*works], deliver)


class HalfBytesDDP(CoalescedDDP):
    group_class = Buckets

    def __init__(self, module, bucket_numel=40_000_000, buckets_per_group=1, process_group=None):
        if {p.dtype for p in module.parameters() if p.requires_grad} - {torch.float32}:
            raise ValueError("trainable parameters must be float32")
        super().__init__(module, bucket_numel, buckets_per_group, None, process_group)


class ErrorFeedback:
    def __init__(self, numel):
        self.error = torch.zeros(numel, dtype=torch.float32)

    def compress(self, values):
        exact = self.error.to(values.device).double() + values.double()
        result = exact.to(torch.float32).to(torch.bfloat16)
        self.error = exact.sub(result.double()).float()
        return result
