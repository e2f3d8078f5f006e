"""The mixture-of-experts layer: Megatron's, with a router that computes what Hugging Face does and is
independent of the batch.

Differences from Megatron-core's TopKRouter:

* Choice and weights of the experts follow transformers to the letter, also in bfloat16 (soft-max, top-k and
  normalisation in float32).
* Loads and the balance loss count sequences, not rows of a micro-batch: padding never counts, and a prompt
  that several completions share counts once for each. So both are the same in every layout, packing and
  micro-batch split. Megatron's `aux_loss` is a function of the micro-batch, and NaN for one of padding alone.

Routing is dropless: an expert takes all tokens that choose it, so a token's output does not depend on the
other tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megagrpo.models.routing import RoutedSequences


class SequenceRouter(TopKRouter):
    """Top-k router with loads and a balance loss for each sequence.

    Attributes:
        sequences: of the micro-batch that is being computed; `MoETransformerLayer` sets it, in a
            recomputation too.
        load: float64 [E] on the device, tokens per expert among those that this rank routed since the last
            `take`.
        balance_loss: float64 [] on the device, this rank's part of the balance loss since then, coefficient
            included.
    """

    def __init__(self, config: Any, pg_collection: Any = None):
        super().__init__(config=config, pg_collection=pg_collection)
        self.sequences: RoutedSequences | None = None
        self.reset()

    def reset(self) -> None:
        """Reset the loads."""
        device = self.weight.device
        self.load = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        self.balance_loss = torch.zeros((), dtype=torch.float64, device=device)

    def routing(self, logits: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts as `Qwen3MoeTopKRouter` does (transformers), with sigmoid scores as
        `DeepseekV3TopkRouter`: a bias joins the choice but not the weights, and some groups alone take part.

        Args:
            logits: [T, 1, E] of this rank's tokens.
            padding_mask: not used; the sequences say what padding is.

        Returns:
            (weights [T, E], zero where not chosen; chosen, bool [T, E]).
        """
        logits = logits.view(-1, self.num_experts)
        if self.score_function == "sigmoid":
            scores = logits.float().sigmoid()
            experts = self._choose_biased(scores.detach())
            weights = scores.gather(1, experts)
            scores = scores / scores.sum(dim=-1, keepdim=True)  # as the balance loss takes them
        else:
            scores = logits.softmax(dim=-1, dtype=torch.float32)
            weights, experts = scores.topk(self.topk, dim=-1)
        if not self.config.moe_router_pre_softmax:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.config.moe_router_topk_scaling_factor:
            weights = weights * self.config.moe_router_topk_scaling_factor
        probs = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        # once for each micro-batch, with activation recompute too
        if self.training and torch.is_grad_enabled():
            probs = self._balance(scores, chosen, probs)
        return probs, chosen

    def _choose_biased(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the experts [T, k] with the largest biased scores [T, E], of the groups whose two largest
        have the largest sums.
        """
        biased = scores if self.expert_bias is None else scores + self.expert_bias
        groups = self.config.moe_router_num_groups
        if groups and groups > 1:
            by_group = biased.view(len(biased), groups, -1)
            best = by_group.topk(2, dim=-1)[0].sum(-1).topk(self.config.moe_router_group_topk, dim=-1)[1]
            kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, True)
            biased = by_group.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return biased.topk(self.topk, dim=-1)[1]

    def _balance(self, scores: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Count loads and attach the balance loss to `probs`: its gradient joins the backward pass there.

        DeepSeek-V3 (arXiv 2412.19437), Eq. 17 to 20, for each sequence, averaged over the sequences of the
        optimizer update: coef * sum_i f_i P_i with f_i = E / (K L) * count_i and P_i = mean over the L tokens
        of the router's probability of expert i. It is 1 * coef where the load is even. The layers' losses are
        added.
        """
        sequences = self.sequences
        segments = sequences.local_segment_ids(len(chosen), self.tp_group)
        counts = sequences.sums(segments, chosen.to(torch.float64))
        self.load += counts.sum(0)
        coefficient = self.config.moe_aux_loss_coeff * sequences.weight
        if not coefficient:
            return probs
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        lengths = sequences.lengths[:, None]
        frequencies = counts * self.num_experts / (self.topk * lengths)
        probabilities = sequences.sums(segments, scores) / lengths
        loss = coefficient * (frequencies * probabilities).sum()
        self.balance_loss += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, loss)


class PaddedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """All-gather dispatch for ranks that hold different numbers of tokens.

    Megatron gathers equal parts and refuses variable lengths. Here each part is padded to the longest with
    rows that choose no expert.
    """

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad [T, 1, H], [T, E] and [T, E] to the most tokens of any rank. Collective over the expert
        tensor and expert parallel ranks.
        """
        self.unpadded_shape = hidden_states.shape
        most = torch.tensor(len(routing_map), device=routing_map.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        padding = (0, 0, 0, int(most) - len(routing_map))
        hidden_states = torch.nn.functional.pad(hidden_states.view(-1, self.unpadded_shape[-1]), padding)
        return super().dispatch_preprocess(
            hidden_states,
            torch.nn.functional.pad(routing_map, padding),
            torch.nn.functional.pad(probs, padding),
        )

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Drop the padding rows."""
        tokens = self.unpadded_shape[:-1].numel()
        return super().combine_postprocess(hidden_states)[:tokens].view(self.unpadded_shape)


class MoETransformerLayer(TransformerLayer):
    """Tells its router which sequences the micro-batch holds.

    The layer is the innermost place that knows: with activation recompute the backward pass calls it again
    with the same input.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        experts = self.mlp
        if self.config.moe_token_dispatcher_type == "allgather":
            experts.token_dispatcher = PaddedAllGatherDispatcher(
                experts.num_local_experts,
                experts.local_expert_indices,
                config=self.config,
                pg_collection=get_default_pg_collection(),
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        self.mlp.router.sequences = kwargs["packed_seq_params"].routed
        return super().forward(*args, **kwargs)


def use_sequence_routing(layer: ModuleSpec) -> None:
    """Put the classes of this file into the spec of a mixture-of-experts layer."""
    layer.module = MoETransformerLayer
    layer.submodules.mlp.submodules.router = SequenceRouter
