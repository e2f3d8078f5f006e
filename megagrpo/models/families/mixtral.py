"""Mixtral (`model_type: mixtral`): every layer a mixture of experts, no shared expert."""

from typing import Any

from megagrpo.config.expert_fields import routing_problems
from megagrpo.models.decoder_rules import ModelSizes, block_rules
from megagrpo.models.expert_rules import ExpertNames, expert_rules
from megagrpo.models.families.mistral import Mistral
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.rules import ParameterRule


class Mixtral(Mistral):
    """Mistral whose MLPs are experts behind a top-k router with normalised weights.

    `router_aux_loss_coef` and `output_router_logits` say how pretraining balanced the experts, and
    `router_jitter_noise` is not zero in pretraining alone: none of them changes the log-probs.
    """

    defaults = {  # noqa: RUF012 (a constant table of the class)
        "num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    extra_values = {"router_jitter_noise": (0, 0.0)}  # noqa: RUF012 (a constant table of the class)
    read_fields = frozenset(
        {"num_experts", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"}
        | {"output_router_logits"}
    )

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return a bad window, and routing that has no gradient."""
        return super().check(raw) + routing_problems(self.defaults | raw | {"norm_topk_prob": True})

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return Mistral's fields and those of the experts."""
        return super().transformer_config_fields(hf) | {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.ffn_hidden_size,
            "moe_router_topk": hf.raw["num_experts_per_tok"],
            "moe_router_pre_softmax": False,
            "moe_router_load_balancing_type": "none",  # ours is in models/experts.py
        }

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules around a router and experts."""
        names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
        return block_rules(hf, expert_rules(hf, ModelSizes(hf).ffn, names))


FAMILIES.register("mixtral")(Mixtral())
