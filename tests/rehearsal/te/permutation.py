"""Token permutation of experts: Transformer Engine's Triton kernels, which no CPU runs, as torch indexing.

Megatron-core binds these functions when it is imported; the maps that they return are opaque to it.
"""

from typing import Any

import torch


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `inp` [T, H] by expert: (rows, their tokens [R] and experts [R])."""
    assert map_type == "mask"
    experts, tokens = routing_map.bool().t().nonzero(as_tuple=True)
    return inp[tokens], torch.stack((tokens, experts))


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_permute`, with the probability of each row between the two results."""
    rows, row_map = moe_permute(inp, routing_map)
    return rows, probs[row_map[0], row_map[1]], row_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: Any = None,
) -> torch.Tensor:
    """Sum of each token's rows, weighted where there are probabilities."""
    assert map_type == "mask" and probs is None
    tokens, experts = row_id_map
    if merging_probs is not None:
        inp = inp * merging_probs[tokens, experts][:, None]
    return inp.new_zeros(restore_shape).index_add(0, tokens, inp)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """The chunks of `inp` in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks of `inp` and of `probs` in another order."""
    return tuple(moe_sort_chunks_by_index(each, split_sizes, sorted_index) for each in (inp, probs))


FUNCTIONS = (
    moe_permute,
    moe_permute_with_probs,
    moe_unpermute,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)
