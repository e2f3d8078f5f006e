"""The part that families share whose router scores experts by a sigmoid, with a bias in the choice
(DeepSeek-V3, arXiv 2412.19437, Eq. 12 to 16), behind shared experts and some dense layers.
"""

from typing import Any

from megagrpo.config.expert_fields import routing_problems
from megagrpo.models.decoder_rules import ModelSizes, mlp_rules
from megagrpo.models.expert_rules import expert_rules
from megagrpo.models.family import HFConfig
from megagrpo.models.rules import ParameterRule, Size

# Fields that families with such a router read. Those that say how pretraining balanced the experts or shared
# them out do not change the log-probs.
READ_FIELDS = frozenset(
    {
        "n_routed_experts",
        "num_local_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    }
    | {"first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"}
    | {"num_nextn_predict_layers", "num_mtp_layers"}
    | {"router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size"}
)
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "moe_layer_freq": (1,),
}
EXAMPLE_FIELDS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
}  # fmt: skip


def biased_routing_problems(values: dict[str, Any]) -> list[str]:
    """Return what is missing of the routing or contradicts itself, one line each."""
    problems = [] if values.get("moe_intermediate_size") else ["moe_intermediate_size: missing"]
    problems += routing_problems(values)
    groups, kept = values["n_group"] or 1, values["topk_group"] or 1
    experts = values.get("n_routed_experts") or values.get("num_local_experts") or 0
    if experts % groups or (groups > 1 and experts // groups < 2):
        problems.append(
            f"n_group: {groups}: must divide n_routed_experts = {experts} into groups of 2 or more"
        )
    elif not 1 <= kept <= groups or kept * experts // groups < values.get("num_experts_per_tok", 1):
        problems.append(
            f"topk_group: {kept}: must be 1 to n_group = {groups}, with num_experts_per_tok experts in them"
        )
    if not values["n_shared_experts"]:
        problems.append(f"n_shared_experts: {values['n_shared_experts']!r}: must be 1 or more")
    return problems


def sparse_layers_of(hf: HFConfig) -> range:
    """Return the layers that are mixtures of experts: all but the first ones."""
    return range(min(hf.raw["first_k_dense_replace"] or 0, hf.num_layers), hf.num_layers)


def biased_routing_fields(hf: HFConfig) -> dict[str, Any]:
    """Return the TransformerConfig fields of the experts.

    `moe_router_pre_softmax` tells our router (models/experts.py) not to normalise the chosen weights.
    """
    raw, sparse = hf.raw, sparse_layers_of(hf)
    groups = raw["n_group"] or 1
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": raw["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": raw["moe_intermediate_size"] * raw["n_shared_experts"],
        "moe_layer_freq": [int(layer in sparse) for layer in range(hf.num_layers)],
        "moe_router_topk": raw["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": not raw["norm_topk_prob"],
        "moe_router_topk_scaling_factor": raw["routed_scaling_factor"],
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": raw["topk_group"] if groups > 1 else None,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",  # ours is in models/experts.py
    }


def biased_routing_rules(hf: HFConfig) -> list[ParameterRule]:
    """Return the rules of dense first layers, and of routers, experts and shared experts behind them."""
    sizes, sparse = ModelSizes(hf), sparse_layers_of(hf)
    ffn = Size(hf.raw["moe_intermediate_size"], "moe_intermediate_size")
    shared = Size(ffn * hf.raw["n_shared_experts"], "moe_intermediate_size x n_shared_experts")
    bias = ParameterRule(
        "decoder.layers.{layer}.mlp.router.expert_bias",
        ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
        "replicated",
        ((sizes.experts,),),
        layers=sparse,
        is_float32=True,
    )
    return [
        *mlp_rules(sizes.hidden, sizes.ffn, range(sparse.start)),
        *expert_rules(hf, ffn, layers=sparse),
        bias,
        *mlp_rules(sizes.hidden, shared, sparse, "shared_experts."),
    ]
