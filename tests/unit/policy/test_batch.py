"""A micro-batch's rows: the log-prob of token t comes from position t - 1; prompts and padding have no rows."""

import numpy as np
import torch

from megagrpo.policy.batch import MicroBatchBuilder, TrainSample
from megagrpo.policy.microbatches import TreePlan


def sample(group, place, prompt, tokens):
    return TrainSample((group, place), tuple(prompt), np.array(tokens), np.full(len(tokens), -0.5, np.float32))


def build(trees, samples, alignment=1):
    builder = MicroBatchBuilder(torch.device("cpu"), alignment, pad_token_id=99, use_te=False)
    return builder.build(tuple(TreePlan(tuple(tree), 0, 0) for tree in trees), samples.__getitem__)


def test_row_of_a_token_is_the_position_before_it():
    """prompt 10 11 12, completion 20 21 22: inputs 10 11 12 20 21; 22 is predicted and never read."""
    batch = build([[0]], [sample(0, 0, [10, 11, 12], [20, 21, 22])])
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21]]
    assert batch.row_index.tolist() == [2, 3, 4]
    assert batch.targets.tolist() == [20, 21, 22]


def test_completions_of_one_prompt_share_it_and_its_last_position():
    samples = [sample(0, 0, [10, 11], [20, 21]), sample(0, 1, [10, 11], [30]), sample(0, 2, [10, 11], [40, 41, 42])]
    batch = build([[0, 1, 2]], samples)
    assert batch.tokens.tolist() == [[10, 11, 20, 40, 41]]
    assert batch.row_index.tolist() == [1, 2, 1, 1, 3, 4]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.packed.rotary_positions.tolist() == [0, 1, 2, 2, 3]


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
