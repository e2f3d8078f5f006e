"""The layout never changes the answer of a mixture of experts: GRPO against a dense float64 reference.

Why the numbers must not change. Routing is dropless: a token's experts and their outputs depend on the token
alone, so it doesn't matter which rank computes them or which tokens are computed beside it. An expert's
gradient is the sum over all tokens that chose it: those of the expert parallel ranks arrive with the tokens,
those of the expert data parallel ranks in the gradient reduction, without any division. Loads and the balance
loss are sums over sequences of functions of one sequence (models/experts.py), divided by the sequences of the
update; so they do not change with micro-batches, packing or shared prompts either. The top-k choice is
discontinuous: two scores closer than float32's rounding could be chosen differently; the model's router is
wide enough that no such pair occurs here.

Not covered here: bf16 (one layout, in end_to_end/test_moe_runs.py), Transformer Engine, grouped GEMMs and
NCCL (GPU only).
"""

import pytest
from torchrun_launch import check_case

CASES = {
    (1, "plain"): "tp1:packed tp1:unpacked",
    (1, "balanced"): "tp1:tiny tp1:unshared tp1full:packed",
    (2, "plain"): "ep2:packed ep2allgather:tiny tp2sp:packed tp2spetp1:packed etp2:packed pp2vpp2:tiny",
    (2, "balanced"): "ep2:unpacked tp2spetp1ep2:packed pp2:packed cp2ep2allgather:tiny cp2:packed",
    (4, "plain"): "tp2spep2:packed pp2ep2:tiny ep2etp2:packed tp2spetp1ep4:unshared",
    (4, "balanced"): "ep2:packed tp2spep2:packed cp2ep4:tiny ep2etp2allgather:packed",
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "reference", "case"), [(*launch, case) for launch in CASES for case in CASES[launch].split()]
)
def test_losses_norms_loads_and_weights_equal_the_dense_reference(
    moe_model, moe_references, ranks, reference, case
):
    cases, file = CASES[ranks, reference].split(), moe_references / f"{reference}.pt"
    check_case(case, cases, ranks, "invariance_worker.py", moe_model, file, *cases)
