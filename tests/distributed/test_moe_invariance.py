"""The layout never changes the answer of a mixture of experts: GRPO against a dense float64 reference.

Why the numbers must not change. Routing is dropless: a token's experts and their outputs depend on the token alone, so it doesn't matter
which rank computes them or which tokens are computed beside it. An expert's gradient is the sum over all tokens that chose it: those of
the expert parallel ranks arrive with the tokens, those of the expert data parallel ranks in the gradient reduction, without any division.
Loads and the balance loss are sums over sequences of functions of one sequence (models/experts.py), divided by the sequences of the
update; so they do not change with micro-batches, packing or shared prompts either. The top-k choice is discontinuous: two scores closer
than float32's rounding could be chosen differently; the model's router is wide enough that no such pair occurs here.

Not covered here: bf16, Transformer Engine, grouped GEMMs and NCCL (GPU only).
"""

import sys
from pathlib import Path

import pytest
import torch
from torchrun_launch import run_torchrun
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "workers"))


@pytest.fixture(scope="session")
def dense_references(tmp_path_factory):
    """A tiny Qwen3-MoE, and the reference's results on it without and with a balance loss."""
    import dense_grpo

    folder = tmp_path_factory.mktemp("moe_invariance")
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if name.endswith("gate.weight") else 0.05))
    model.save_pretrained(folder / "model")
    for name, coefficient in (("plain", 0.0), ("balanced", 0.5)):
        torch.save(dense_grpo.train_dense(folder / "model", coefficient), folder / f"{name}.pt")
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "reference", "cases"),
    [
        (1, "plain", ["tp1:packed", "tp1:unpacked"]),
        (1, "balanced", ["tp1:tiny", "tp1:unshared", "tp1full:packed"]),
        (2, "plain", ["ep2:packed", "ep2allgather:tiny", "tp2sp:packed", "tp2spetp1:packed", "etp2:packed", "pp2vpp2:tiny"]),
        (2, "balanced", ["ep2:unpacked", "tp2spetp1ep2:packed", "pp2:packed", "cp2ep2allgather:tiny", "cp2:packed"]),
        (4, "plain", ["tp2spep2:packed", "pp2ep2:tiny", "ep2etp2:packed", "tp2spetp1ep4:unshared"]),
        (4, "balanced", ["ep2:packed", "tp2spep2:packed", "cp2ep4:tiny", "ep2etp2allgather:packed"]),
    ],
)
def test_losses_norms_loads_and_weights_equal_the_dense_reference(dense_references, ranks, reference, cases):
    result = dense_references / f"{reference}.pt"
    assert "INVARIANT" in run_torchrun(ranks, "invariance_worker.py", dense_references / "model", result, *cases)
