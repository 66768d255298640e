"""What wrong implementations are about: a pair that rejects none of one topic does not examine it."""

WAITS, OVERLAP, GROUPS, THREE = "waits", "overlap with backward", "sub-groups", "more than two ranks"
START, AVERAGES, UNUSED = "the start", "averages", "unused parameters"
RULE, ORDER, STEPS = "the bucket rule", "the order of launches", "several steps"
BLOCKS, EXCEPTIONS, NESTED = "no_sync", "exceptions in no_sync", "nested no_sync blocks"
EQUAL, STATE, NORM, CHECKPOINT = "the weights", "the bytes of state", "the norm", "state dicts"
