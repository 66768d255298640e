"""Graded checks of module 0: an all-reduce made of messages."""

from collections import Counter
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch

from brigade.course.checks.expectations import expect_equal, format_ranks, replace_cause
from brigade.ranks.claims import At, each_step, is_unchanged
from brigade.ranks.events import OPPOSITES
from brigade.ranks.runner.ranks import PerRank
from brigade.ranks.verdict import join_names
from helpers.memory import WORLD, average, draw_sample, expect_delivered, run_with_little_memory
from m00_ring import causes, scenario

DTYPES = (torch.int64, torch.float64)
LARGE = 5 << 20  # elements of a tensor; in float64, it has 40 MiB
SMALL = 512  # bytes of new memory that no check counts: a number, an empty tensor


@pytest.mark.parts("Part (a): rows of a batch")
@pytest.mark.points(1)
def test_shard_batch(submission):
    """Rank r gets part r of N equal parts of the batch. If the rows cannot be split equally, ValueError is raised."""
    [world] = submission.worlds(1)
    for shape in ((12, 3), (24,), (12, 2, 2)):
        batch = draw(submission, shape, torch.float64)
        [answers] = submission.run(scenario.shard, batch, [1, 2, 3, 4], world_size=world)
        calls = [(rank, world_size) for world_size in (1, 2, 3, 4) for rank in range(world_size)]
        for (rank, size), answer in zip(calls, answers, strict=True):
            count = len(batch) // size
            start, end = rank * count, (rank + 1) * count
            what = f"for a batch of {len(batch)} rows, shard_batch(batch, {rank}, {size}) returns batch[{start}:{end}]"
            is_right = isinstance(answer, torch.Tensor) and torch.equal(answer, batch[start:end])
            why = partial(causes.explain_rows, answer, batch, rank, size)
            At().claim(what, is_right, describe_rows(answer, batch), why)
    for num_rows in (7, 1):
        batch = draw(submission, (num_rows, 2), torch.float64)
        [answers] = submission.run(scenario.shard, batch, [2, 3, 4], world_size=world)
        calls = [(rank, world_size) for world_size in (2, 3, 4) for rank in range(world_size)]
        for (rank, size), answer in zip(calls, answers, strict=True):
            what = f"for a batch of length {num_rows}, shard_batch(batch, {rank}, {size}) raises {{}}"
            raised = answer if isinstance(answer, str) else "no exception"
            At().equal(what, raised, "ValueError", causes.UNEVEN)


@pytest.mark.parts("Part (b): through a root")
@pytest.mark.points(2)
def test_sum_through_the_root(submission):
    """The sum goes through rank 0 of the group. Every other rank sends one message and receives one."""
    for group, tensors, results in run(submission, "all_reduce_via_root", (24, 5, 1)):
        expect_sums(results, tensors, group, "all_reduce_via_root")
        for step in each_step(results.events, len(tensors), group):
            peers = group[1:] if step.rank == group[0] else group[:1]
            expect_messages(step, peers, peers, causes.OTHER_ROOT if group[0] else "")


@pytest.mark.parts("Parts (c) and (d): the first lap")
@pytest.mark.points(2)
def test_ring_reduce_scatter(submission):
    """Rank r gets the sum of chunk r, as a view. Each rank sends N − 1 messages, all to the next rank of the ring."""
    for group, tensors, results in run(submission, "ring_reduce_scatter"):
        expect_own_chunks(results, tensors, group)
        expect_ring(results, tensors, group, num_phases=1)


@pytest.mark.parts("Part (e): the second lap")
@pytest.mark.points(2)
def test_ring_all_gather(submission):
    """Every rank gets each chunk r from rank r. Each rank sends N − 1 messages, all to the next rank of the ring."""
    for group, tensors, results in run(submission, "ring_all_gather"):
        for step in range(len(tensors)):
            shards = [split(tensors[step][rank], len(group))[i] for i, rank in enumerate(group)]
            what = f"after ring_all_gather of {tensors[step][0].numel()} elements on {format_ranks(group)}, every rank "
            what += "has chunk r of rank r of the group"
            why = partial(causes.explain_gathered, [tensors[step][rank] for rank in group])
            gathered = torch.cat(shards).view_as(tensors[step][0])
            expect_results(what, results, group, step, gathered, why)
        expect_ring(results, tensors, group, num_phases=1)


@pytest.mark.parts("Part (f): both laps")
@pytest.mark.points(2)
@pytest.mark.needs("test_ring_reduce_scatter")
def test_ring_all_reduce(submission):
    """The tensor becomes the sum, in place. Each rank sends at most 2(N − 1) messages of one chunk each."""
    for group, tensors, results in run(submission, "ring_all_reduce"):
        expect_sums(results, tensors, group, "ring_all_reduce")
        expect_ring(results, tensors, group, num_phases=2)
    [world] = submission.worlds(1)
    names = ["all_reduce_via_root", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"]
    [errors] = submission.run(scenario.refuse, {"functions": names}, world_size=world)
    for name, error in zip(names, errors, strict=True):
        what = f"{name} raises {{}} for a tensor that is not contiguous"
        At().equal(what, error or "no exception", "ValueError", causes.NOT_CONTIGUOUS)


@pytest.mark.points(1)
@pytest.mark.needs("test_ring_reduce_scatter")
def test_ring_memory(submission):
    """At any time, ring_all_reduce uses at most two chunks of memory in addition to the tensor."""
    for world in submission.worlds(3, 4):
        numel = world * submission.rng.randint(9_000, 11_000) + 1
        tensors = [draw(submission, (numel,), torch.float64) for _ in range(world)]
        jobs = [{"function": "ring_all_reduce", "tensor": tensor} for tensor in tensors]
        nbytes, chunks = 8 * numel, 2 * 8 * -(-numel // world)
        with replace_cause(causes.explain_messages):
            results = submission.run(scenario.measure, PerRank(jobs), world_size=world, mode="record")
        for rank, most in enumerate(results):
            what = f"{{}} bytes of new memory are alive at a time (two chunks: {chunks}, the tensor: {nbytes})"
            At(rank).at_most(what, most, chunks + SMALL, partial(causes.explain_memory, most, nbytes))
    if run := run_with_little_memory(submission, scenario.reduce_large, {"numel": LARGE}, mib=79):
        results, seeds = run
        at = draw_sample(submission.rng, LARGE)
        expect_delivered(results, 0, WORLD * average(seeds, 0, LARGE, at), "the sums of the ranks' chunks")


# ---- what the checks use


def list_worlds(submission):
    """Return pairs of a world size and the groups into which its ranks are divided."""
    pairs = [(1, [[0]]), (2, [[0, 1]]), (3, [[0, 1, 2]]), (4, [[0, 1, 2, 3]]), (4, [[1, 2, 3], [0]])]
    return [(world, groups) for world, groups in pairs if world in submission.worlds(1, 2, 3, 4)]


def draw(submission, shape, dtype):
    """Return a random tensor whose entries are whole numbers, so that every order of additions gives the same sum."""
    generator = torch.Generator().manual_seed(submission.rng.randrange(2**31))
    return torch.randint(-(10**6), 10**6, shape, generator=generator).to(dtype)


def run(submission, function, numels=(24, 23, 5, 2)):
    """Call a function on tensors of these lengths at each world size.

    Yield each group, with tensors[step][rank] as they were and the ranks' results. The first tensors have two
    dimensions.
    """
    shapes = [(n,) if step else (4, n // 4) for step, n in enumerate(numels)]
    for world, groups in list_worlds(submission):
        tensors = [[draw(submission, s, DTYPES[step % 2]) for _ in range(world)] for step, s in enumerate(shapes)]
        job = {"function": function} | ({} if groups == [list(range(world))] else {"groups": groups})
        jobs = [job | {"tensors": [own[rank] for own in tensors]} for rank in range(world)]
        with replace_cause(causes.explain_messages):
            results = submission.run(scenario.reduce, PerRank(jobs), world_size=world)
        for group in groups:
            yield group, tensors, results


def split(tensor, size):
    """Return the chunks of a tensor: the first numel % size of them have one element more."""
    short, longer = divmod(tensor.numel(), size)
    return list(tensor.flatten().split([short + (i < longer) for i in range(size)]))


def expect_sums(results, tensors, group, function):
    """Expect every rank's tensor to be the sum over the group."""
    for step, own in enumerate(tensors):
        what = f"after {function} of {own[0].numel()} elements on {format_ranks(group)}, every rank has the sum of "
        members = [own[rank] for rank in group]
        why = partial(causes.explain_sum, members, own)
        expect_results(what + "their tensors", results, group, step, sum(members), why)


def expect_own_chunks(results, tensors, group):
    """Expect rank r of the group to have the sum of chunk r in its tensor, and to return that part of it."""
    for step, own in enumerate(tensors):
        members = [own[rank] for rank in group]
        ends = list(accumulate(map(len, split(own[0], len(group))), initial=0))
        for place, (rank, (start, end)) in enumerate(zip(group, pairwise(ends), strict=True)):
            what = f"after ring_reduce_scatter on {format_ranks(group)}, rank {place} of the group has the sum of "
            what += f"elements {start}:{end} of {ends[-1]}"
            tensor, view = results[rank][step]["tensor"].cpu(), results[rank][step]["view"]
            actual, expected = ({"the tensor": whole.flatten()[start:end]} for whole in (tensor, sum(members)))
            why = partial(causes.explain_chunk, members, place, start, end)
            expect_equal(what, [actual], expected, ranks=[rank], tolerance=0.0, hypotheses=why)
            wanted, why = [start * (end > start), end - start], partial(causes.explain_view, view, len(group))
            At(rank).equal("ring_reduce_scatter returns {}", describe_view(view), describe_view(wanted), why)


def expect_results(what, results, group, step, expected, hypotheses):
    """Expect the tensor of every rank of the group to be `expected`, exactly."""
    tensors = [{"the tensor": results[rank][step]["tensor"].cpu()} for rank in group]
    expect_equal(what, tensors, {"the tensor": expected}, ranks=group, hypotheses=hypotheses, tolerance=0.0)


def expect_ring(results, tensors, group, num_phases):
    """Expect N − 1 messages per phase, to the next and from the previous rank, and no more bytes than a chunk each."""
    size, steps = len(group), "2(N − 1)" if num_phases == 2 else "N − 1"
    count = num_phases * (size - 1)
    for step in each_step(results.events, len(tensors), group):
        tensor, place, launched = tensors[step.number][0], group.index(step.rank), step.launches()
        chunk = tensor.itemsize * -(-tensor.numel() // size)
        if tensor.numel() >= size:
            why = partial(causes.explain_ring, num_phases, launched, chunk)
            expect_messages(step, [group[(place + 1) % size]] * count, [group[place - 1]] * count, why)
        sent = sum(launch.nbytes for launch in launched if launch.op == "send")
        what = f"in {steps} = {count} steps with chunks of {chunk} bytes, a rank sends {{}} bytes"
        step.at_most(what, sent, count * chunk, causes.WHOLE_TENSOR)


def expect_messages(step, to, source, cause=""):
    """Expect one message to each rank of `to` and one from each rank of `source`, no collective, and every wait."""
    launched, what = step.launches(), "the function calls only send, recv, isend, irecv and batch_isend_irecv"
    launched.satisfy(what, lambda one: one.op in OPPOSITES, causes.COLLECTIVE, "the step also made {these}")
    has_barrier = any(event["kind"] == "launch" and event["op"] == "barrier" for event in step.events)
    step.claim(what, not has_barrier, "the rank also called a barrier", causes.COLLECTIVE)
    for op, verb, word, peers in (("send", "sends", "to", to), ("recv", "receives", "from", source)):
        made = format_messages([launch.peer for launch in launched if launch.op == op], word)
        step.equal(f"the step {verb} {{}}", made, format_messages(peers, word), cause)
    what = "no tensor changes between the call that sends or receives it and wait()"
    launched.satisfy(what, is_unchanged, causes.CHANGED, "the tensor changed in {count} of {all} messages")
    what, got = "the function calls wait() on every handle of isend and irecv", "{count} of {all} have no wait()"
    launched.satisfy(what, lambda one: bool(one.waits), causes.NOT_AWAITED, got)


def format_messages(peers, word):
    """Return the numbers of messages, such as "3 messages to rank 1". `word` is "to" or "from"."""
    counts = Counter("any rank" if peer is None else f"rank {peer}" for peer in peers)
    texts = [f"{count} message{'s' * (count > 1)} {word} {rank}" for rank, count in sorted(counts.items())]
    return join_names(texts) or "no message"


def describe_rows(rows, batch):
    """Return what shard_batch returned, in words."""
    if not isinstance(rows, torch.Tensor):
        return "shard_batch did not return a tensor"
    return f"shard_batch returned a tensor of shape {tuple(rows.shape)}" + (
        " with other rows" if rows.shape[1:] == batch.shape[1:] else ""
    )


def describe_view(view):
    """Return what ring_reduce_scatter returned, in words."""
    return f"a view of elements {view[0]}:{sum(view)} of the tensor" if view else "no view of the tensor"
