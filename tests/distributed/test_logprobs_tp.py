"""The vocab-parallel output layer at TP 1, 2 and 4 over gloo, all cases in one launch."""

import pytest
from torchrun_launch import check_case

CASES = [
    f"tp={tp} {shape}"
    for tp in (1, 2, 4)
    for shape in (
        "V=40 padded=40 T=7",
        "V=37 padded=40 T=7",
        "V=9 padded=16 T=5",
        "V=37 padded=40 T=1",
        "V=37 padded=40 T=0",
    )
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_parallel_size_equals_the_dense_reference(case):
    # Start-up of four ranks takes 5 to 20 s on a busy machine, the cases a few seconds; a hang is a dead rank
    # in a collective.
    check_case(case, CASES, 4, "logprobs_worker.py", timeout_seconds=120)
