"""Tiny random models of every family and variant, as the distributed suites compare them."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": 259,  # odd: padded on every rank count, so padded columns would show in the soft-max
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
    "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}
LATENT = {
    **{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"},
    "num_key_value_heads": 8, "kv_lora_rank": 28, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 16, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 0.8, "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied_llama3_rope": LlamaConfig(
        **{**SHAPE, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}
    ),
    "llama_linear_rope": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "qwen2": Qwen2Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2_tied": Qwen2Config(**{**SHAPE, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_tied": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts_per_tok=2, norm_topk_prob=True),
    "qwen3_moe_tied_unnormalised": Qwen3MoeConfig(
        **{**SHAPE, "tie_word_embeddings": True}, **EXPERTS, num_experts_per_tok=3
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=24, head_dim=16),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=40),
}
CONFIGS |= {
    "deepseek_v3": DeepseekV3Config(
        **LATENT, q_lora_rank=20, n_group=4, topk_group=2, first_k_dense_replace=1, rope_parameters=YARN
    ),
    # as Moonlight: queries without a low rank, one group
    "deepseek_v3_moonlight": DeepseekV3Config(
        **LATENT, q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=2, n_shared_experts=2,
        rms_norm_eps=1e-5, norm_topk_prob=False,
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, head_dim=16, attention_bias=True, use_qk_norm=True, moe_intermediate_size=32,
        n_routed_experts=8, num_experts_per_tok=2, routed_scaling_factor=1.5,
    ),
    "glm4_moe_plain": Glm4MoeConfig(
        **SHAPE, head_dim=16, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        first_k_dense_replace=3,
    ),
}  # fmt: skip
# those that run in every layout; the others in each kind of layout once
FIRST = ("llama", "llama_tied_llama3_rope", "llama_linear_rope", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied")
FIRST += ("qwen3_moe", "qwen3_moe_tied_unnormalised")
EACH_KIND = ("tp1pp1", "tp2pp1sp", "tp1pp2", "cp2", "ep2")


def runs_in(name: str, layout: str, ranks: int) -> bool:
    """Say whether a launch on `ranks` ranks compares a model in a layout: layouts of experts need some."""
    for_experts = "ep" in layout.replace("pp", "") + layout.replace("etp", "ep")
    has_experts = bool(getattr(CONFIGS[name], "num_local_experts", 0))
    is_chosen = name in FIRST or (ranks <= 2 and layout in EACH_KIND)
    return is_chosen and (has_experts or not for_experts)


def write_models(root: Path) -> None:
    """Write one HF folder for each; norms and biases are perturbed, since ones and zeros would hide a
    swapped tensor.
    """
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            biases = [row[1] for row in model.named_buffers() if row[0].endswith("e_score_correction_bias")]
            for parameter in [*model.parameters(), *biases]:
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.03))
        model.save_pretrained(root / name)
