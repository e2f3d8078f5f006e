"""Silent faults of Megatron-core that the package works around: each case fails as described when the fix is
taken away.

So a fix that is lost by a refactoring, or that a new Megatron makes superfluous, is noticed. Not covered:
faults that need NCCL or Transformer Engine to show.
"""

import pytest
from torchrun_launch import run_torchrun


@pytest.mark.distributed
def test_every_fix_is_needed_and_works(dense_reference, moe_model, moe_references):
    assert "TRAPS SHOWN" in run_torchrun(
        2, "traps_worker.py", *dense_reference, moe_model, moe_references / "plain.pt"
    )
