"""Silent faults of Megatron-core that the package works around: each case fails as described when the fix is
taken away.

So a fix that is lost by a refactoring, or that a new Megatron makes superfluous, is noticed. Not covered:
faults that need NCCL or Transformer Engine to show.
"""

import pytest
from torchrun_launch import check_case

CASES = [
    "a lost all-reduce",
    "a shared step",
    "interleaving on two stages with batched p2p is refused",
    "interleaving on two stages with batched p2p",
    "no tensor parallel marks",
    "Megatron's own division",
    "weights read before they were gathered",
    "experts summed over the group of the other parameters",
    "split sizes as a tensor",
    "unequal parts gathered as equal ones",
    "an unbound name",
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_every_fix_is_needed_and_works(dense_reference, moe_model, moe_references, case):
    plain = moe_references / "plain.pt"
    check_case(case, CASES, 2, "traps_worker.py", *dense_reference, moe_model, plain)
