"""Tiny random models of every family and variant, as the distributed suites compare them."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
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
# those that run in every layout; the others in those of one and of two ranks
FIRST = ("llama", "llama_tied_llama3_rope", "llama_linear_rope", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied")
FIRST += ("qwen3_moe", "qwen3_moe_tied_unnormalised")


def models_of(ranks: int) -> list[str]:
    """The models that a launch on `ranks` ranks compares."""
    return [name for name in sorted(CONFIGS) if ranks < 4 or name in FIRST]


def has_experts(name: str) -> bool:
    return bool(getattr(CONFIGS[name], "num_local_experts", 0))


def write_models(root: Path) -> None:
    """Write one HF folder for each; norms and biases are perturbed, since ones and zeros would hide a
    swapped tensor.
    """
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.03))
        model.save_pretrained(root / name)
