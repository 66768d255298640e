"""Print the sum of many bf16 gradients of 0.001 in bf16 and in fp32, starting from 1.0 and from 0.0."""

import torch

if __name__ == "__main__":
    for start in (1.0, 0.0):
        for dtype in (torch.bfloat16, torch.float32):
            total = torch.tensor(start, dtype=dtype)
            for n in range(1, 1025):
                total += torch.tensor(0.001, dtype=torch.bfloat16)
                if n in (16, 256, 1024):
                    print(f"{start} + {n} gradients of 0.001 in {dtype}: {total.item():.4f}")
