"""Every loss and aggregation with a rollout correction, in every kind of layout: loss, gradients, grad-norm and all metrics.

Why the numbers must not change. Besides what test_layout_invariance.py derives: a sequence's statistic (the ratio of gspo and gmpo, the
correction's importance weight and rejection) is a sum over its tokens, which context parallel ranks add up before anything is made of
it. The weights of the tokens count what the correction kept, on all replicas, before the first micro-batch. Metrics travel as sums and
counts or extrema, so where they were taken does not matter.

The batch has lengths from 1 to the limit, a missing, an aborted, a rejected and a fully masked completion, and masked tokens; clipping
and the KL term act in the second epoch. AdamW's eps is made large, so that the first step amplifies no rounding into the second.

Not covered here: dispatchers and experts, bf16, Transformer Engine, NCCL.
"""

import pytest
import torch
from torchrun_launch import run_torchrun

CASES = {
    1: "cp1:all",
    2: "cp2:all tp2sp:all pp2vpp2:some dp2:some",
    4: "tp2cp2sp:some pp2vpp2cp2:some cp4:some cp2:some",
}


@pytest.fixture(scope="module")
def dense_results(dense_reference, tmp_path_factory):
    """The model, the dense results, and the place of the metrics of one rank."""
    import dense_update

    folder = tmp_path_factory.mktemp("matrix")
    torch.save(dense_update.expected_results(dense_reference[0]), folder / "dense.pt")
    run_torchrun(1, "update_matrix_worker.py", dense_reference[0], folder / "dense.pt", folder / "single.pt", *CASES[1].split())
    return dense_reference[0], folder / "dense.pt", folder / "single.pt"


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_loss_and_aggregation_equals_the_dense_reference_and_one_rank(dense_results, ranks):
    assert "MATRIX EQUAL" in run_torchrun(ranks, "update_matrix_worker.py", *dense_results, *CASES[ranks].split())
