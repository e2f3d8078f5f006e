"""Core attention of the local layer spec: torch SDPA over packed trees (see packed.py)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from megagrpo.models.packed import PackedTrees, QueryRun
from megagrpo.parallel.token_shard import all_gather_tokens


class PackedTreeAttention(MegatronModule):
    """`core_attention` without Transformer Engine: grouped-query attention of each tree, nothing across
    trees.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ):
        super().__init__(config=config)
        self.cp_group = pg_collection.cp if pg_collection else None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        # Megatron counts the tokens before a row's own
        is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] + 1 if is_windowed else None

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
        """Attend. Collective over the context parallel group: keys and values of all ranks are gathered in
        one all-gather.

        Args:
            query: [T / cp, 1, heads, head_dim]; key, value: [T / cp, 1, groups, head_dim], all of this tp and
                cp rank. Of latent attention they come without the 1, and values may be shorter than keys.
            attention_mask: not used; the trees say who sees whom.
            packed_seq_params: the layout of the T tokens.

        Returns:
            [T / cp, 1, heads * head_dim of the values].
        """
        query, key, value = (part.flatten(0, -3) for part in (query, key, value))
        keys_values = all_gather_tokens(torch.cat([key, value], dim=-1), self.cp_group)
        key, value = keys_values.split([key.shape[-1], value.shape[-1]], dim=-1)
        pieces = [
            self._attend(
                query[batch.rows], key[batch.keys], value[batch.keys], batch.mask_within(self.window)
            )[batch.valid]
            for batch in packed_seq_params.dense_batches
        ]
        pieces += [self._attend_run(query, key, value, run) for run in packed_seq_params.runs]
        output = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return output[packed_seq_params.inverse_order].flatten(1).unsqueeze(1)

    def _attend_run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: QueryRun
    ) -> torch.Tensor:
        keys, values = (torch.cat([part[run.prompt], part[run.branch]]) for part in (key, value))
        mask = run.mask_within(self.window, query.device)
        return self._attend(query[run.rows][None], keys[None], values[None], mask)[0]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[n, Q, heads, d] x [n, S, groups, d] -> [n, Q, heads, d]; causal where there is no mask."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output.transpose(1, 2)
