"""A micro-batch's rows: the log-prob of token t comes from position t - 1; prompts and padding have no
rows.
"""

from dataclasses import replace

import numpy as np
import torch

from megagrpo.policy.batch import MicroBatchBuilder, TrainSample
from megagrpo.policy.microbatches import PackingRules, TreePlan


def sample(group, place, prompt, tokens):
    return TrainSample(
        (group, place), tuple(prompt), np.array(tokens), np.full(len(tokens), -0.5, np.float32)
    )


def build(trees, samples, alignment=1, sequence_alignment=1, use_te=False, cp=1, cp_rank=0):
    rules = PackingRules(1000, alignment, sequence_alignment=sequence_alignment)
    builder = MicroBatchBuilder(torch.device("cpu"), rules, 99, use_te, cp, cp_rank)
    return builder.build(tuple(TreePlan(tuple(tree), 0, 0) for tree in trees), samples.__getitem__)


def test_row_of_a_token_is_the_position_before_it():
    """prompt 10 11 12, completion 20 21 22: inputs 10 11 12 20 21; 22 is predicted and never read."""
    batch = build([[0]], [sample(0, 0, [10, 11, 12], [20, 21, 22])])
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21]]
    assert batch.row_index.tolist() == [2, 3, 4]
    assert batch.targets.tolist() == [20, 21, 22]


def test_completions_of_one_prompt_share_it_and_its_last_position():
    samples = [
        sample(0, 0, [10, 11], [20, 21]),
        sample(0, 1, [10, 11], [30]),
        sample(0, 2, [10, 11], [40, 41, 42]),
    ]
    batch = build([[0, 1, 2]], samples)
    assert batch.tokens.tolist() == [[10, 11, 20, 40, 41]]
    assert batch.row_index.tolist() == [1, 2, 1, 1, 3, 4]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.packed.rotary_positions.tolist() == [0, 1, 2, 2, 3]


def test_tokens_that_are_not_trained_are_read_and_have_no_rows():
    """Of 20 21 22 23 the middle two were not sampled: they are inputs, and the last is predicted from 22."""
    partly = replace(sample(0, 0, [10, 11], [20, 21, 22, 23]), untrained=((1, 3),))
    batch = build([[0, 1]], [partly, sample(0, 1, [10, 11], [30, 31])])
    assert batch.tokens.tolist() == [[10, 11, 20, 21, 22, 30]]
    assert batch.row_index.tolist() == [1, 4, 1, 5]
    assert batch.targets.tolist() == [20, 23, 30, 31]
    assert batch.positions.tolist() == [0, 3, 0, 1]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1]


def test_padding_fills_the_alignment_and_has_no_rows():
    batch = build([[0]], [sample(0, 0, [10, 11], [20, 21])], alignment=4)
    assert batch.tokens.tolist() == [[10, 11, 20, 99]]
    assert batch.row_index.max() < 3


def test_an_empty_micro_batch_is_padding_alone():
    batch = build([], [], alignment=2)
    assert batch.tokens.tolist() == [[99, 99]] and batch.targets.numel() == 0 and batch.num_sequences == 0


def test_numbers_of_a_sequence_spread_over_its_rows():
    batch = build([[0], [1]], [sample(0, 0, [1], [2, 3]), sample(4, 1, [5], [6])])
    assert batch.per_row({(0, 0): 1.5, (4, 1): -2.0}).tolist() == [1.5, 1.5, -2.0]


def test_context_parallel_ranks_share_tokens_and_rows_out():
    """9 input tokens and 3 of padding in four chunks of 3: rank 0 holds 0 1 2 9 10 11, rank 1 holds 3 to
    8.
    """
    samples = [
        sample(0, 0, [10, 11], [20, 21, 22]),
        sample(0, 1, [10, 11], [30]),
        sample(1, 0, [50, 51, 52], [60, 61, 62]),
    ]
    whole = build([[0, 1], [2]], samples, alignment=12)
    parts = [build([[0, 1], [2]], samples, alignment=12, cp=2, cp_rank=rank) for rank in range(2)]
    assert whole.tokens[0, [0, 1, 2, 9, 10, 11]].tolist() == parts[0].tokens[0].tolist()
    assert whole.tokens[0, 3:9].tolist() == parts[1].tokens[0].tolist()
    assert parts[0].packed.rotary_positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert parts[1].packed.rotary_positions.tolist() == [3, 0, 1, 2, 3, 4]
    # The shared last prompt token (position 1) predicts the first token of both completions; both rows are
    # where it is.
    assert parts[0].targets.tolist() == [20, 21, 30] and parts[0].row_index.tolist() == [1, 2, 1]
    assert parts[1].targets.tolist() == [22, 60, 61, 62] and parts[1].row_index.tolist() == [0, 3, 4, 5]
    assert parts[1].positions.tolist() == [2, 0, 1, 2] and parts[1].sequence_ids.tolist() == [0, 2, 2, 2]
    assert all(part.keys == whole.keys for part in parts)


def test_transformer_engine_gets_every_sequence_padded_and_cut_by_itself():
    samples = [sample(0, 0, [10, 11], [20, 21, 22]), sample(1, 0, [50], [60])]
    parts = [
        build([[0], [1]], samples, alignment=12, sequence_alignment=4, use_te=True, cp=2, cp_rank=rank)
        for rank in range(2)
    ]
    # of whole sequences; the last is padding alone
    assert [part.packed.cu_seqlens_q.tolist() for part in parts] == [[0, 4, 8, 12]] * 2
    assert parts[0].tokens.tolist() == [[10, 21, 50, 99, 99, 99]]
    assert parts[1].tokens.tolist() == [[11, 20, 99, 99, 99, 99]]
    assert parts[0].targets.tolist() == [22, 60] and parts[0].row_index.tolist() == [1, 2]
    assert parts[1].targets.tolist() == [20, 21] and parts[1].row_index.tolist() == [0, 1]
