"""examples/custom_family.py: a model of a type that is not registered is trained by a family from a file."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SeedOssConfig

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Seed-OSS with biases that show, and the quickstart's tokenizer."""
    source, target = Path("examples/quickstart/model"), tmp_path_factory.mktemp("seed_oss") / "model"
    shutil.copytree(source, target)
    tokens = AutoModelForCausalLM.from_pretrained(source).config
    torch.manual_seed(4)
    config = SeedOssConfig(
        vocab_size=tokens.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(target)
    return target


def test_a_family_from_a_file_is_trained_two_steps(run_all, rows_of, folder):
    """After each update the engine, transformers' own code for the type, agrees with the actor."""
    overrides = [
        f"model.path={folder}", "model.family=examples/custom_family.py:SeedOss",
        "run.steps=2", "parallel.tp=1",
        'rewards.functions=[{name: "examples/custom_reward.py:reward_brevity"}]', "evaluation.every=0",
    ]  # fmt: skip
    rows = rows_of(run_all(1, {"own": overrides})["own"])[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["optimizer/grad_norm"] > 0
        assert row["rollout/max_logprob_gap"] <= 2e-5
