"""Likely causes when a check of module 0 fails."""

import torch

from brigade.course.checks.diagnose.exceptions import Symptom
from brigade.ranks.events import OPPOSITES, launches

UNEVEN = "the function does not check the remainder. Compare len(batch) % world_size with 0."
NOT_CONTIGUOUS = "the function never calls tensor.is_contiguous(). A message must be one piece of memory."
COLLECTIVE = "the code calls a collective. This module asks you to send messages instead."
CHANGED = "a tensor is written while isend still reads it, or read before irecv has filled it."
NOT_AWAITED = "the code does not wait on every handle. Until wait() returns, the message may still be in transit."
OTHER_ROOT = "dst and src name ranks of the world. Use group_dst and group_src for ranks of the group."
ALL_SEND = (
    "every rank waits in a send before it receives. Start the send with isend, receive, and then wait for the send."
)
WHOLE_TENSOR = "a message carries more than one chunk. Send one chunk per step."
FEWER_CHUNKS = (
    "torch.chunk returns fewer chunks than there are ranks if the chunks before them take all elements. Use "
    "split_into_chunks, which returns an empty chunk for each of the others."
)
SYMPTOMS = [
    Symptom("fewer chunks than ranks", "IndexError", "list index out of range", FEWER_CHUNKS,
            file=r"^[^#\n]*(?:torch|tensor|\)|\])\.chunk\("),
    Symptom("message to itself", "", "Pair is not connected|should not be the same as the rank of the current process",
            "a rank sends a message to itself. In a group, pass group_dst and group_src, which "
            "are ranks of the group. A ring of one rank has no steps."),
]  # fmt: skip


def explain_rows(rows, batch, rank, size):
    """Explain which rows shard_batch returned instead of those of the rank."""
    count = len(batch) // size
    if not isinstance(rows, torch.Tensor):
        return "the function raises an exception, or it does not return a tensor."
    if torch.equal(rows, batch[rank::size]):
        return "the function returns every N-th row. Return n consecutive rows."
    if rank + 1 < size and torch.equal(rows, batch[(rank + 1) * count : (rank + 2) * count]):
        return "these rows belong to the next rank. Ranks are numbered from 0."
    if rows.shape == batch.shape:
        return "the function returns the whole batch."
    return ""


def explain_sum(members, world):
    """Return, by cause, what the ranks would have instead of the sum of `members`."""
    size = len(members)
    total = sum(members)

    causes = {
        "the function returns a new tensor or works on a copy. It must change the tensor itself.": members,
        "the sum is divided by the number of ranks. This function must not average.": [total // size] * size,
        "the root's own tensor is missing from the sum. The root must add every message to its own tensor.": [
            total - members[0]
        ]
        * size,
        "only the root has the sum, because it does not send the sum back.": [total, *members[1:]],
        "the sum includes all ranks of the world, because the function ignores process_group.": [sum(world)] * size,
    }
    return name_tensors(causes)


def name_tensors(causes):
    """Return hypotheses about "the tensor" of each rank."""
    return {cause: [{"the tensor": tensor} for tensor in tensors] for cause, tensors in causes.items()}


def explain_chunk(members, place, start, end):
    """Return, by cause, what rank `place` of the group would have instead of the sum of its chunk."""
    before, own = members[place - 1].flatten()[start:end], members[place].flatten()[start:end]
    return name_tensors(
        {
            "this chunk has not changed, so the sum is probably in another chunk. To end with chunk r, rank r must "
            "send chunk r − 1 first.": [own],
            "the received chunk replaces the rank's own chunk. Add the two chunks instead.": [before],
            "only the tensors of two neighbours are added. In every step, send on the sum so far.": [before + own],
        }
    )


def explain_view(view, size):
    """Explain why a rank of a group of `size` ranks returned `view`, although its chunk of the tensor is right."""
    what = "returns another chunk"
    if not view:
        what = "does not return a slice of the tensor. It may return a slice of a copy"
    right = "the tensor has the right sum, but " if size > 1 else ""  # a single rank adds nothing
    return f"{right}the function {what}. Return chunk r as a slice of the tensor. A clone of a chunk is not a view."


def explain_gathered(members):
    """Return, by cause, what the ranks would have instead of all chunks."""
    size = len(members)
    chunks = [torch.tensor_split(tensor.flatten(), size) for tensor in members]
    added = [  # chunk c adds up on its way from rank c to this rank
        torch.cat([sum(chunks[(c + k) % size][c] for k in range((rank - c) % size + 1)) for c in range(size)])
        for rank in range(size)
    ]
    others = torch.cat([chunks[(c - 1) % size][c] for c in range(size)]).view(members[0].shape)
    return name_tensors(
        {
            "each chunk r comes from rank r − 1. Every rank r must first send its own chunk, chunk r.": [others] * size,
            "no chunk was replaced. Write each received chunk into the tensor.": members,
            "received chunks are added to the rank's own chunks. They must replace those chunks.": [
                tensor.view(members[0].shape) for tensor in added
            ],
        }
    )


def explain_ring(num_phases, launched, chunk_bytes):
    """Explain messages that go to the wrong ranks, or a wrong number of messages."""
    if any(launch.nbytes > chunk_bytes for launch in launched):
        return WHOLE_TENSOR
    phases = "each of the two phases" if num_phases == 2 else "the phase"
    return (
        f"the messages do not form a ring. In each of the N − 1 steps of {phases}, rank r of the group sends to rank r "
        "+ 1 and receives from rank r − 1, modulo N. Pass ranks of the group as group_dst and group_src."
    )


def explain_messages(failed):
    """Return why messages never arrive, or have another length than expected; "" if the records do not show it."""
    launched = [launches(own) for own in failed.events]
    if any(launch.op not in OPPOSITES for own in launched for launch in own):
        return ""
    if failed.verdict.ending == "deadlock":
        waits = [own[-1]["index"] if own and own[-1]["kind"] == "wait" else None for own in failed.events]
        pairs = zip(launched, waits, strict=True)
        sending = [any(x.index == index and x.op == "send" for x in own) for own, index in pairs]
        return ALL_SEND if all(sending) else ""
    return explain_lengths(launched) if failed.verdict.ending == "mismatch" else ""


def explain_lengths(launched):
    """Return why a rank receives a chunk of another length than it expects; "" if the messages do not show it."""
    sends = [[launch for launch in own if launch.op == "send"] for own in launched]
    peers = {(rank, launch.peer) for rank, own in enumerate(sends) for launch in own}
    if len(sends) < 3:
        return ""
    if peers and all(peer == (rank - 1) % len(sends) for rank, peer in peers):
        rank, peer = min(peers)
        return f"rank {rank} sends to rank {peer}, so the ring runs the other way. Rank r must send to rank r + 1."
    for call in {launch.step for own in sends for launch in own}:
        lengths = [[launch.numel for launch in own if launch.step == call] for own in sends]
        is_constant = all(len(own) > 1 and len(set(own)) == 1 for own in lengths)
        if is_constant and len({own[0] for own in lengths}) > 1:  # otherwise all chunks are equally long
            return (
                "every rank sends the same chunk in each step of the loop. After the first step, a rank must send on "
                "the chunk that it received in the previous step."
            )
    return ""


def explain_memory(most, nbytes):
    """Explain why so much memory is alive at once."""
    if most > 1.2 * nbytes:
        return "the function copies the whole tensor, or as many chunks. One buffer of the length of a chunk is enough."
    return "every step creates a new buffer, and keeps the previous one. Use one buffer, and send the chunk itself."
