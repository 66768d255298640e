"""Likely causes when a check of module 0 fails."""

import torch

UNEVEN = "the batch is divided without a look at the remainder: compare len(batch) % world_size with 0."
NOT_CONTIGUOUS = "the function never asks tensor.is_contiguous(). A message is one piece of memory."
COLLECTIVE = "a collective does the work that this module asks you to write with messages."
CHANGED = "a tensor is written while isend still reads it, or read before irecv has filled it."
NOT_AWAITED = "a handle is forgotten. Until its wait() returns, the message may still be on its way."
OTHER_ROOT = "dst and src name ranks of the world. Use group_dst and group_src for ranks of the group."
OTHER_VIEW = "return the chunk itself, which is a slice of the tensor: not a copy, and not another chunk."
WHOLE_TENSOR = "a message carries more than one chunk. Send only the chunk whose turn it is."


def explain_rows(rows, batch, rank, size):
    """Explain which rows shard_batch returned instead of those of the rank."""
    count = len(batch) // size
    if not isinstance(rows, torch.Tensor):
        return "it raises an exception or returns something else than a tensor."
    if torch.equal(rows, batch[rank::size]):
        return "every N-th row is taken. Take n rows that follow each other."
    if rank + 1 < size and torch.equal(rows, batch[(rank + 1) * count : (rank + 2) * count]):
        return "these are the rows of the next rank: ranks count from 0."
    if rows.shape == batch.shape:
        return "the whole batch is returned."
    return ""


def explain_sum(members, world):
    """Return, by cause, what the ranks would have instead of the sum of `members`."""
    size = len(members)
    total = sum(members)

    def name(tensors):
        return [{"the tensor": tensor} for tensor in tensors]

    causes = {
        "the function returns a new tensor, or works on a copy: it must change the tensor itself.": name(members),
        "the sum is divided by the number of ranks. These functions sum.": name([total // size] * size),
        "the root's own tensor is missing from the sum. The root must add every message to it.": name(
            [total - members[0]] * size
        ),
        "only the root has the sum: it is not sent back.": name([total, *members[1:]]),
        "the sum is that of all ranks of the world: process_group is ignored.": name([sum(world)] * size),
    }
    return causes


def explain_chunk(members, place, start, end):
    """Return, by cause, what rank `place` of the group would have instead of the sum of its chunk."""
    before = members[place - 1] + members[place]
    return {
        "this chunk has not been touched. The sum probably ends in another chunk: rank r must end with chunk r, so it "
        "sends chunk r − 1 first.": [{"the tensor": members[place].flatten()[start:end]}],
        "a chunk that arrives replaces the chunk of this rank. It must be added.": [
            {"the tensor": members[place - 1].flatten()[start:end]}
        ],
        "only the tensors of two neighbours are added: what is sent on must be the sum so far.": [
            {"the tensor": before.flatten()[start:end]}
        ],
    }


def explain_gathered(members):
    """Return, by cause, what the ranks would have instead of all chunks."""
    return {
        "no chunk has been replaced: a received chunk must be written into the tensor.": [
            {"the tensor": tensor} for tensor in members
        ],
        "chunks are added where they should be replaced.": [{"the tensor": sum(members)} for _ in members],
    }


def explain_ring(num_phases, launched, chunk_bytes):
    """Explain messages to other ranks, or another number of them."""
    if any(launch.nbytes > chunk_bytes for launch in launched):
        return WHOLE_TENSOR
    phases = "each of the two phases" if num_phases == 2 else "the phase"
    return (
        f"{phases} has N − 1 steps, and in each a rank sends to group rank r + 1 and receives from group rank r − 1, "
        "modulo N. group_dst and group_src take ranks of the group."
    )


def explain_memory(most, nbytes):
    """Explain why so much memory is alive at once."""
    if most > 1.2 * nbytes:
        return "a copy of the whole tensor is made. One buffer of a chunk's length is enough for all steps."
    return "every step makes a new buffer and keeps the one before. Make one buffer and use it in all steps."
