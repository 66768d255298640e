"""Mistakes in module 0."""

from mutants import Mutant

ROWS = "batch[rank * num_rows : (rank + 1) * num_rows]"
REFUSE = "if left_over:"
ADD_AT_ROOT = "tensor += received"
SEND_BACK = "dist.send(tensor, group=process_group, group_dst=peer)"
TO_ROOT = "dist.send(tensor, group=process_group, group_dst=0)"
TURN = "outgoing, incoming = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]"
ADD = "incoming += received"
GATHER_TURN = "shift(chunks[(rank - step) % size], chunks[(rank - step - 1) % size], process_group)"
EXCHANGE = """handle = dist.isend(outgoing, group=process_group, group_dst=(rank + 1) % size)
    dist.recv(incoming, group=process_group, group_src=(rank - 1) % size)
    handle.wait()"""
BUFFER = "buffer = torch.empty_like(chunks[0])  # the first chunk is the largest"
BOTH = "ring_reduce_scatter(tensor, process_group)\n    ring_all_gather(tensor, process_group)"
REDUCED = ("test_ring_reduce_scatter", "test_ring_all_reduce")
GATHERED = ("test_ring_all_gather", "test_ring_all_reduce")

MUTANTS = [
    Mutant("every N-th row", ROWS, "batch[rank::world_size]", ("test_shard_batch",), "every N-th row. Return"),
    Mutant(
        "the rows left over are dropped", REFUSE, "if False:", ("test_shard_batch",), "does not check the remainder"
    ),
    Mutant(
        "the root forgets its own tensor",
        ADD_AT_ROOT,
        "tensor.copy_(received) if peer == 1 else tensor.add_(received)",
        ("test_sum_through_the_root",),
        "the root's own tensor is missing",
    ),
    Mutant(
        "the root averages",
        "for peer in range(1, size):\n            dist.send",
        "tensor //= size\n        for peer in range(1, size):\n            dist.send",
        ("test_sum_through_the_root",),
        "divided by the number of ranks",
    ),
    Mutant(
        "the root is rank 0 of the world",
        TO_ROOT,
        "dist.send(tensor, 0, group=process_group)",
        ("test_sum_through_the_root",),
    ),
    Mutant(
        "the root replaces its tensor by each message",
        ADD_AT_ROOT,
        "tensor.copy_(received)",
        ("test_sum_through_the_root",),
        "must add every message to it",
    ),
    Mutant(
        "the sum is sent to the world's ranks",
        SEND_BACK,
        "dist.send(tensor, peer, group=process_group)",
        ("test_sum_through_the_root",),
    ),
    Mutant(
        "the sum ends one chunk too far",
        TURN,
        "outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]",
        REDUCED,
        "To end with chunk r, rank r must send",
    ),
    Mutant(
        "one step too many",
        "for step in range(size - 1):\n        outgoing",
        "for step in range(size):\n        outgoing",
        REDUCED,
    ),
    Mutant(
        "chunks are added in the gather too",
        GATHER_TURN,
        "received = torch.empty_like(chunks[(rank - step - 1) % size])\n"
        "        shift(chunks[(rank - step) % size], received, process_group)\n"
        "        chunks[(rank - step - 1) % size] += received",
        GATHERED,
        "received chunks are added",
    ),
    Mutant("chunks are replaced, not added", ADD, "incoming.copy_(received)", REDUCED, "Add the two chunks instead"),
    Mutant(
        "the chunks are copies",
        BUFFER,
        BUFFER + "\n    chunks = [chunk.clone() for chunk in chunks]",
        REDUCED,
        "the function does not return a slice of the tensor",
    ),
    Mutant(
        "every rank sends first",
        EXCHANGE,
        "dist.send(outgoing, group=process_group, group_dst=(rank + 1) % size)\n"
        "    dist.recv(incoming, group=process_group, group_src=(rank - 1) % size)",
        (*REDUCED, "test_ring_all_gather"),
        "Start the send with isend",
    ),
    Mutant(
        "neighbours of the world",
        EXCHANGE,
        EXCHANGE.replace("group_dst=(rank", "dst=(rank").replace("group_src=(rank", "src=(rank"),
        (*REDUCED, "test_ring_all_gather"),
    ),
    Mutant(
        "the ring runs the other way",
        EXCHANGE,
        EXCHANGE.replace("(rank + 1)", "(rank + size - 1)").replace("(rank - 1)", "(rank + 1)"),
        (*REDUCED, "test_ring_all_gather"),
        "so the ring runs the other way",
    ),
    Mutant(
        "the handle of isend is forgotten",
        "    handle.wait()\n",
        "",
        (*REDUCED, "test_ring_all_gather"),
        "does not wait on every handle",
    ),
    Mutant(
        "the wrong chunk is sent in the gather",
        GATHER_TURN,
        GATHER_TURN.replace("rank - step)", "rank)"),
        GATHERED,
        "every rank sends the same chunk in each step",
    ),
    Mutant(
        "the whole tensor goes around",
        BOTH,
        "whole, total = tensor.clone(), tensor.clone()\n"
        "    for _ in range(dist.get_world_size(process_group) - 1):\n"
        "        received = torch.empty_like(whole)\n"
        "        shift(whole, received, process_group)\n"
        "        whole = received\n"
        "        total += received\n"
        "    tensor.copy_(total)",
        ("test_ring_all_reduce", "test_ring_memory"),
        "carries more than one chunk",
    ),
    Mutant(
        "dist.all_reduce",
        BOTH,
        "split_into_chunks(tensor, 1)\n    dist.all_reduce(tensor, group=process_group)",
        ("test_ring_all_reduce",),
        "the code calls a collective",
    ),
    Mutant(
        "every step keeps its buffer",
        "received = buffer[: incoming.numel()]",
        "received = torch.empty_like(incoming)\n        kept = [*(kept if step else []), received]",
        ("test_ring_memory",),
        "keeps the previous one",
    ),
    Mutant(
        "a copy of the tensor",
        BOTH,
        "require_contiguous(tensor)\n    copy = tensor.clone()\n    ring_reduce_scatter(copy, process_group)\n"
        "    ring_all_gather(copy, process_group)\n    tensor.copy_(copy)",
        ("test_ring_memory",),
        "copies the whole tensor",
    ),
    Mutant(
        "the result is a copy",
        "return chunks[rank]",
        "return chunks[rank].clone()",
        ("test_ring_reduce_scatter",),
        "the function does not return a slice of the tensor",
    ),
    Mutant(
        "chunks of torch.chunk",
        "tensor_split(world_size)",
        "chunk(world_size)",
        ("test_ring_reduce_scatter", "test_ring_all_gather"),
    ),
    Mutant(
        "chunks are rows",
        "tensor.view(-1).tensor_split(world_size)",
        "tensor.tensor_split(world_size)",
        ("test_ring_reduce_scatter", "test_ring_all_gather"),
    ),
    Mutant(
        "gaps in memory are not refused",
        "    if not tensor.is_contiguous():\n",
        "    if False:\n",
        ("test_ring_all_reduce",),
        "never calls tensor.is_contiguous()",
    ),
]

SAMPLE = ("the sum ends one chunk too far", "chunks are replaced, not added")
