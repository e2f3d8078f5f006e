"""Core attention of the local layer spec: torch SDPA over packed trees (see packed.py)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from megagrpo.models.packed import PackedTrees, Tree


class PackedTreeAttention(MegatronModule):
    """`core_attention` without Transformer Engine: grouped-query attention of each tree, nothing across trees."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, softmax_scale: float | None = None, **unused: Any
    ):
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: PackedTrees,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, 1, heads, head_dim]; key, value: [T, 1, groups, head_dim], all of this tp rank.
            attention_mask: not used; the trees say who sees whom.
            packed_seq_params: the layout of the T tokens.

        Returns:
            [T, 1, heads * head_dim].
        """
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        pieces = [self._attend(query[b.index], key[b.index], value[b.index], mask=b.mask)[b.valid] for b in packed_seq_params.dense_batches]
        for start, tree in packed_seq_params.large_trees:
            rows = slice(start, start + tree.tokens)
            pieces += self._attend_tree(query[rows], key[rows], value[rows], tree)
        output = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return output[packed_seq_params.inverse_order].flatten(1).unsqueeze(1)

    def _attend_tree(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree) -> list[torch.Tensor]:
        if tree.is_chain:
            return [self._attend(query[None], key[None], value[None])[0]]
        prompt = slice(0, tree.prompt)
        pieces = [self._attend(query[None, prompt], key[None, prompt], value[None, prompt])[0]] if tree.prompt else []
        start = tree.prompt
        for branch in (branch for branch in tree.branches if branch):
            own = slice(start, start + branch)
            keys, values = (torch.cat([part[prompt], part[own]])[None] for part in (key, value))
            mask = torch.ones(branch, tree.prompt + branch, dtype=torch.bool, device=query.device).tril(tree.prompt)
            pieces.append(self._attend(query[None, own], keys, values, mask=mask)[0])
            start += branch
        return pieces

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[n, S, heads, d] x [n, S', groups, d] -> [n, S, heads, d]; causal where no mask is given."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output.transpose(1, 2)
