"""The models and dense results that several distributed suites compare with."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "workers"))


@pytest.fixture(scope="session")
def dense_reference(tmp_path_factory):
    """A tiny tied Qwen3 whose vocabulary no tp size divides, and the reference's result on it."""
    import dense_grpo
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("invariance")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder / "model")
    torch.save(dense_grpo.train_dense(folder / "model"), folder / "reference.pt")
    return folder / "model", folder / "reference.pt"


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory):
    """Folder of a tiny Qwen3-MoE whose router is wide enough that rounding never swaps two experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("moe") / "model"
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, tie_word_embeddings=False, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if name.endswith("gate.weight") else 0.05))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def moe_references(moe_model, tmp_path_factory):
    """Folder with the dense results on the tiny Qwen3-MoE, without and with a balance loss."""
    import dense_grpo

    folder = tmp_path_factory.mktemp("moe_references")
    for name, coefficient in (("plain", 0.0), ("balanced", 0.5)):
        torch.save(dense_grpo.train_dense(moe_model, coefficient), folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="session")
def latent_reference(tmp_path_factory):
    """A tiny DeepSeek-V3 whose router is wide enough that rounding never swaps two experts, and the
    reference's result on it.
    """
    import dense_grpo
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("latent")
    torch.manual_seed(3)
    config = DeepseekV3Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=12, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=32, first_k_dense_replace=1, max_position_embeddings=128,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if name.endswith("gate.weight") else 0.05))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder / "model")
    torch.save(dense_grpo.train_dense(folder / "model"), folder / "reference.pt")
    return folder / "model", folder / "reference.pt"


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory):
    """One tiny random model a family and variant."""
    import family_models

    root = tmp_path_factory.mktemp("families")
    family_models.write_models(root)
    return root
