"""The largest gap between engine and actor: which token it is, and what the gate makes of it."""

import math
import re

import pytest
import torch

from megagrpo.config.load import load_config
from megagrpo.errors import SharedUserError
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.logprob_gap import (
    LargestGap,
    LogprobGap,
    LogprobGapGate,
    largest,
    warning_bound,
)
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Prompt, Reward

KEYS = ((3, 0), (5, 1))


def batch_of(rollout_logprobs):
    """Two completions, of three tokens and of two."""
    return MicroBatch(
        tokens=torch.zeros(1, 5),
        packed=None,
        keys=KEYS,
        row_index=torch.arange(5),
        targets=torch.tensor([11, 12, 13, 14, 15]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        positions=torch.tensor([0, 1, 2, 0, 1]),
        rollout_logprobs=torch.tensor(rollout_logprobs),
        chunks=torch.zeros(5, dtype=torch.int64),
    )


def find(actor, ages, rows=range(5)):
    gap = LargestGap()
    rows = torch.tensor(list(rows), dtype=torch.int64)
    gap.add(
        batch_of([-1.0, -2.0, -3.0, -4.0, -5.0]),
        rows,
        torch.tensor(actor),
        dict(zip(KEYS, ages, strict=True)),
    )
    return gap.result()


def test_the_largest_gap_is_named_with_its_token():
    assert find([-1.0, -2.5, -3.0, -4.25, -5.0], ages=(0, 0)) == LogprobGap((3, 0), 1, 12, -2.0, -2.5)


def test_tokens_of_older_weights_are_not_judged():
    assert find([-1.0, -2.5, -3.0, -4.25, -5.0], ages=(1, 0)) == LogprobGap((5, 1), 0, 14, -4.0, -4.25)
    assert find([-1.0, -2.5, -3.0, -4.25, -5.0], ages=(1, 2)) is None


def test_rows_that_are_not_compared_are_not_looked_at():
    """A correction has masked rows 1 and 3: the log-probs are those of rows 0, 2 and 4."""
    assert find([-1.0, -3.0, -5.5], ages=(0, 0), rows=(0, 2, 4)) == LogprobGap((5, 1), 1, 15, -5.0, -5.5)
    assert find([], ages=(0, 0), rows=()) is None


def test_a_gap_that_is_no_number_is_the_largest():
    found = find([-1.0, -9.0, math.nan, -4.0, -5.0], ages=(0, 0))
    assert (found.key, found.position) == ((3, 0), 2) and math.isnan(found.gap)
    assert largest([LogprobGap((0, 0), 0, 1, -1.0, -9.0), None, found]) is found


def test_of_equal_gaps_the_first_completions_is_taken_by_every_rank():
    gaps = [
        LogprobGap((2, 1), 0, 1, -1.0, -2.0),
        LogprobGap((2, 0), 4, 1, -1.0, -2.0),
        LogprobGap((2, 0), 3, 1, -1.0, -2.0),
    ]
    assert largest(gaps) is largest(gaps[::-1]) is gaps[2]
    assert largest([None, None]) is None


@pytest.fixture
def rollouts():
    records = {key: CompletionRecord(key, 0, 3, "stop", Reward(1.0), 6) for key in KEYS}
    return StepRollouts([Prompt(100 + number, "", (1,)) for number in range(6)], records, {}, 2)


def gate_of(*bounds, is_float32=True, is_narrowed=False):
    """A gate with `bounds` of rollout.logprob_gap, and the list that its warnings go to."""
    config = load_config(
        "examples/quickstart/quickstart.yaml",
        ["rollout.logprob_gap.stop_above_mean=null", *(f"rollout.logprob_gap.{bound}" for bound in bounds)],
    ).rollout.logprob_gap
    notes = []
    return LogprobGapGate(config, warning_bound(config, is_float32, is_narrowed), notes.append), notes


TOKEN = (
    r"prompt 105, completion 1, token 4 \(id 15\): engine -5\.000000, actor -5\.500000, weight version 6; "
    r"likely causes: .*rope"
)
GAP = LogprobGap((5, 1), 4, 15, -5.0, -5.5)


def test_a_gap_beyond_the_wide_maximum_ends_the_run_and_names_the_token(rollouts):
    gate, _ = gate_of("stop_above=0.1")
    with pytest.raises(
        SharedUserError,
        match=r"^step 7: engine and actor log-probs differ by up to 5\.000e-01, "
        rf"rollout\.logprob_gap\.stop_above is 1\.000e-01: {TOKEN}.*; nothing was updated in this step$",
    ):
        gate.check(GAP, 1e-6, rollouts, step=7)


def test_a_mean_gap_beyond_its_bound_ends_the_run_and_names_the_largest(rollouts):
    gate, _ = gate_of("stop_above_mean=1e-5")
    with pytest.raises(
        SharedUserError,
        match=r"^step 7: engine and actor log-probs differ by 2\.000e-05 in the mean, "
        rf"rollout\.logprob_gap\.stop_above_mean is 1\.000e-05; the largest gap is 5\.000e-01: {TOKEN}",
    ):
        gate.check(GAP, 2e-5, rollouts, step=7)


def test_one_large_gap_among_rounding_errors_only_warns(rollouts):
    """The mean is within its bound: a run does not end because one token of thousands is far off."""
    gate, notes = gate_of("stop_above_mean=1e-5")
    gate.check(GAP, 1e-6, rollouts, step=7)
    assert len(notes) == 1
    assert re.match(
        r"warning: step 7: engine and actor log-probs differ by up to 5\.000e-01, 1\.0e-06 in the mean; "
        rf"rollout\.logprob_gap\.warn_above is 1\.0e-03: {TOKEN}",
        notes[0],
    )


def test_warnings_are_at_most_one_in_fifty_steps_and_count_the_others(rollouts):
    gate, notes = gate_of()
    for step in range(1, 60):
        gate.check(GAP, 1e-6, rollouts, step)
    assert [note.split(":")[1] for note in notes] == [" step 1", " step 51"]
    assert "49 more steps since the last warning" in notes[1]


def test_the_default_warns_by_precision_and_never_where_the_engine_narrows(rollouts):
    rounding, halves = LogprobGap((5, 1), 4, 15, -1.775, -1.775052), LogprobGap((5, 1), 4, 15, -5.0, -5.3)
    for gap, is_float32, is_narrowed, warns in (
        (rounding, True, False, 0),  # of SmolLM2-135M in float32
        (halves, True, False, 1),
        (halves, False, False, 0),
        (LogprobGap((5, 1), 4, 15, -5.0, -5.6), False, False, 1),
        (GAP, True, True, 0),
    ):
        gate, notes = gate_of(is_float32=is_float32, is_narrowed=is_narrowed)
        gate.check(gap, 1e-6, rollouts, step=1)
        assert len(notes) == warns


def test_a_gap_within_the_bounds_says_nothing(rollouts):
    gate, notes = gate_of("warn_above=0.5", "stop_above=0.5", "stop_above_mean=1e-5")
    gate.check(GAP, 1e-5, rollouts, step=7)
    gate.check(None, None, rollouts, step=8)
    gate, notes = gate_of("warn_above=null")
    gate.check(GAP, 1.0, rollouts, step=7)
    assert notes == []


def test_a_gap_that_is_no_number_is_over_every_bound(rollouts):
    gap = LogprobGap((5, 1), 4, 15, -5.0, math.nan)
    gate, _ = gate_of("stop_above=0.1")
    with pytest.raises(SharedUserError, match="differ by up to nan"):
        gate.check(gap, math.nan, rollouts, step=7)
    gate, _ = gate_of("stop_above_mean=0.1")
    with pytest.raises(SharedUserError, match="differ by nan in the mean"):
        gate.check(gap, math.nan, rollouts, step=7)
