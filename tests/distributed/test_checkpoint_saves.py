"""Background saves on two ranks: the values of the moment they began, each byte once, and failures that
all ranks hear of.
"""

import pytest
from torchrun_launch import run_torchrun


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_saves_hold_what_was_there_and_failures_leave_the_last_checkpoint(tiny_hf_folder, tmp_path):
    run_torchrun(2, "checkpoint_worker.py", tiny_hf_folder("qwen3"), tmp_path, timeout_seconds=300)
