"""The mutants that module 17 tries when a submission is graded. Students do not get this file."""

from m17_prove_it import topics

# For each part: module -> name of a mutant -> what it is about.
HIDDEN: dict[str, dict[int, dict[str, str]]] = {
    "average": {
        1: {
            "parameters not broadcast": topics.START,
            "frozen parameters not broadcast": topics.START,
            "buffers that are not floats not broadcast": topics.START,
            "broadcast from the last rank": topics.START,
            "rank 0 of the world instead of the group": topics.GROUPS,
            "divided by the size of the world": topics.GROUPS,
            "reduced over the world": topics.GROUPS,
            "unused parameters left out of the average": topics.UNUSED,
            "averaged over the ranks that have a gradient": topics.UNUSED,
            "a copy of the gradient reduced": topics.AVERAGES,
            "weights reduced instead of gradients": topics.AVERAGES,
        },
        2: {
            "result not copied back": topics.AVERAGES,
            "every piece cut from the beginning": topics.AVERAGES,
            "divided by a literal 2": topics.THREE,
        },
    },
    "awaited": {
        3: {
            "last handle never waited on": topics.WAITS,
            "only the last handle waited on": topics.WAITS,
            "no handle waited on": topics.WAITS,
            "divided during the transfer": topics.WAITS,
            "divided in flight, and not in finish_grad_sync": topics.WAITS,
            "handles never cleared": topics.STEPS,
            "synchronous all-reduce in the hook": topics.OVERLAP,
            "a blocking call in the hook": topics.OVERLAP,
            "launched after backward": topics.OVERLAP,
            "launches collected until backward ends": topics.OVERLAP,
            "every launch held back until two more gradients are ready": topics.OVERLAP,
            "a copy reduced, its result thrown away": topics.AVERAGES,
        }
    },
    "order": {
        4: {
            "not reversed": topics.RULE,
            "closed after the cap is exceeded": topics.RULE,
            "an exact fit closes": topics.RULE,
            "elements compared with bytes": topics.RULE,
            "launched in the order in which they become ready": topics.ORDER,
            "only the next bucket is checked": topics.ORDER,
            "buckets filled in the order in which gradients become ready": topics.ORDER,
            "incomplete buckets never launched": topics.UNUSED,
            "unused parameters left out": topics.UNUSED,
            "everything launched in finish_grad_sync": topics.OVERLAP,
            "synchronous in the hook": topics.OVERLAP,
            "ready counters not reset": topics.STEPS,
            "next_to_launch not reset": topics.STEPS,
        }
    },
    "accumulated": {
        3: {
            "no_sync not restored after an exception": topics.EXCEPTIONS,
            "no_sync ends exceptions": topics.EXCEPTIONS,
            "the inner no_sync ends the outer one": topics.NESTED,
            "no_sync without effect": topics.BLOCKS,
            "no_sync throws the accumulated gradients away": topics.BLOCKS,
            "gradients accumulated inside no_sync only are not averaged": topics.BLOCKS,
        },
        4: {
            "counted inside no_sync": topics.BLOCKS,
            "no_sync not restored after an exception": topics.EXCEPTIONS,
            "next_to_launch not reset": topics.STEPS,
        },
        5: {
            "the inner no_sync ends the outer one": topics.NESTED,
            "no_sync not restored after an exception": topics.EXCEPTIONS,
            "no_sync without effect": topics.BLOCKS,
            "a removed gradient keeps the old values": topics.STEPS,
        },
    },
    "sharded": {
        8: {
            "the shard of another rank": topics.EQUAL,
            "weights not gathered": topics.EQUAL,
            "the gathering of weights not waited for": topics.EQUAL,
            "averages divided again": topics.EQUAL,
            "state for all parameters": topics.STATE,
            "state for every parameter of which the rank has a part": topics.STATE,
            "clipped by the local norm": topics.NORM,
            "norms added instead of squares": topics.NORM,
            "a copy is clipped": topics.NORM,
            "short gradients made longer": topics.NORM,
            "a state_dict of a rank's own shards only": topics.CHECKPOINT,
            "moments not resharded": topics.CHECKPOINT,
            "the state not loaded": topics.CHECKPOINT,
            "scalars not loaded": topics.CHECKPOINT,
        }
    },
}
