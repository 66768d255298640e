"""The content witness passes every style of averaging, and finds launches that carry something else."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch

from brigade.course.checks.context import CheckContext, Conditions
from brigade.course.checks.expectations import expect_equal
from brigade.course.table.submission import read
from brigade.grader.isolation import load_witness
from brigade.grader.witness.content import find_missing_gradient
from brigade.ranks.runner.ranks import RankResults, run_ranks
from brigade.ranks.runner.server import SERVER
from brigade.ranks.texts import PACKAGE
from helpers import training

WRAPPER = """
import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module, self.process_group, self.earlier = module, process_group, {}
        for tensor in [*module.parameters(), *module.buffers()]:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, group=process_group, group_src=0)
            tensor.detach().copy_(whole)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self):
        group, n = self.process_group, dist.get_world_size(self.process_group)
        params = [p for p in self.module.parameters() if p.requires_grad]
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [p.grad for p in params]
        FINISH
"""
RIGHT = {
    "an average": "for g in grads: dist.all_reduce(g, dist.ReduceOp.AVG, group=group)",
    "a sum, then a division": "for g in grads: dist.all_reduce(g, group=group); g /= n",
    "a division, then a sum": "for g in grads: g /= n; dist.all_reduce(g, group=group)",
    "half of the division first": "for g in grads: g /= n**0.5; dist.all_reduce(g, group=group); g /= n**0.5",
    "one flat tensor with padding, backwards": """
        flat = torch.cat([torch.full((7,), 3.0)] + [g.flatten().flip(0) for g in reversed(grads)])
        dist.all_reduce(flat, group=group)
        for g in grads:
            g.copy_(flat[flat.numel() - g.numel():].flip(0).view(g.shape) / n)
            flat = flat[:flat.numel() - g.numel()]
    """,
    "the sum on each rank": """
        for g in grads:
            parts = [torch.empty_like(g) for _ in range(n)]
            dist.all_gather(parts, g, group=group)
            g.copy_(sum(parts) / n)
    """,
    "a reduction to one rank": """
        for g in grads:
            dist.reduce(g, group=group, group_dst=0)
            g /= n
            dist.broadcast(g, group=group, group_src=0)
    """,
    "both halves of an all-reduce": """
        for g in grads:
            flat = torch.cat([g.flatten(), g.new_zeros(-g.numel() % n)])
            part = flat.new_empty(len(flat) // n)
            dist.reduce_scatter_tensor(part, flat, dist.ReduceOp.AVG, group=group)
            dist.all_gather_into_tensor(flat, part, group=group)
            g.copy_(flat[:g.numel()].view(g.shape))
    """,
    "a ring of messages": """
        rank = dist.get_rank(group)
        for g in grads:
            total, part = g.clone(), g
            for _ in range(n - 1):
                got = torch.empty_like(g)
                sent = dist.isend(part, group=group, group_dst=(rank + 1) % n)
                dist.recv(got, group=group, group_src=(rank - 1) % n)
                sent.wait()
                total, part = total + got, got
            g.copy_(total / n)
    """,
    "float64": "for g in grads: h = g.double(); dist.all_reduce(h, group=group); g.copy_(h / n)",
    "bfloat16": "for g in grads: h = g.bfloat16(); dist.all_reduce(h, group=group); g.copy_(h.float() / n)",
    "coalesced": "dist.all_reduce_coalesced(grads, group=group); [g.div_(n) for g in grads]",
}
# All ranks have equal batches here, so that a wrapper has the right averages without any communication.
WRONG = {
    "nothing": "pass",
    "zeros": "for g in grads: dist.all_reduce(torch.zeros_like(g), group=group)",
    "noise": "for g in grads: dist.all_reduce(torch.randn_like(g), group=group)",
    "all but one parameter": "for g in grads[1:]: dist.all_reduce(g, dist.ReduceOp.AVG, group=group)",
    "one parameter in place of another": "for g in grads: dist.all_reduce(grads[0].clone(), group=group)",
    "signs": "for g in grads: dist.all_reduce(g.sign(), group=group)",
    "the gradients of the step before": """
        late = self.earlier.get("grads", [torch.zeros_like(g) for g in grads])
        self.earlier["grads"] = [g.clone() for g in grads]
        for g in late: dist.all_reduce(g, dist.ReduceOp.AVG, group=group)
    """,
    "all finite numbers of bfloat16": """
        every = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
        dist.all_reduce(every[every.isfinite()], dist.ReduceOp.MAX, group=group)
    """,
    "almost the gradients": "for g in grads: dist.all_reduce(g * 1.01, dist.ReduceOp.AVG, group=group)",
}


@pytest.fixture(autouse=True)
def use_switch(monkeypatch):
    monkeypatch.setattr(SERVER, "load_witness", load_witness)


def judge(finish, case, jobs=None):
    """Return what the witness says of a run of the wrapper with these lines."""
    jobs = jobs or case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP")
    return find_missing_gradient(run(finish, jobs), jobs)


def run(finish, jobs):
    """Train with the wrapper with these lines, through the switch."""
    sources = dict(read("solutions", 1))
    name = next(name for name in sources if name.endswith("naive_ddp"))
    text = WRAPPER.replace("FINISH", textwrap.indent(textwrap.dedent(finish).strip(), " " * 8).lstrip())
    sources[name] = (sources[name][0], text)
    packages = {PACKAGE: sources}
    return run_ranks(training.train, jobs, world_size=len(jobs), mode="strict", packages=packages, graded=True)


def make_context(seed=0):
    return CheckContext({}, Conditions(seed=seed))


@pytest.mark.parametrize("finish", RIGHT.values(), ids=RIGHT)
def test_right_styles_pass(finish):
    case = make_context().case("Branches", 3, steps=2, micro_batches=2, branches=[0, 1, -1])
    assert judge(finish, case) == ""


@pytest.mark.parametrize("finish", WRONG.values(), ids=WRONG)
def test_other_content_is_found(finish):
    case = make_context().case("Plain", 2, steps=2)
    case.batches[1], case.states[1] = case.batches[0], case.states[0]
    found = judge(finish, case)
    assert re.search(r"step 0 .*ranks 0, 1 .* layers\.", found)


@pytest.fixture(scope="module")
def silent():
    """The results of ranks that have the right averages and launch nothing, not even in the constructor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SERVER, "load_witness", load_witness)
        patch.setattr(__name__ + ".WRAPPER", re.sub("dist.broadcast.*", "pass", WRAPPER))
        case = make_context().case("Plain", 2, steps=2)
        case.batches[1], case.states[1] = case.batches[0], case.states[0]
        jobs = case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP")
        return run("pass", jobs), jobs


def change_floats(value, change):
    """Return nested values with changed tensors."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: change_floats(item, change) for key, item in value.items()}
    return [change_floats(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def test_a_run_without_a_launch_is_judged(silent):
    results, jobs = silent
    assert not any(results.carried) and "step 0" in find_missing_gradient(results, jobs)
    without_switch = RankResults(results, results.events, [])
    assert find_missing_gradient(without_switch, jobs) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.complex128),
        lambda x: x.double(),
        lambda x: x + 0.9e-5 * x.abs().max() * (torch.arange(x.numel()).view(x.shape) == 0),
    ],
    ids=["complex", "another dtype", "as wrong as a check allows"],
)
def test_what_a_check_accepts_is_judged(change, silent):
    """No form of the results that is right for a check stops the witness."""
    results, jobs = silent
    forged = RankResults([change_floats(own, change) for own in results], results.events, [], [[], []])
    case_gradients = [own["gradients"][0] for own in results]
    expect_equal("", [own["gradients"][0] for own in forged], case_gradients[0])
    assert "step 0" in find_missing_gradient(forged, jobs)


def test_steps_that_are_not_reported_are_judged(silent):
    results, jobs = silent
    events = [[event for event in own if event["kind"] != "step"] for own in results.events]
    assert "step 0" in find_missing_gradient(RankResults(results, events, [], [[], []]), jobs)


def test_numbers_among_which_every_gradient_is_are_too_many():
    case = make_context().case("Plain", 2, steps=2)
    case.batches[1], case.states[1] = case.batches[0], case.states[0]
    finish = """
        powers = (8 * 1.0001 ** -torch.arange(2.0**17, dtype=torch.float64)).float()
        dist.all_reduce(torch.cat([powers, -powers]), dist.ReduceOp.MAX, group=group)
    """
    found = judge(finish, case)
    assert re.search(r"step 0 .*ranks 0, 1 .*\b262144\b", found)


def test_each_step_is_judged_whose_result_the_ranks_have():
    case = make_context().case("Plain", 2, steps=2)
    finish = """
        self.earlier["step"] = self.earlier.get("step", 0) + 1
        for g in grads:
            if self.earlier["step"] == 1: dist.all_reduce(g, dist.ReduceOp.AVG, group=group)
    """
    assert judge(finish, case) == "", "an honest mistake: the second average is wrong"
    case.batches[1] = case.batches[0]
    assert "step 1" in judge(finish, case)


def test_right_weights_are_judged_even_if_the_gradients_are_not_returned():
    case = make_context().case("Plain", 2, steps=2)
    case.batches[1], case.states[1] = case.batches[0], case.states[0]
    jobs = case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP")
    results = run(WRONG["zeros"], jobs)
    for own in results:
        del own["gradients"]
    assert "step 0" in find_missing_gradient(results, jobs)
    for own in results:
        del own["weights"]
    assert find_missing_gradient(results, jobs) == ""


@pytest.mark.parametrize("model", ["Tied", "Frozen", "Buffers", "MixedDtypes", "Reordered", "Transposed", "Listed"])
def test_models_with_edge_cases_pass(model):
    right = "for g in grads: h = g.contiguous(); dist.all_reduce(h, group=group); g.copy_(h / n)"
    for seed in range(3):
        assert judge(right, make_context(seed).case(model, 2, steps=3)) == ""


def test_groups_are_judged_apart():
    case = make_context().case("Plain", 3, steps=2, group=[0, 2])
    jobs = case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP", groups=[[0, 2], [1]])
    assert judge(RIGHT["an average"], case, jobs=jobs) == ""
    case.batches[2], case.states[2] = case.batches[0], case.states[0]
    jobs = case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP", groups=[[0, 2], [1]])
    found = judge("for g in grads: dist.all_reduce(torch.zeros_like(g), group=group)", case, jobs=jobs)
    assert re.search("step 0 .*ranks 0, 2", found)
