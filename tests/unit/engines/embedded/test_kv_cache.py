"""Tests of megagrpo.engines.embedded.kv_cache: attention over shared prompts equals dense causal attention
in float64.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megagrpo.engines.embedded.kv_cache import DecodeStep, KVStore, PrefillStep, RolloutCache, RowLayout

SCALE = 0.3


def states(heads, tokens, seed):
    return torch.randn(heads, tokens, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_attention(query, keys, values):
    """Causal attention [Hq, T, D] of one sequence; its queries are the last T positions of the keys [Hkv,
    S, D].
    """
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query @ keys.transpose(1, 2) * SCALE
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + keys.shape[1] - query.shape[1])
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("query_heads", [2, 6])
def test_rows_attend_to_their_own_prompt_and_their_own_tokens(query_heads):
    # 70 tokens take a second block of storage
    lengths, prompt_slots, rows = [3, 1, 70], np.array([2, 0, 2, 1, 2]), 5
    cache = RolloutCache()
    bounds = [0, *np.cumsum(lengths).tolist()]
    query, key, value = (states(heads, bounds[-1], seed) for seed, heads in enumerate((query_heads, 2, 2)))
    cache.step = PrefillStep(bounds, [0, 1, 2], (3, 70))
    output = cache.attend(0, query, key, value, SCALE)
    for start, end in pairwise(bounds):
        torch.testing.assert_close(
            output[start:end], dense_attention(query[:, start:end], key[:, start:end], value[:, start:end])
        )

    layout = RowLayout.build(prompt_slots, np.array(lengths), "cpu")
    own_keys, own_values = [[] for _ in range(rows)], [[] for _ in range(rows)]
    for step in range(67):
        query, key, value = (
            states(heads, rows, 100 + 3 * step + seed) for seed, heads in enumerate((query_heads, 2, 2))
        )
        cache.step = DecodeStep.build(layout, np.full(rows, step), rows)
        output = cache.attend(0, query, key, value, SCALE)
        for row in range(rows):
            own_keys[row].append(key[:, row])
            own_values[row].append(value[:, row])
        if step in (0, 1, 66):
            for row, slot in enumerate(prompt_slots):
                prompt = slice(bounds[slot], bounds[slot + 1])
                prompt_key, prompt_value = (
                    states(2, bounds[-1], 1)[:, prompt],
                    states(2, bounds[-1], 2)[:, prompt],
                )
                keys = torch.cat([prompt_key, torch.stack(own_keys[row], 1)], 1)
                values = torch.cat([prompt_value, torch.stack(own_values[row], 1)], 1)
                expected = dense_attention(query[:, row : row + 1], keys, values)[0]
                # the mask and the softmax are float32
                torch.testing.assert_close(output[row], expected, atol=1e-6, rtol=1e-6)


def test_the_grid_holds_every_row_once_and_zeros_elsewhere():
    layout = RowLayout.build(np.array([1, 0, 1, 1]), np.array([2, 5]), "cpu")
    rows = states(4, 3, 0).transpose(0, 1).reshape(4, 3, 1, 8)
    grid = layout.to_grid(rows)
    assert grid.shape == (2, 3, 3, 8)
    assert torch.equal(layout.to_rows(grid), rows)
    assert grid[0, :, 1:].abs().sum() == 0
    assert layout.prompt_mask.tolist() == [
        [False] * 5,
        [False, False, True, True, True],
        [False] * 5,
        [False] * 5,
    ]


def test_storage_grows_in_both_directions_and_keeps_what_it_holds():
    store, like = KVStore(), torch.zeros(2, 1, 8)
    keys, values = store.reserve(0, like, 1, 10)
    keys[0, :, :10], values[0, :, :10] = 1.0, 2.0
    keys, values = store.reserve(0, like, 4, 65)
    assert keys.shape == (4, 2, 128, 8)
    assert (keys[0, :, :10] == 1).all() and (values[0, :, :10] == 2).all()
    assert keys.sum() == 160 and values.sum() == 320
    assert store.reserve(0, like, 2, 100)[0] is keys
    store.move(0, 3, 10)
    assert torch.equal(keys[3], keys[0]) and torch.equal(values[3], values[0])
