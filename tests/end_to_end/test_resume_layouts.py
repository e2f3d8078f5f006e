"""A checkpoint goes on in any other layout and on any number of ranks, equal within float noise for the next
three steps.

Every run starts from the same checkpoint after step 3 and is compared with the uninterrupted run. The
completions are the same tokens (draws are functions of counters), so rewards and token counts are equal;
norms and losses differ by the order of float32 sums alone. The learning rate is one of fine-tuning: AdamW
turns the rounding of gradients near zero into steps of the learning rate, and at the quickstart's 3e-4 the
third norm differs by 4e-6. A lost moment or a wrong step count changes norms by 1e-4 and more at this rate.

In bfloat16 what is restored is exact too: weights, main parameters and moments are the saved bits in every
layout. What a layout computes from them is not: each product is rounded to eight bits, so other partial sums
move single log-probs by 2^-8, and a sampled token whose draw falls between two such values is another one,
from where on the runs differ as two layouts that were never stopped do. So 1e-6 can hold for float32 alone.
For bfloat16 the next three steps are compared with those of a run in the same layout whose checkpoint that
layout has saved itself, bit by bit, and their distance from the uninterrupted run with that of an
uninterrupted run in the other layout.
"""

import shutil

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

SAVED = 3
RUN = [
    "run.steps=6",
    "optimizer.lr=1e-5",
    "checkpoint.every=3",
    "checkpoint.keep_last=9",
    "evaluation.every=6",
    "telemetry.writers=[jsonl]",
]
BF16 = ["precision.recipe=bf16", "rollout.logprob_gap.stop_above_mean=null"]
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
BF16_LAYOUTS = ("pp2", "dp2")
# what one sampled token that differs can move the norm of these batches by; whether any does is up to the
# processor
ONE_TOKEN = 2**-6
EQUAL = ("reward/mean", "rollout/generated_tokens", "update/trained_tokens")
CLOSE = ("optimizer/grad_norm", "policy/ratio_max", "policy/actor_rollout_gap")


@pytest.fixture(scope="module")
def whole(run_all):
    """The uninterrupted runs, as TP2; in bfloat16 in the other layouts as well."""
    others = {f"bf16_{name}": [*RUN, *BF16, *LAYOUTS[name][1]] for name in BF16_LAYOUTS}
    return run_all(2, {"fp32": RUN, "bf16": [*RUN, *BF16], **others})


@pytest.fixture(scope="module")
def resumed(whole, run_all, tmp_path_factory):
    """The same checkpoints gone on from in every layout; and, from what PP2 has saved on two ranks, on
    four and back.
    """
    root = tmp_path_factory.mktemp("layouts")
    jobs = {ranks: {} for ranks in (1, 2, 4)}
    for name, (ranks, layout) in LAYOUTS.items():
        jobs[ranks][name] = ("fp32", [*RUN, *layout])
    for name in ("tp2", *BF16_LAYOUTS):
        jobs[2][f"bf16_{name}"] = ("bf16", [*RUN, *BF16, *LAYOUTS[name][1]])
    for ranks, runs in jobs.items():
        for name, (source, _) in runs.items():
            shutil.copytree(whole[source], root / name, symlinks=True)
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
            assert row[metric] == pytest.approx(expected[metric], rel=1e-6, abs=1e-6), (
                name,
                row["step"],
                metric,
            )


@pytest.fixture(scope="module")
def resaved(whole, run_all, tmp_path_factory):
    """The bfloat16 checkpoint, loaded and saved again by the layout that then goes on from it."""
    root = tmp_path_factory.mktemp("resaved")
    for name in BF16_LAYOUTS:
        shutil.copytree(whole["bf16"], root / name, symlinks=True)
        shutil.rmtree(root / name / "checkpoints" / "step_000006")
    runs = {name: [*RUN, *BF16, *LAYOUTS[name][1]] for name in BF16_LAYOUTS}
    run_all(2, runs, root=root, worker="resaved_runs_worker.py")
    return root


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_bfloat16_state_is_bit_equal_in_any_layout(resaved, tmp_path, name):
    saved = {}
    for number, folder in enumerate(
        [resaved / name / "first", resaved / name / "checkpoints" / f"step_{SAVED:06d}"]
    ):
        dcp_to_torch_save(folder, tmp_path / f"{number}.pt")
        saved[number] = torch.load(tmp_path / f"{number}.pt", weights_only=False)
    tensors = {key for key, value in saved[0].items() if isinstance(value, torch.Tensor)}
    assert {saved[0][key].dtype for key in tensors} == {torch.bfloat16, torch.float32} and len(
        tensors
    ) >= 4 * 9
    assert tensors == {key for key, value in saved[1].items() if isinstance(value, torch.Tensor)}
    assert [key for key in sorted(tensors) if not torch.equal(saved[0][key], saved[1][key])] == []


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_bfloat16_goes_on_bit_equal_to_a_run_whose_own_layout_has_saved(resumed, resaved, rows_of, name):
    rows, expected = next_steps(rows_of(resumed / f"bf16_{name}")), next_steps(rows_of(resaved / name))
    assert rows == expected and len(rows) == 3


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_bfloat16_is_as_near_to_the_uninterrupted_run_as_its_layout_is(whole, resumed, rows_of, name):
    """The first step's rollout is from the loaded weights; all norms differ by no more than those of runs
    that were never stopped.
    """
    rows, expected = next_steps(rows_of(resumed / f"bf16_{name}")), next_steps(rows_of(whole["bf16"]))
    assert rows[0]["reward/mean"] == expected[0]["reward/mean"]
    assert rows[0]["optimizer/grad_norm"] == pytest.approx(expected[0]["optimizer/grad_norm"], rel=2**-7)
    apart = [_distance(pair) for pair in zip(rows, expected, strict=True)]
    noise = [
        _distance(pair)
        for pair in zip(rows_of(whole[f"bf16_{name}"])[1:], rows_of(whole["bf16"])[1:], strict=True)
    ]
    assert max(apart) <= max(2 * max(noise), ONE_TOKEN), (apart, noise)


def _distance(rows):
    norms = [row["optimizer/grad_norm"] for row in rows]
    return abs(norms[0] - norms[1]) / norms[1]
