"""Tokens are counted by sequence: prompts once for each completion that shares them, padding never."""

import torch

from megagrpo.models.routing import route_sequences
from megagrpo.parallel.token_shard import TokenShard

CPU = torch.device("cpu")
TREES = [(3, (2, 0, 1)), (2, (4,)), (4, ())]  # two trees and padding: 16 tokens


def test_a_shared_prompt_counts_once_for_each_completion_and_padding_never():
    sequences = route_sequences(TREES, TokenShard((16,)), 4, CPU)
    assert sequences.sums(sequences.segment_ids, torch.ones(16, 1))[:, 0].tolist() == [5, 3, 4, 6]
    assert sequences.lengths.tolist() == [5, 3, 4, 6]
    assert sequences.weight == 0.25


def test_sums_are_the_same_with_copied_prompts():
    values = torch.arange(1.0, 7.0)[:, None]
    shared = route_sequences([(3, (2, 1))], TokenShard((6,)), 1, CPU)
    copied = route_sequences([(3, (2,)), (3, (1,))], TokenShard((9,)), 1, CPU)
    copies = torch.cat([values[:5], values[:3], values[5:]])
    assert torch.equal(shared.sums(shared.segment_ids, values), copied.sums(copied.segment_ids, copies))


def test_the_parts_of_context_parallel_ranks_add_up():
    values = torch.randn(16, 3, dtype=torch.float64)
    whole = route_sequences(TREES, TokenShard((16,)), 1, CPU)
    shards = [TokenShard((16,), 2, rank) for rank in range(2)]
    parts = [route_sequences(TREES, shard, 1, CPU) for shard in shards]
    total = sum(
        part.sums(part.segment_ids, values[shard.packed_positions()])
        for part, shard in zip(parts, shards, strict=True)
    )
    torch.testing.assert_close(total, whole.sums(whole.segment_ids, values))


def test_padding_behind_each_sequence_is_not_counted():
    """Transformer Engine's context parallelism: one stretch for each tree, padded to a multiple of 2 * cp."""
    sequences = route_sequences([(3, (2,)), (1, (1,))], TokenShard((8, 4)), 1, CPU)
    assert sequences.sums(sequences.segment_ids, torch.ones(12, 1))[:, 0].tolist() == [5, 2]


def test_a_micro_batch_of_padding_alone_has_no_sequences():
    sequences = route_sequences([(4, ())], TokenShard((4,)), 1, CPU)
    assert sequences.sums(sequences.segment_ids, torch.ones(4, 2)).shape == (0, 2)
