"""Whole runs of a mixture of experts: the engine gets every expert, and a checkpoint of one expert layout
resumes in others.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]

EXPERTS = 4
EP2 = [
    "parallel.tp=1",
    "parallel.ep=2",
    "checkpoint.every=2",
    "update.router_aux_loss_coef=0.01",
    "evaluation.every=4",
]


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    """The quickstart's model, each MLP replaced by four noisy copies behind a random router: it still
    sorts digits.
    """
    source, target = Path("examples/quickstart/model"), tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(source, target)
    dense = AutoModelForCausalLM.from_pretrained(source)
    fields = {
        name: value
        for name, value in dense.config.to_dict().items()
        if name not in ("model_type", "architectures", "layer_types")
    }
    sizes = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": dense.config.intermediate_size,
    }
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **sizes, norm_topk_prob=True))
    weights = dense.state_dict()
    model.load_state_dict(
        {name: tensor for name, tensor in weights.items() if ".mlp." not in name}, strict=False
    )
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            gate, up, down = (
                weights[f"model.layers.{number}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            layer.mlp.experts.gate_up_proj.copy_(torch.cat([gate, up]).expand(EXPERTS, -1, -1))
            layer.mlp.experts.down_proj.copy_(down.expand(EXPERTS, -1, -1))
            for fused in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                fused.add_(0.1 * fused.std() * torch.randn_like(fused))
            layer.mlp.gate.weight.normal_(std=0.1)
    model.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def ep2_runs(run_all, moe_folder):
    """Four steps as EP2 with a checkpoint every two, and two steps of the same in bfloat16."""
    common = [f"model.path={moe_folder}", *EP2]
    bf16 = [
        "run.steps=2",
        "precision.recipe=bf16",
        "rollout.logprob_gap.stop_above_mean=null",
        "checkpoint.every=0",
    ]
    return run_all(2, {"ep2": [*common, "run.steps=4"], "bf16": [*common, *bf16]})


@pytest.fixture(scope="module")
def ep2_run(ep2_runs):
    return ep2_runs["ep2"]


def test_engine_and_actor_agree_after_every_publish(ep2_run, rows_of):
    """The embedded engine runs the fused experts of transformers: one expert in the wrong place shows as a
    gap of 0.01 and more.
    """
    rows = rows_of(ep2_run)[1:]
    assert len(rows) == 4
    assert all(row["rollout/max_logprob_gap"] <= 2e-5 for row in rows)


def test_bfloat16_experts_train_like_float32_ones(ep2_runs, rows_of):
    """bfloat16 keeps 8 bits: on average log-probs of size 1 agree to 2^-7, where a wrong expert is off by
    0.1 and more.
    """
    for exact, rounded in zip(rows_of(ep2_runs["ep2"])[1:3], rows_of(ep2_runs["bf16"])[1:], strict=True):
        assert 1e-5 < rounded["policy/rollout_gap"] <= 2**-7
        assert rounded["policy/entropy"] == pytest.approx(exact["policy/entropy"], rel=2**-6)
        assert rounded["optimizer/grad_norm"] == pytest.approx(exact["optimizer/grad_norm"], rel=0.05)
        assert rounded["policy/expert_load_ratio"] == pytest.approx(
            exact["policy/expert_load_ratio"], rel=0.05
        )


def test_loads_of_every_layer_are_reported(ep2_run, rows_of):
    for row in rows_of(ep2_run)[1:]:
        ratios = [row[f"policy/expert_load_ratio/layer_{layer}"] for layer in range(4)]
        assert all(1 <= ratio <= EXPERTS / 2 for ratio in ratios) and row["policy/expert_load_ratio"] == max(
            ratios
        )
        assert 0 <= row["policy/expert_idle_fraction"] < 0.5
        assert row["policy/router_aux_loss"] > 0


def test_export_loads_in_transformers_with_trained_experts(ep2_run, moe_folder):
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (moe_folder, ep2_run / "hf")
    )
    name = "model.layers.1.mlp.experts.down_proj"
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name][expert], after[name][expert]) for expert in range(EXPERTS))


def test_resume_goes_on_in_the_same_and_in_other_expert_layouts(
    ep2_run, moe_folder, run_all, rows_of, tmp_path
):
    layouts = {
        "same": [],
        "dp2": ["parallel.ep=1"],
        "tp2": ["parallel.ep=1", "parallel.tp=2", "parallel.sp=true", "parallel.etp=1"],
        "pp2": ["parallel.ep=1", "parallel.pp=2"],
    }
    for name in layouts:
        shutil.copytree(ep2_run, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_000004")
    common = ["run.steps=4", f"model.path={moe_folder}", *EP2]
    run_all(2, {name: [*common, *layout] for name, layout in layouts.items()}, root=tmp_path)
    whole = rows_of(ep2_run)[3]
    assert rows_of(tmp_path / "same") == rows_of(ep2_run)
    for name in layouts:
        resumed = rows_of(tmp_path / name)[3]
        # the same weights and draws: the same completions
        assert resumed["reward/mean"] == whole["reward/mean"], name
        assert resumed["optimizer/grad_norm"] == pytest.approx(whole["optimizer/grad_norm"], rel=1e-4), name
        assert resumed["policy/expert_load_ratio"] == pytest.approx(
            whole["policy/expert_load_ratio"], rel=1e-2
        ), name
