"""Background saves on two ranks: the values of the moment they began, each byte once, and failures that
all ranks hear of.
"""

import pytest
from torchrun_launch import check_case

CASES = ["tp2 fp32", "dp2 fp32", "pp2 fp32", "cp2 fp32", "dp2 bf16", "tp2 bf16", "failures"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saves")


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_saves_hold_what_was_there_and_failures_leave_the_last_checkpoint(tiny_hf_folder, folder, case):
    check_case(case, CASES, 2, "checkpoint_worker.py", tiny_hf_folder("qwen3"), folder, timeout_seconds=300)
