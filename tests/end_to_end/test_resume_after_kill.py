"""A run that is killed anywhere goes on to the same numbers: metrics, completions and final weights are
bit-equal on the CPU.

The run has everything whose position a checkpoint must keep: two updates a step on a decaying learning rate,
an adaptive KL coefficient, refills of dynamic sampling, and a data set so small that epochs end within the
steps that are repeated.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

STEPS, LAST_SAVED, KILLED_IN = 6, 2, 4
RUN = [
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "evaluation.every=3",
    "telemetry.writers=[jsonl]",
    "telemetry.completions_every=1",
    "data.limit=13",
    "update.mini_batches_per_step=2",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=3",
    "optimizer.min_lr_fraction=0.1",
    "algorithm.dynamic_sampling.enabled=true",
    "algorithm.kl.coef=0.1",
    "algorithm.kl.adaptive_target=1.0e-6",
]
# Point -> the checkpoints that may be left to go on from.
POINTS = {
    "generation": (2,),
    "refill": (2,),
    "scoring": (2,),
    "update": (2,),
    "publish": (2,),
    "write_shards": (2,),
    "shards_written": (2, 4),  # 4 where the other rank had the time to end the save
    "publish_checkpoint": (4,),
}


@pytest.fixture(scope="module")
def whole(run_all):
    """The run without a kill."""
    return run_all(2, {"whole": RUN})["whole"]


@pytest.fixture(scope="module")
def killed(whole, run_all, tmp_path_factory):
    """Folders of runs that were killed at each point and then went on, with what was left in between."""
    from small_runs import QUICKSTART, SMALL
    from torchrun_launch import run_torchrun

    root = tmp_path_factory.mktemp("killed")
    left = {}
    for point in POINTS:
        job = [QUICKSTART, [*SMALL, f"run.dir={root / point}", *RUN]]
        run_torchrun(
            2,
            "killed_run_worker.py",
            json.dumps(job),
            point,
            KILLED_IN,
            timeout_seconds=200,
            expect_failure=True,
        )
        left[point] = sorted(path.name for path in (root / point / "checkpoints").iterdir())
    run_all(2, dict.fromkeys([*POINTS], RUN), root=root)
    return root, left


@pytest.mark.parametrize("point", POINTS)
def test_the_last_finished_checkpoint_is_left(killed, point):
    _, left = killed
    complete = [name for name in left[point] if name.startswith("step_") and "." not in name]
    assert complete[-1] in [f"step_{step:06d}" for step in POINTS[point]]
    assert f"resumed after step {int(complete[-1][5:])}" in (killed[0] / point / "log.txt").read_text()


@pytest.mark.parametrize("point", POINTS)
def test_metrics_are_bit_equal_and_no_step_comes_twice(killed, whole, rows_of, point):
    rows = rows_of(killed[0] / point)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows == rows_of(whole)


@pytest.mark.parametrize("point", POINTS)
def test_completions_and_final_weights_are_bit_equal(killed, whole, point):
    folder = killed[0] / point
    for path in sorted((whole / "completions").iterdir()):
        assert (folder / "completions" / path.name).read_text() == path.read_text(), path.name
    expected, found = (
        load_file(whole / "hf" / "model.safetensors"),
        load_file(folder / "hf" / "model.safetensors"),
    )
    assert expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )


def test_the_run_has_what_the_test_is_about(whole, rows_of):
    """Refills, an epoch that ends between the saved and the killed step, a moving KL coefficient and a
    moving learning rate.
    """
    rows = rows_of(whole)[1:]
    drawn = [8 + row["rollout/dropped_groups"] for row in rows]
    assert any(row["rollout/refills"] for row in rows[LAST_SAVED:KILLED_IN])
    positions = [sum(drawn[: step + 1]) // 13 for step in range(STEPS)]
    assert positions[KILLED_IN - 1] > positions[LAST_SAVED - 1]
    assert len({row["optimizer/lr"] for row in rows}) == STEPS
