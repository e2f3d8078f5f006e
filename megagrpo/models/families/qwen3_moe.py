"""Qwen3 mixture-of-experts models (`model_type: qwen3_moe`): every layer sparse, no shared expert."""

from typing import Any

from megagrpo.config.expert_fields import routing_problems
from megagrpo.models.decoder_rules import block_rules
from megagrpo.models.expert_rules import expert_rules
from megagrpo.models.families.qwen3 import Qwen3, head_norm_rules
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.rules import ParameterRule, Size


class Qwen3Moe(Qwen3):
    """Qwen3 whose MLPs are experts behind a top-k router.

    `router_aux_loss_coef` and `output_router_logits` say how pretraining balanced the experts. They do not
    change the log-probs and are not
    used: `update.router_aux_loss_coef` says what this run does.
    """

    defaults = {"num_key_value_heads": 4}  # noqa: RUF012 (a constant table of the class)
    # Layers with a dense MLP among the sparse ones would need other rules and another layer spec.
    extra_values = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}  # noqa: RUF012 (a constant table of the class)
    example_fields = {  # noqa: RUF012 (a constant table of the class)
        "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    read_fields = frozenset(
        {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
        | {"router_aux_loss_coef", "output_router_logits"}
    )

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return missing sizes, and routing that has no gradient."""
        missing = [] if "moe_intermediate_size" in raw else ["moe_intermediate_size: missing"]
        return missing + routing_problems(raw)

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return Qwen3's fields and those of the experts.

        Megatron's `moe_router_pre_softmax` is `norm_topk_prob` false: soft-max over all experts, the chosen
        ones not normalised. It is what transformers takes where the field is missing.
        """
        return super().transformer_config_fields(hf) | {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.raw["moe_intermediate_size"],
            "moe_router_topk": hf.raw["num_experts_per_tok"],
            "moe_router_pre_softmax": not hf.raw.get("norm_topk_prob", False),
            "moe_router_load_balancing_type": "none",  # ours is in models/experts.py
        }

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return Qwen3's rules, with the router and the experts in place of its MLP."""
        ffn = Size(hf.raw["moe_intermediate_size"], "moe_intermediate_size")
        return [*block_rules(hf, expert_rules(hf, ffn)), *head_norm_rules(hf)]


FAMILIES.register("qwen3_moe")(Qwen3Moe())
