"""The figures of a run, by hand; the FLOPs of a token against the models' published sizes."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests/rehearsal"))

from model_configs import MODELS, PARAMETERS  # noqa: E402


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_step", ROOT / "tools/bench_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["Qwen3-8B", "Llama-3.1-8B-Instruct", "Qwen2.5-32B"])
def test_a_token_of_a_dense_model_meets_all_of_it_but_the_embedding(bench, name):
    """Norms and biases are no products: less than a thousandth."""
    embedding = MODELS[name]["vocab_size"] * MODELS[name]["hidden_size"]
    assert bench.multiplied_parameters(MODELS[name]) == pytest.approx(PARAMETERS[name] - embedding, rel=1e-3)


@pytest.mark.parametrize(("name", "active"), [("Qwen3-30B-A3B", 3.3e9), ("Qwen3-235B-A22B", 22e9)])
def test_a_token_of_experts_meets_the_active_ones(bench, name, active):
    """The published counts of active parameters are rounded and hold the embedding."""
    embedding = MODELS[name]["vocab_size"] * MODELS[name]["hidden_size"]
    assert bench.multiplied_parameters(MODELS[name]) + embedding == pytest.approx(active, rel=0.02)


def test_rates_and_utilisation_by_hand(bench):
    """2 ranks of 1e12 FLOP/s; 3,000 tokens in 4 s of updates."""
    hf = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    assert bench.multiplied_parameters(hf) == 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 10 * 8
    row = {
        "time/step_seconds": 5.0,
        "time/rollout_seconds": 2.5,
        "time/update_seconds": 2.0,
        "rollout/generated_tokens": 2000.0,
        "rollout/completion_tokens": 100.0,
        "update/trained_tokens": 1500.0,
        "memory/update_peak_bytes": 7.0,
    }
    found = bench.sum_up([row, row | {"memory/update_peak_bytes": 9.0}], hf, 2, 1e12)
    assert found["generated_tokens_per_second"] == 800
    assert found["trained_tokens_per_second"] == 750
    assert found["tokens_per_second_and_rank"] == 150
    assert found["memory/update_peak_bytes"] == 9.0
    flops = 6 * 656 + 12 * 1 * 2 * 4 * 100
    assert found["update_flops_utilisation"] == pytest.approx(750 * flops / 2e12)
