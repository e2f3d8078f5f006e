"""The vocab-parallel output layer at TP 1, 2 and 4 over gloo, all cases in one launch."""

import pytest
from torchrun_launch import run_torchrun


@pytest.mark.distributed
def test_every_tensor_parallel_size_equals_the_dense_reference():
    # Start-up of four ranks takes 5 to 20 s on a busy machine, the cases a few seconds; a hang is a dead rank
    # in a collective.
    run_torchrun(4, "logprobs_worker.py", timeout_seconds=120)
