"""REINFORCE++ with KL to go (arXiv 2501.03262) in every kind of layout: loss, gradients and grad-norm of two
updates against plain float64.

Why the numbers must not change. The KL to go of a token is a sum over the later tokens of its sequence, on
whatever context parallel ranks they are; each rank adds its own up and the sums of later chunks come from the
others. The statistics over all tokens are sums over completions, which all ranks gather, so they are those of
the global batch. The batch has missing, aborted, rejected and partly masked completions (see
test_update_matrix.py): what does not train is in no statistic, but its KL is part of what follows a token.
"""

import dense_token_advantages as dense
import pytest
import torch
from torchrun_launch import check_case

LAYOUTS = {1: "cp1", 2: "cp2 tp2sp dp2 pp2vpp2", 4: "cp4 tp2cp2sp pp2cp2"}
CASES = [
    (ranks, f"{layout}:{estimator} {dense.AGGREGATION}")
    for ranks, layouts in LAYOUTS.items()
    for layout in layouts.split()
    for estimator in dense.ESTIMATORS
]


@pytest.fixture(scope="module")
def dense_results(dense_reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("token_advantages")
    reference = dense.write_reference(dense_reference[0], folder / "reference")
    torch.save(dense.expected_results(dense_reference[0], reference), folder / "dense.pt")
    return dense_reference[0], reference, folder / "dense.pt"


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_advantages_of_tokens_equal_the_dense_reference(dense_results, ranks, case):
    cases = [name for count, name in CASES if count == ranks]
    check_case(case, cases, ranks, "token_advantages_worker.py", *dense_results, *LAYOUTS[ranks].split())
