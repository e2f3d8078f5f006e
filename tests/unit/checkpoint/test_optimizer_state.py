"""Who writes which parameter, and which pieces of its optimizer state lie where."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.checkpoint.optimizer_state import assign_owners, shard_overlap

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 8))
def test_no_rank_has_more_than_a_fair_share_and_one_parameter(sizes, num_ranks):
    """The bound of list scheduling (Graham 1966): the last parameter of the fullest rank was put there
    when it was the emptiest.
    """
    owners = assign_owners(sizes, num_ranks)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(num_ranks)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes)


@given(SIZES, st.integers(1, 6), st.integers(0, 100))
def test_the_pieces_of_all_ranks_are_the_parameter(sizes, num_ranks, bucket_start):
    """A flat bucket is cut in equal parts by torch.chunk; a parameter is put together from the parts at
    the places given.
    """
    padded = -(-sum(sizes) // num_ranks) * num_ranks
    bucket = torch.arange(padded)
    start = 0
    for size in sizes:
        place = (bucket_start + start, bucket_start + start + size)
        pieces = []
        for rank, part in enumerate(bucket.chunk(num_ranks)):
            first, last = shard_overlap(*place, bucket_start, padded, rank, num_ranks)
            offset = start + first - rank * (padded // num_ranks)
            pieces.append(part[offset : offset + last - first] if last > first else part[:0])
        assert torch.equal(torch.cat(pieces), bucket[start : start + size])
        start += size
