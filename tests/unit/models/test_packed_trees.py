"""Attention over packed trees equals dense attention of each sequence alone."""

from types import SimpleNamespace

import pytest
import torch

from megagrpo.models.attention import PackedTreeAttention
from megagrpo.models.packed import PackedTrees, Tree
from megagrpo.parallel.token_shard import TokenShard

HEADS, GROUPS, DIM = 4, 2, 8


def naive(query, key, value, visible):
    """softmax(q k / sqrt(d)) v over the visible positions, one query at a time."""
    rows = []
    for position, seen in enumerate(visible):
        keys, values = (part[seen].repeat_interleave(HEADS // GROUPS, dim=1) for part in (key, value))
        weights = (torch.einsum("hd,shd->hs", query[position], keys) / DIM**0.5).softmax(-1)
        rows.append(torch.einsum("hs,shd->hd", weights, values).flatten())
    return torch.stack(rows)


def settings(window=None):
    """What attention reads of Megatron's configuration, which counts the tokens before a row's own."""
    size = None if window is None else (window - 1, 0)
    return SimpleNamespace(
        kv_channels=DIM, params_dtype=torch.float64, window_size=size, window_attn_skip_freq=None
    )


def visible_positions(trees, window=None):
    """For each packed token the positions it may see, written down from the definition: the last `window`."""
    visible, start = [], 0
    for tree in trees:
        prompt = list(range(start, start + tree.prompt))
        visible += [prompt[: i + 1] for i in range(tree.prompt)]
        start += tree.prompt
        for branch in tree.branches:
            visible += [prompt + list(range(start, start + i + 1)) for i in range(branch)]
            start += branch
    return [seen[-window:] for seen in visible] if window else visible


@pytest.mark.parametrize("window", [None, 1, 4, 60, 299])
@pytest.mark.parametrize(
    "trees",
    [
        [Tree(3, (2, 0, 4))],
        [Tree(5, ()), Tree(1, (1,)), Tree(2, (3, 3))],
        # beyond the dense limit, and chains
        [Tree(40, (130, 120)), Tree(7, (2, 9)), Tree(300, ()), Tree(10, (290,))],
        [Tree(4, (3,)), Tree(20, (30,)), Tree(4, (4,)), Tree(100, (60, 50))],  # several padded batches
    ],
)
def test_tree_attention_equals_naive_attention_with_gradients(trees, window):
    torch.manual_seed(0)
    packed = PackedTrees(trees=tuple(trees))
    total = sum(tree.tokens for tree in trees)
    attention = PackedTreeAttention(settings(window), 1, None, "self")
    query = torch.randn(total, 1, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(total, 1, GROUPS, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    output = attention(query, key, value, packed_seq_params=packed)
    expected = naive(query[:, 0], key[:, 0], value[:, 0], visible_positions(trees, window))
    torch.testing.assert_close(output[:, 0], expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(expected)
    for got, want in zip(
        torch.autograd.grad(output[:, 0], (query, key, value), upstream),
        torch.autograd.grad(expected, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("cp", "window"), [(2, None), (3, None), (2, 3), (3, 70)])
@pytest.mark.parametrize(
    "trees",
    [[Tree(3, (2, 0, 4)), Tree(3, ())], [Tree(40, (130, 121)), Tree(7, (2, 9)), Tree(300, ()), Tree(99, ())]],
)
def test_context_parallel_ranks_attend_their_rows_of_the_whole(monkeypatch, trees, cp, window):
    """Each rank's queries against all keys (gathered here by hand) give its rows of the attention on one
    rank.
    """
    torch.manual_seed(0)
    total = sum(tree.tokens for tree in trees)
    query = torch.randn(total, 1, HEADS, DIM, dtype=torch.float64)
    key, value = (torch.randn(total, 1, GROUPS, DIM, dtype=torch.float64) for _ in range(2))
    attention = PackedTreeAttention(settings(window), 1, None, "self")
    whole = attention(query, key, value, packed_seq_params=PackedTrees(trees=tuple(trees)))
    monkeypatch.setattr(
        "megagrpo.models.attention.all_gather_tokens",
        lambda local, group: torch.cat([key, value], dim=-1)[:, 0],
    )
    for rank in range(cp):
        shard = TokenShard((total,), cp, rank)
        mine = shard.packed_positions()
        output = attention(
            query[mine],
            key[mine],
            value[mine],
            packed_seq_params=PackedTrees(trees=tuple(trees), shard=shard),
        )
        torch.testing.assert_close(output, whole[mine], rtol=1e-10, atol=1e-12)
