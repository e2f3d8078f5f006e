"""The layout never changes the answer: GRPO against a dense float64 reference, on 1, 2 and 4 ranks.

Why the numbers must not change. The loss is a sum over tokens of weight * token loss, and the weights hold
the one denominator of the whole mini-batch. A micro-batch split or a data parallel split partitions this sum;
Megatron adds the parts without dividing. Tensor parallelism splits GEMMs and the soft-max normaliser,
pipeline parallelism cuts the layer stack, in any chunks; both compute the same function. Context parallelism
shares the tokens out: each row attends the gathered keys that it would see on one rank, and the gradients of
the keys are summed back. A shared prompt is read by the same attention rows as its copies would be, and its
gradient is the sum over its completions either way. Overlap and recompute change when something is computed,
not what. So only the order of float32 additions differs.

The completions are ragged (1 to 13 tokens), one group has equal rewards (its tokens still have a KL
gradient), each update clips some tokens, and two passes over two mini-batches make the ratio differ from 1.

Not covered here: bf16, Transformer Engine and NCCL (GPU only); expert parallelism.
"""

import pytest
from torchrun_launch import check_case

CASES = {
    1: "cp1:packed cp1:tiny cp1:unshared cp1:unpacked full:packed selective:packed",
    2: "tp2:packed tp2sp:tiny pp2:packed pp2:unpacked pp2vpp2:packed pp2vpp2:equal pp2=Et*3|tL:unpacked "
    "cp2:unshared cp2:tiny dp2:tiny dp2overlap:unpacked",
    4: "tp2pp2:packed tp2pp2sp:tiny tp2:unshared pp2:tiny pp4:packed dp4:packed tp2cp2sp:packed "
    "tp2cp2sp:unpacked cp2:unpacked pp2vpp2cp2:tiny tp2pp2vpp2sp:packed pp2vpp2overlap:unshared "
    "pp4=E|tt|tt|L:packed pp4uneven:packed",
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in CASES for case in CASES[ranks].split()]
)
def test_losses_norms_and_weights_equal_the_dense_reference(dense_reference, ranks, case):
    cases = CASES[ranks].split()
    check_case(case, cases, ranks, "invariance_worker.py", *dense_reference, *cases)
