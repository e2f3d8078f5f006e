"""A checkpoint goes on in any other layout and on any number of ranks, equal within float noise for the next three steps.

Every run starts from the same checkpoint after step 3 and is compared with the uninterrupted run. The completions are the same tokens
(draws are functions of counters), so rewards and token counts are equal; norms and losses differ by the order of float32 sums alone.
The learning rate is one of fine-tuning: AdamW turns the rounding of gradients near zero into steps of the learning rate, and at the
quickstart's 3e-4 the third norm differs by 4e-6. A lost moment or a wrong step count changes norms by 1e-4 and more at this rate.
bfloat16 rounds each product to eight bits: other partial sums move single log-probs by 2^-8, which is its float noise.
"""

import shutil

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

SAVED = 3
RUN = [
    "run.steps=6",
    "optimizer.lr=1e-5",
    "checkpoint.every=3",
    "checkpoint.keep_last=9",
    "evaluation.every=6",
    "telemetry.tensorboard=false",
]
BF16 = ["precision.recipe=bf16", "rollout.max_logprob_gap=null"]
LAYOUTS = {  # name -> ranks, overrides
    "tp2": (2, []),
    "pp2": (2, ["parallel.tp=1", "parallel.pp=2"]),
    "vpp2": (2, ["parallel.tp=1", "parallel.pp=2", "parallel.vpp=2"]),
    "cp2": (2, ["parallel.tp=1", "parallel.cp=2"]),
    "dp2": (2, ["parallel.tp=1", "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]),
    "alone": (1, ["parallel.tp=1"]),
    "tp2_pp2": (4, ["parallel.pp=2"]),
    "tp2_dp2": (4, []),
}
EQUAL = ("reward/mean", "rollout/generated_tokens", "update/trained_tokens")
CLOSE = ("optimizer/grad_norm", "policy/ratio_max", "policy/actor_rollout_gap")


@pytest.fixture(scope="module")
def whole(run_all):
    """The uninterrupted runs, as TP2."""
    return run_all(2, {"fp32": RUN, "bf16": [*RUN, *BF16]})


@pytest.fixture(scope="module")
def resumed(whole, run_all, tmp_path_factory):
    """The same checkpoints gone on from in every layout; and, from what PP2 has saved on two ranks, on four and back."""
    root = tmp_path_factory.mktemp("layouts")
    jobs = {ranks: {} for ranks in (1, 2, 4)}
    for name, (ranks, layout) in LAYOUTS.items():
        jobs[ranks][name] = ("fp32", [*RUN, *layout])
    for name in ("tp2", "pp2", "dp2"):
        jobs[2][f"bf16_{name}"] = ("bf16", [*RUN, *BF16, *LAYOUTS[name][1]])
    for ranks, runs in jobs.items():
        for name, (source, _) in runs.items():
            shutil.copytree(whole[source], root / name)
            shutil.rmtree(root / name / "checkpoints" / "step_000006")
        run_all(ranks, {name: overrides for name, (_, overrides) in runs.items()}, root=root)
    return root


def next_steps(rows):
    return [row for row in rows if SAVED < row["step"] <= SAVED + 3]


def test_the_same_layout_is_bit_equal(whole, resumed, rows_of):
    assert rows_of(resumed / "tp2") == rows_of(whole["fp32"])
    assert rows_of(resumed / "bf16_tp2") == rows_of(whole["bf16"])


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "tp2"])
def test_float32_is_equal_within_rounding(whole, resumed, rows_of, name):
    pairs = list(zip(next_steps(rows_of(resumed / name)), next_steps(rows_of(whole["fp32"])), strict=True))
    assert len(pairs) == 3
    for row, expected in pairs:
        for metric in EQUAL:
            assert row[metric] == expected[metric], (name, row["step"], metric)
        for metric in CLOSE:
            assert row[metric] == pytest.approx(expected[metric], rel=1e-6, abs=1e-6), (name, row["step"], metric)


@pytest.mark.parametrize("name", ["bf16_pp2", "bf16_dp2"])
def test_bfloat16_is_equal_within_its_rounding(whole, resumed, rows_of, name):
    """The first step's rollout is from the loaded weights; the update's norm differs by bfloat16 partial sums."""
    row, expected = next_steps(rows_of(resumed / name))[0], next_steps(rows_of(whole["bf16"]))[0]
    assert row["reward/mean"] == expected["reward/mean"]
    assert row["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"], rel=2**-7)
