"""What only a GPU can show, on one of them: the quickstart in bfloat16, with Transformer Engine where that is
installed; an engine beside the trainer that sleeps; a checkpoint; the fused log-probs.

    python -m pytest tests/gpu        # minutes, one GPU; servers need `make engines`
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from small_runs import QUICKSTART
from torchrun_launch import run_torchrun

pytestmark = pytest.mark.timeout(900)

DEVICE = "cuda"
# the quickstart's own bound on the gap between engine and actor is for float32
BF16 = ["precision.recipe=bf16", "rollout.logprob_gap.stop_above_mean=null"]
ONE_RANK = ["parallel.tp=1", *BF16, "telemetry.writers=[jsonl]"]
SHORT = ["run.steps=4", "evaluation.every=0", "checkpoint.every=2", "checkpoint.keep_last=9"]
AWAY = ["engine.sleep_while_training=true", "update.offload=[gradients,optimizer]"]


def run(folder: Path, *overrides: str) -> list[dict]:
    """The rows of the updates of a run on one rank."""
    job = [QUICKSTART, [f"run.dir={folder}", *ONE_RANK, *overrides]]
    run_torchrun(1, "runs_worker.py", json.dumps([job]), timeout_seconds=800)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "optimizer/grad_norm" in row]


def test_the_quickstart_learns_in_bfloat16(tmp_path):
    """Sampled accuracy from about 0.28 to over 0.8 in 40 steps, as in float32 on a CPU."""
    run(tmp_path / "run", "run.steps=40")
    sampled = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]["sampled"]
    assert sampled["last"] > 0.8, sampled


def test_what_leaves_the_gpu_between_updates_changes_nothing_and_is_not_there_in_rollouts(tmp_path):
    stays, leaves = run(tmp_path / "stays", *SHORT), run(tmp_path / "leaves", *SHORT, *AWAY)
    for here, away in zip(stays, leaves, strict=True):
        assert away["optimizer/grad_norm"] == pytest.approx(here["optimizer/grad_norm"], rel=1e-3)
    # the first rollout comes before the optimizer has ever been used
    assert leaves[-1]["memory/rollout_peak_bytes"] < stays[-1]["memory/rollout_peak_bytes"]


def test_a_checkpoint_goes_on(tmp_path):
    whole = run(tmp_path / "run", *SHORT, *AWAY)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    resumed = run(tmp_path / "run", *SHORT, *AWAY)
    assert [row["step"] for row in resumed] == [row["step"] for row in whole]
    assert resumed[-1]["optimizer/grad_norm"] == pytest.approx(whole[-1]["optimizer/grad_norm"], rel=1e-2)


@pytest.mark.engines
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_beside_the_trainer_sleeps_wakes_and_takes_weights_by_ipc(tmp_path, name):
    """The probe of each publish compares its log-probs with the trainer's before a version serves."""
    rows = run(tmp_path / "run", *SHORT, *AWAY, f"engine.name={name}", "weights.transport.kind=ipc")
    assert [row["rollout/weight_version"] for row in rows if "rollout/weight_version" in row] == [0, 1, 2, 3]
    assert all(row["publish/probe_gap"] < 0.25 for row in rows if "publish/probe_gap" in row)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_tensorwise", "fp8_blockwise"])
def test_a_float8_recipe_trains(tmp_path, recipe):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{recipe} needs compute capability 9.0")
    exact = run(tmp_path / "bf16", *SHORT, "model.attention=te")
    rounded = run(tmp_path / recipe, *SHORT, "model.attention=te", f"precision.recipe={recipe}")
    assert rounded[0]["optimizer/grad_norm"] == pytest.approx(exact[0]["optimizer/grad_norm"], rel=0.2)


def test_fused_logprobs_are_those_of_a_dense_float64_softmax():
    from megagrpo.ops.logprobs import linear_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 128, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(4096, 128, generator=generator)).bfloat16()
    targets = torch.randint(4096, (64,), generator=generator)
    logits = hidden.double() @ weight.double().T
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = linear_logprobs(*(each.to(DEVICE) for each in (hidden, weight, targets)), vocab_size=4096)
    torch.testing.assert_close(found.logprobs.double().cpu(), expected, atol=1e-4, rtol=0)
