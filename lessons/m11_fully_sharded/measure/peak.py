"""Print what TinyLM's third step needs with different settings: full weights at their peak, launches and bytes."""

import torch

from brigade.course.checks.tiny_lm import Block, language_loss, make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.events import launches
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import student

SETTINGS = [{"prefetch": 0}, {"prefetch": 1}, {"prefetch": 2}, {"reshard_after_forward": False}]


def run_three_steps(settings):
    """Return the peak bytes of full weights at forward pre-hooks and gradient hooks, and the bytes of all weights."""
    torch.manual_seed(0)
    model = make_tiny_lm()
    parameters = list(model.parameters())
    ddp = student("m11_fully_sharded", "FullyShardedDDP")(model, (Block,), **settings)
    peak = 0

    def measure(*_):
        nonlocal peak
        alive = {id(p.untyped_storage()): p.untyped_storage().nbytes() for p in parameters}
        peak = max(peak, sum(alive.values()))

    for module in model.modules():
        module.register_forward_pre_hook(measure)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(measure)
    optimizer = torch.optim.AdamW(ddp.shards())
    tokens = torch.randint(256, (4, 64))
    for step in range(3):
        recording.note("step", step=step)
        optimizer.zero_grad()
        language_loss(ddp(tokens), tokens).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return peak, sum(p.numel() * p.element_size() for p in parameters)


def main(run):
    for settings in SETTINGS:
        results = run(run_three_steps, settings, world_size=2)
        (peak, whole), third = results[0], launches(results.events[0], 2)
        counts = {op: [x.nbytes for x in third if x.op == op] for op in ("all_gather", "reduce_scatter")}
        [(name, value)] = settings.items()
        moved = ", ".join(f"{len(sizes)} {op}, {sum(sizes) / 1e6:.2f} MB" for op, sizes in counts.items())
        print(f"{name}={value}: at most {peak / 1e6:.2f} of {whole / 1e6:.2f} MB; {moved}")


if __name__ == "__main__":
    run_experiment(main, module=11)
