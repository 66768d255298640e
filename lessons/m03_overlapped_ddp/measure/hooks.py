"""Print what two micro-batches leave in .grad on two ranks, with each kind of hook. The correct value is 5."""

import torch
import torch.distributed as dist

from brigade.ranks.runner.ranks import run_ranks


def average(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 2


def accumulate(kind):
    weight = torch.nn.Parameter(torch.ones(1))
    first, second = [(1.0, 2.0), (3.0, 4.0)][dist.get_rank()]  # the gradients of this rank's micro-batches
    (first * weight).sum().backward()  # without a hook, as in no_sync

    def reduce_grad(parameter):
        parameter.grad = average(parameter.grad)

    def reduce_argument(parameter):
        parameter.copy_(average(parameter))

    if kind == "tensor hook":
        weight.register_hook(average)
    elif kind == "post-accumulate hook, its .grad":
        weight.register_post_accumulate_grad_hook(reduce_grad)
    else:
        weight.register_post_accumulate_grad_hook(reduce_argument)
    (second * weight).sum().backward()
    return weight.grad.item()


if __name__ == "__main__":
    for kind in ("tensor hook", "post-accumulate hook, its .grad", "post-accumulate hook, its argument"):
        print(f"{kind}: {run_ranks(accumulate, kind)}")
