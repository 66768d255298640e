"""The layout of module 5's buffers that the rule gives, for the expected values of modules 5 to 11."""

import math


def compute_layout(numels, bucket_numel, dp_size, pad_for_busbw=False):
    """Return the layout that the rule gives."""
    multiple = math.lcm(dp_size, 128, 65536) if pad_for_busbw else math.lcm(dp_size, 128)
    param_ranges, bucket_of, bucket_ranges, position, bucket_start = [], [], [], 0, 0
    for numel in numels:
        if bucket_start is None:
            position = -(-position // multiple) * multiple
            bucket_ranges[-1][1] = bucket_start = position
        position = -(-position // 64) * 64
        param_ranges.append([position, position + numel])
        position += numel
        if len(bucket_ranges) == 0 or bucket_ranges[-1][1] is not None:
            bucket_ranges.append([bucket_start, None])
        bucket_of.append(len(bucket_ranges) - 1)
        if bucket_numel is not None and position - bucket_start >= bucket_numel:
            bucket_start = None
    if numels:
        position = -(-position // multiple) * multiple
        bucket_ranges[-1][1] = position
    return {"param_ranges": param_ranges, "bucket_of": bucket_of, "bucket_ranges": bucket_ranges, "numel": position}
