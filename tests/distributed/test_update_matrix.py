"""Every loss and aggregation with a rollout correction, in every kind of layout: loss, gradients, grad-norm
and all metrics.

Why the numbers must not change. Besides what test_layout_invariance.py derives: a sequence's statistic (the
ratio of gspo and gmpo, the correction's importance weight and rejection) is a sum over its tokens, which
context parallel ranks add up before anything is made of it. The weights of the tokens count what the
correction kept, on all replicas, before the first micro-batch. Metrics travel as sums and counts or extrema,
so where they were taken does not matter.

The batch has lengths from 1 to the limit, a missing, an aborted, a rejected and a fully masked completion,
masked tokens, and spans that the policy has not sampled: in the middle of a completion, at both ends of one,
and all of one, which no mean counts and no group's statistics hold. Clipping and KL term act in the second
epoch. AdamW's eps is made large, so that the first step amplifies no rounding into the second.

With experts, an expert's gradient is the sum over the tokens that chose it, wherever they were computed (see
test_moe_invariance.py).

Not covered here: bf16, Transformer Engine, NCCL.
"""

import dense_update
import pytest
import torch
from torchrun_launch import check_case, run_torchrun

DENSE = {
    1: "cp1:all",
    2: "cp2:all tp2sp:all pp2vpp2:some dp2:some",
    4: "tp2cp2sp:some pp2vpp2cp2:some cp4:some cp2:some",
}
MOE = {
    1: "cp1:some",
    2: "ep2:some ep2allgather:some tp2sp:some etp2:some pp2vpp2:some cp2ep2:some",
    4: "tp2spep2:some pp2ep2:some cp2ep4:some ep2etp2:some",
}


def one_rank_first(model, algorithms, cases, folder):
    """Write the dense results and the metrics of one rank; return what the worker takes: model, both
    files.
    """
    torch.save(dense_update.expected_results(model, algorithms), folder / "dense.pt")
    run_torchrun(
        1, "update_matrix_worker.py", model, folder / "dense.pt", folder / "single.pt", *cases.split()
    )
    return model, folder / "dense.pt", folder / "single.pt"


@pytest.fixture(scope="module")
def dense_results(dense_reference, tmp_path_factory):
    return one_rank_first(dense_reference[0], dense_update.ALL, DENSE[1], tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def moe_results(moe_model, tmp_path_factory):
    return one_rank_first(moe_model, dense_update.SOME, MOE[1], tmp_path_factory.mktemp("moe_matrix"))


def cases_of(layouts: str) -> list[str]:
    """Every layout with all losses and aggregations, or with some of them."""
    chosen = {"all": dense_update.ALL, "some": dense_update.SOME}
    split = [layout.split(":") for layout in layouts.split()]
    return [f"{name}:{' '.join(algorithm)}" for name, amount in split for algorithm in chosen[amount]]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in (2, 4) for case in cases_of(DENSE[ranks])]
)
def test_every_loss_and_aggregation_equals_the_dense_reference_and_one_rank(dense_results, ranks, case):
    cases, layouts = cases_of(DENSE[ranks]), DENSE[ranks].split()
    check_case(case, cases, ranks, "update_matrix_worker.py", *dense_results, *layouts)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in (2, 4) for case in cases_of(MOE[ranks])]
)
def test_every_loss_of_a_mixture_of_experts_equals_the_dense_reference_and_one_rank(moe_results, ranks, case):
    cases, layouts = cases_of(MOE[ranks]), MOE[ranks].split()
    check_case(case, cases, ranks, "update_matrix_worker.py", *moe_results, *layouts)
