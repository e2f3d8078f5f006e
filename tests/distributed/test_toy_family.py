"""A model family is one file: one that a worker alone holds goes through all that weights go through."""

import pytest
from torchrun_launch import check_case

LAYOUTS = ["tp2", "pp2"]
CASES = [
    f"{layout}: {what}" for layout in LAYOUTS for what in ("exports", "publishes", "quantises", "checkpoints")
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("toy")


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_a_family_of_one_file(scratch, case):
    check_case(case, CASES, 2, "toy_family_worker.py", scratch, *LAYOUTS, timeout_seconds=150)
