"""Where gradients, optimizer and reference lie between updates changes nothing: neither metrics nor resumes.

In bfloat16 on two data parallel ranks, so that main parameters are copies of their own and a save exchanges
pieces of them while they are away.
"""

import shutil

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

RUN = [
    "run.steps=4",
    "checkpoint.every=2",
    "checkpoint.keep_last=9",
    "evaluation.every=4",
    "telemetry.writers=[jsonl]",
    "precision.recipe=bf16",
    "rollout.logprob_gap.stop_above_mean=null",
    "parallel.tp=1",
    "algorithm.kl.coef=0.01",
]
AWAY = ["engine.sleep_while_training=true", "update.offload=[gradients,optimizer,reference]"]


@pytest.fixture(scope="module")
def runs(run_all):
    rounded = ["precision.gradients=bf16"]
    return run_all(2, {"stays": RUN, "leaves": [*RUN, *AWAY], "rounded": [*RUN, *AWAY, *rounded]})


def test_a_run_is_the_same_to_the_bit(runs, rows_of):
    assert rows_of(runs["leaves"]) == rows_of(runs["stays"])


def test_a_checkpoint_that_was_saved_meanwhile_goes_on_to_the_bit(runs, run_all, rows_of, tmp_path):
    shutil.copytree(runs["leaves"], tmp_path / "resumed", symlinks=True)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_000004")
    run_all(2, {"resumed": [*RUN, *AWAY]}, root=tmp_path)
    assert rows_of(tmp_path / "resumed") == rows_of(runs["stays"])


def test_gradients_added_up_in_bfloat16_are_those_of_float32_within_its_rounding(runs, rows_of):
    """Eight bits of mantissa: each sum is off by at most 2^-9 of itself, a norm by less; and another one."""
    pairs = [
        (row["optimizer/grad_norm"], other["optimizer/grad_norm"])
        for row, other in zip(rows_of(runs["rounded"]), rows_of(runs["stays"]), strict=True)
        if "optimizer/grad_norm" in row
    ]
    (rounded, exact), *_ = pairs
    assert rounded == pytest.approx(exact, rel=2**-7)
    assert rounded != exact
