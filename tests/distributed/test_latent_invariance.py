"""The layout never changes the answer of latent attention before a biased router: GRPO on a tiny DeepSeek-V3
against a dense float64 reference.

Why the numbers must not change. Each head's keys are made of a latent, which every tensor parallel rank makes
whole, and of one rotated part that all heads share: its gradient is the sum over the heads of all ranks. The
bias of the router has no gradient. The rest is as in test_moe_invariance.py.
"""

import pytest
from torchrun_launch import check_case

CASES = "tp2sp:packed tp2spetp1ep2:tiny pp2vpp2:packed cp2ep2:unshared"


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES.split())
def test_losses_norms_and_weights_equal_the_dense_reference(latent_reference, case):
    check_case(case, CASES.split(), 2, "invariance_worker.py", *latent_reference, *CASES.split())
