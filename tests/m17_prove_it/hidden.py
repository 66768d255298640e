"""The mutants that module 17 tries when a submission is graded. Students do not get this file."""

from m17_prove_it.topics import (
    AVERAGES,
    BLOCKS,
    CHECKPOINT,
    EQUAL,
    EXCEPTIONS,
    GROUPS,
    NESTED,
    NORM,
    ORDER,
    OVERLAP,
    RULE,
    START,
    STATE,
    STEPS,
    THREE,
    UNUSED,
    WAITS,
)

# For each part: module -> name of a mutant -> what it is about.
HIDDEN: dict[str, dict[int, dict[str, str]]] = {
    "average": {
        1: {
            "parameters not broadcast": START,
            "frozen parameters not broadcast": START,
            "buffers that are not floats not broadcast": START,
            "broadcast from the last rank": START,
            "rank 0 of the world instead of the group": GROUPS,
            "divided by the size of the world": GROUPS,
            "reduced over the world": GROUPS,
            "unused parameters left out of the average": UNUSED,
            "averaged over the ranks that have a gradient": UNUSED,
            "a copy of the gradient reduced": AVERAGES,
            "weights reduced instead of gradients": AVERAGES,
        },
        2: {
            "result not copied back": AVERAGES,
            "every piece cut from the beginning": AVERAGES,
            "divided by a literal 2": THREE,
        },
    },
    "awaited": {
        3: {
            "last handle never waited on": WAITS,
            "only the last handle waited on": WAITS,
            "no handle waited on": WAITS,
            "divided during the transfer": WAITS,
            "divided in flight, and not in finish_grad_sync": WAITS,
            "handles never cleared": STEPS,
            "synchronous all-reduce in the hook": OVERLAP,
            "a blocking call in the hook": OVERLAP,
            "launched after backward": OVERLAP,
            "launches collected until backward ends": OVERLAP,
            "every launch held back until two more gradients are ready": OVERLAP,
            "a copy reduced, its result thrown away": AVERAGES,
        }
    },
    "order": {
        4: {
            "not reversed": RULE,
            "closed after the cap is exceeded": RULE,
            "an exact fit closes": RULE,
            "elements compared with bytes": RULE,
            "launched in the order in which they become ready": ORDER,
            "only the next bucket is checked": ORDER,
            "buckets filled in the order in which gradients become ready": ORDER,
            "incomplete buckets never launched": UNUSED,
            "unused parameters left out": UNUSED,
            "everything launched in finish_grad_sync": OVERLAP,
            "synchronous in the hook": OVERLAP,
            "ready counters not reset": STEPS,
            "next_to_launch not reset": STEPS,
        }
    },
    "accumulated": {
        3: {
            "no_sync not restored after an exception": EXCEPTIONS,
            "no_sync ends exceptions": EXCEPTIONS,
            "the inner no_sync ends the outer one": NESTED,
            "no_sync without effect": BLOCKS,
            "no_sync throws the accumulated gradients away": BLOCKS,
            "gradients accumulated inside no_sync only are not averaged": BLOCKS,
        },
        4: {
            "counted inside no_sync": BLOCKS,
            "no_sync not restored after an exception": EXCEPTIONS,
            "next_to_launch not reset": STEPS,
        },
        5: {
            "the inner no_sync ends the outer one": NESTED,
            "no_sync not restored after an exception": EXCEPTIONS,
            "no_sync without effect": BLOCKS,
            "a removed gradient keeps the old values": STEPS,
        },
    },
    "sharded": {
        8: {
            "the shard of another rank": EQUAL,
            "weights not gathered": EQUAL,
            "the gathering of weights not waited for": EQUAL,
            "averages divided again": EQUAL,
            "state for all parameters": STATE,
            "state for every parameter of which the rank has a part": STATE,
            "clipped by the local norm": NORM,
            "norms added instead of squares": NORM,
            "a copy is clipped": NORM,
            "short gradients made longer": NORM,
            "a state_dict of a rank's own shards only": CHECKPOINT,
            "moments not resharded": CHECKPOINT,
            "the state not loaded": CHECKPOINT,
            "scalars not loaded": CHECKPOINT,
        }
    },
}
