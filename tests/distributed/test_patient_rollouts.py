"""The wait for rollouts is not the time-out of a collective: completions of 32k tokens and long tails end no
run.
"""

import pytest
from torchrun_launch import check_case

CASES = ["a long share", "a rank that dies"]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_a_share_may_take_longer_than_a_collective_and_a_death_ends_the_wait(case):
    check_case(case, CASES, 2, "patient_rollout_worker.py", timeout_seconds=120)
