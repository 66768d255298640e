"""TODO: the same in another style, such as other names, another order and other functions of torch."""

import torch.distributed as dist

from ..m01_naive_ddp.naive_ddp import NaiveDDP


class ScratchDDP(NaiveDDP):
    def finish_grad_sync(self):
        for trainable in [p for p in self.module.parameters() if p.requires_grad]:
            trainable.grad /= dist.get_world_size(self.process_group)
            dist.all_reduce(trainable.grad, group=self.process_group)
