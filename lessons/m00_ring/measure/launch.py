"""Show what torchrun tells each rank: torchrun --standalone --nproc-per-node 2 lessons/m00_ring/measure/launch.py"""

import os
import sys

import torch
import torch.distributed as dist


def main():
    if "RANK" not in os.environ:
        sys.exit("start this script with torchrun --standalone --nproc-per-node 2 lessons/m00_ring/measure/launch.py")
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"  # where the ranks find each other
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{local_rank}" if has_gpus else "cpu")  # one GPU per rank
    if has_gpus:
        torch.cuda.set_device(device)  # otherwise calls that name no device would use GPU 0
    dist.init_process_group("nccl" if has_gpus else "gloo", device_id=device if has_gpus else None)
    number = torch.tensor([rank + 1], device=device)
    dist.all_reduce(number)
    print(
        f"rank {rank} of {world_size} on {device}, met at {address}: the sum is {number.item()}\n", end="", flush=True
    )
    dist.destroy_process_group()  # every rank closes its connections before it exits


if __name__ == "__main__":
    main()
