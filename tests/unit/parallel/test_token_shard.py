"""Context parallel ranks share the tokens out without loss, and both orders of positions agree."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.parallel.token_shard import TokenShard, sum_following


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_token_is_on_one_rank(cp, sizes):
    stretches = tuple(2 * cp * size for size in sizes)
    shards = [TokenShard(stretches, cp, rank) for rank in range(cp)]
    held = torch.cat([shard.packed_positions() for shard in shards])
    assert sorted(held.tolist()) == list(range(sum(stretches)))
    for shard in shards:
        packed, local = shard.packed_positions(), shard.local_positions()
        assert len(packed) == sum(stretches) // cp
        assert torch.equal(local[packed], torch.arange(len(packed)))
        assert int((local >= 0).sum()) == len(packed)


def test_chunks_are_dealt_as_megatron_deals_them():
    # megatron.core.utils.get_batch_on_this_cp_rank: rank r takes chunks r and 2 * cp - r - 1.
    assert TokenShard((16,), 2, 0).intervals == [(0, 4), (12, 16)]
    assert TokenShard((16,), 2, 1).intervals == [(4, 8), (8, 12)]
    assert TokenShard((8, 4), 2, 0).intervals == [(0, 2), (6, 8), (8, 9), (11, 12)]


@given(st.integers(2, 4), st.integers(1, 20))
def test_causal_attention_costs_the_same_on_every_rank(cp, size):
    costs = [int((TokenShard((2 * cp * size,), cp, rank).packed_positions() + 1).sum()) for rank in range(cp)]
    assert len(set(costs)) == 1


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_chunks_order_the_tokens_of_a_stretch_over_all_ranks(cp, sizes):
    stretches = tuple(2 * cp * size for size in sizes)
    starts = [sum(stretches[:k]) for k in range(len(stretches))]
    for rank in range(cp):
        shard = TokenShard(stretches, cp, rank)
        for position, chunk in zip(shard.packed_positions().tolist(), shard.chunks().tolist(), strict=True):
            stretch = max(k for k, start in enumerate(starts) if start <= position)
            expected = (position - starts[stretch]) // sizes[stretch] if cp > 1 else 0
            assert chunk == expected


@given(st.lists(st.lists(st.integers(-8, 8), min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_row_sums_up_itself_and_all_later_rows_of_its_sequence(sequences):
    """Over several ranks: tests/distributed/test_token_advantages.py."""
    values = torch.tensor([value / 8 for sequence in sequences for value in sequence])
    ids = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(list(map(len, sequences))))
    group = SimpleNamespace(size=lambda: 1)
    sums = sum_following(values, ids, torch.zeros_like(ids), len(sequences), group)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [sum(sequence[k:]) / 8 for sequence in sequences for k in range(len(sequence))]


def test_one_rank_holds_everything_whatever_divides():
    assert TokenShard((7, 3)).packed_positions().tolist() == list(range(10))
