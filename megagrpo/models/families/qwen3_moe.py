"""Qwen3 mixture-of-experts models (`model_type: qwen3_moe`): every layer sparse, no shared expert."""

from typing import Any

from megagrpo.models.decoder_rules import ModelSizes, block_rules
from megagrpo.models.families.qwen3 import Qwen3, head_norm_rules
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.hf_config import count_experts
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
    read_fields = frozenset(
        {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
        | {"router_aux_loss_coef", "output_router_logits"}
    )

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return missing sizes, and routing that has no gradient."""
        problems = [
            f"{name}: missing" for name in ("num_experts_per_tok", "moe_intermediate_size") if name not in raw
        ]
        experts, chosen = count_experts(raw), raw.get("num_experts_per_tok", 1)
        if experts is None:
            problems.append("num_experts: missing")
        elif not 1 <= chosen <= experts:
            problems.append(f"num_experts_per_tok: {chosen}: must be 1 to num_experts = {experts}")
        if chosen == 1 and raw.get("norm_topk_prob", False):
            problems.append(
                "norm_topk_prob: True: with num_experts_per_tok 1 every weight is 1 and the "
                "router has no gradient"
            )
        return problems

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
        sizes, layer, target = ModelSizes(hf), "model.layers.{layer}.mlp.", "decoder.layers.{layer}.mlp."
        ffn = Size(hf.raw["moe_intermediate_size"], "moe_intermediate_size")
        expert, local = f"{layer}experts.{{expert}}.", f"{target}experts.local_experts.{{expert}}."
        router = ParameterRule(
            f"{target}router.weight", (f"{layer}gate.weight",), "replicated", ((sizes.experts, sizes.hidden),)
        )
        fc1 = ParameterRule(
            f"{local}linear_fc1.weight",
            (f"{expert}gate_proj.weight", f"{expert}up_proj.weight"),
            "gate_up",
            ((ffn, sizes.hidden),) * 2,
            engine=f"{layer}experts.w13_weight",
            is_quantized=True,
            num_experts=sizes.experts,
            stacked=f"{layer}experts.gate_up_proj",
        )
        fc2 = ParameterRule(
            f"{local}linear_fc2.weight",
            (f"{expert}down_proj.weight",),
            "row",
            ((sizes.hidden, ffn),),
            engine=f"{layer}experts.w2_weight",
            is_quantized=True,
            num_experts=sizes.experts,
            stacked=f"{layer}experts.down_proj",
        )
        return [*block_rules(hf, [router, fc1, fc2]), *head_norm_rules(hf)]


FAMILIES.register("qwen3_moe")(Qwen3Moe())
