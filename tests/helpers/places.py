"""The ranks and steps of a record, for expectations about each of them."""

from brigade.events import launches


def each_step(events_by_rank, steps, ranks=None):
    """Yield for each of the first steps of each rank its place, for `expect(..., **place)`, its record and launches."""
    for rank in range(len(events_by_rank)) if ranks is None else ranks:
        for step in range(steps):
            yield {"rank": rank, "step": step}, events_by_rank[rank], launches(events_by_rank[rank], step)
