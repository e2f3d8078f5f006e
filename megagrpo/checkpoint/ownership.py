"""Which of the ranks that hold the same parameters writes which of them. Pure arithmetic, so all of them
decide alike.
"""

from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank that writes each parameter: the largest ones first, each to the rank with the fewest
    elements so far.
    """
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def shard_overlap(
    start: int, stop: int, bucket_start: int, bucket_numel: int, rank: int, num_ranks: int
) -> tuple[int, int]:
    """Return the part [first, last) of a parameter whose optimizer state `rank` holds, counted from the
    parameter's start.

    Args:
        start: first element of the parameter in its buffer.
        stop: the element after its last.
        bucket_start: first element of its bucket in the buffer.
        bucket_numel: elements of the bucket, which the ranks share in equal consecutive parts.
        rank: the rank asked for.
        num_ranks: ranks that share the bucket.
    """
    part = bucket_numel // num_ranks
    first = max(start, bucket_start + rank * part)
    last = min(stop, bucket_start + (rank + 1) * part)
    return (first - start, max(first, last) - start)
