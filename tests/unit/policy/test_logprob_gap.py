"""The largest gap between engine and actor: which token it is, and what the gate makes of it."""

import math

import pytest
import torch

from megagrpo.config.load import load_config
from megagrpo.errors import UserError
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.logprob_gap import LargestGap, LogprobGap, check_logprob_gap, largest
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


def rollout_config(limit, action="stop"):
    return load_config(
        "examples/quickstart/quickstart.yaml",
        [f"rollout.max_logprob_gap={limit}", f"rollout.logprob_gap_action={action}"],
    ).rollout


MESSAGE = (
    r"step 7: engine and actor log-probs differ by up to 5\.000e-01, rollout\.max_logprob_gap is "
    r"1\.000e-04: prompt 105, completion 1, "
    r"token 4 \(id 15\): engine -5\.000000, actor -5\.500000, weight version 6"
)


def test_a_larger_gap_stops_the_run_and_names_the_token(rollouts):
    gap = LogprobGap((5, 1), 4, 15, -5.0, -5.5)
    with pytest.raises(UserError, match=f"^{MESSAGE}; nothing was updated in this step$"):
        check_logprob_gap(gap, rollouts, rollout_config(1e-4), step=7)


def test_a_larger_gap_warns_where_that_is_asked_for(rollouts):
    gap = LogprobGap((5, 1), 4, 15, -5.0, -5.5)
    warning = check_logprob_gap(gap, rollouts, rollout_config(1e-4, "warn"), step=7)
    assert warning.startswith("step 7: ") and warning.endswith("weight version 6")


def test_a_gap_within_the_limit_says_nothing(rollouts):
    gap = LogprobGap((5, 1), 4, 15, -5.0, -5.5)
    assert check_logprob_gap(gap, rollouts, rollout_config(0.5), step=7) is None
    assert check_logprob_gap(gap, rollouts, rollout_config("null"), step=7) is None
    assert check_logprob_gap(None, rollouts, rollout_config(1e-4), step=7) is None


def test_a_gap_that_is_no_number_stops_the_run(rollouts):
    with pytest.raises(UserError, match="differ by up to nan"):
        check_logprob_gap(LogprobGap((5, 1), 4, 15, -5.0, math.nan), rollouts, rollout_config(1e-4), step=7)
