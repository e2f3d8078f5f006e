"""The worked numbers of the GRPO and DAPO literature, recomputed with the public functions at the
tolerance that each states.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import compute_advantages
from megagrpo.algorithms.advantages.pass_at_k import compute_pass_at_k
from megagrpo.algorithms.aggregation import aggregate_loss, compute_token_weights
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.kl import estimate_kl
from megagrpo.algorithms.losses import LOSSES, LossInputs
from megagrpo.algorithms.metrics import finalize_metrics
from megagrpo.config.algorithm_section import AlgorithmConfig

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize(
    "row", GOLDEN["advantages"], ids=lambda row: f"{row['estimator']}-{row.get('std', '')}-{row['rewards']}"
)
def test_advantages_equal_the_worked_numbers(row):
    config = AlgorithmConfig(advantages=row["estimator"], advantage_std=row.get("std", "population"))
    rewards = torch.tensor([row["rewards"]], dtype=torch.float64)
    advantages = compute_advantages(rewards, torch.ones_like(rewards, dtype=torch.bool), config).advantages[0]
    assert (advantages - torch.tensor(row["expect"], dtype=torch.float64)).abs().max() <= row["atol"]


@pytest.mark.parametrize(
    "row", GOLDEN["clip"], ids=lambda row: f"ratio-{row['ratio']}-advantage-{row['advantage']}"
)
def test_clipped_surrogate_equals_the_worked_number_and_has_no_gradient(row):
    config = AlgorithmConfig(clip_low=row["clip_low"], clip_high=row["clip_high"])
    old = torch.tensor([-1.0], dtype=torch.float64)
    actor = (old + math.log(row["ratio"])).requires_grad_()
    inputs = LossInputs(
        actor, old, torch.tensor([float(row["advantage"])]).double(), torch.tensor([0]), 1, config
    )
    loss = LOSSES.get("ppo_clip")(inputs).loss
    loss.sum().backward()
    assert -loss.item() == pytest.approx(row["surrogate"], abs=1e-12)
    assert (actor.grad.item() == 0) == row["gradient_is_zero"]


def test_aggregation_weights_equal_the_worked_numbers():
    golden = GOLDEN["aggregation"]
    lengths, group = torch.tensor(golden["lengths"]), torch.zeros(4, dtype=torch.int64)
    token_mean = compute_token_weights(lengths, group, "token_mean")
    assert token_mean.tolist() == pytest.approx([golden["token_mean_weight_per_token"]] * 4, rel=1e-12)
    sequence_mean = compute_token_weights(lengths, group, "sequence_mean")
    assert sequence_mean.tolist() == pytest.approx(golden["sequence_mean_weight_per_token"], rel=1e-12)


def test_k3_equals_the_worked_number_and_is_not_the_naive_log_ratio():
    ratio = 1.2  # reference / policy
    reference = torch.tensor([-1.0], dtype=torch.float64)
    k3 = estimate_kl(reference - math.log(ratio), reference, "k3").item()
    assert k3 == pytest.approx(GOLDEN["kl"]["k3_at_ratio_1.2"], abs=5e-8)  # the source prints seven decimals
    assert k3 != pytest.approx(-math.log(ratio), abs=0.1)


def test_sampled_k3_of_a_certain_policy_is_not_the_exact_kl():
    policy, reference = (
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([math.log(0.5)], dtype=torch.float64),
    )
    sampled = estimate_kl(policy, reference, "k3").item()
    # the policy has one possible token: k1 of it is the whole sum
    exact = estimate_kl(policy, reference, "k1").item()
    assert sampled == pytest.approx(
        GOLDEN["kl"]["k3_sampled_when_policy_is_1_0_and_reference_is_half_half"], abs=5e-8
    )
    assert exact == pytest.approx(GOLDEN["kl"]["exact_forward_kl_of_the_same"], abs=5e-8)


@pytest.mark.parametrize("loss_name", ["ppo_clip", "gspo", "cispo", "gmpo", "policy_gradient"])
def test_first_step_has_loss_zero_and_a_gradient(loss_name):
    """Actor == old == reference: ratios are 1, KL is 0, the centred advantages cancel (equal lengths), the
    gradient does not.
    """
    algorithm = Algorithm(
        AlgorithmConfig(loss=loss_name, kl={"coef": 0.1}), completions_per_prompt=4, max_new_tokens=8
    )
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    advantages = (
        algorithm.advantages(rewards, torch.ones(2, 4, dtype=torch.bool)).advantages.flatten().float()
    )
    sequence_ids = torch.arange(8).repeat_interleave(5)
    old = -torch.rand(40, generator=torch.Generator().manual_seed(0))
    actor = old.clone().requires_grad_()
    inputs = LossInputs(
        actor, old, advantages[sequence_ids], sequence_ids, 8, algorithm.config, ref_logprobs=old
    )
    weights = algorithm.token_weights(torch.full((8,), 5), torch.arange(2).repeat_interleave(4))
    loss, metrics = aggregate_loss(algorithm.token_loss(inputs), weights[sequence_ids])
    loss.backward()
    results = finalize_metrics(metrics)
    assert abs(loss.item()) <= 1e-6
    assert actor.grad.abs().max() > 0.01
    assert (results["ratio_min"], results["ratio_max"], results["ref_kl"], results["old_kl"]) == (
        1.0,
        1.0,
        0.0,
        0.0,
    )
    assert results.get("clip_fraction", 0.0) == 0.0


def test_loss_of_an_unmoved_actor_is_the_coefficient_times_the_mean_k3():
    algorithm = Algorithm(AlgorithmConfig(kl={"coef": 0.3}, aggregation="token_mean"), 4, 8)
    generator = torch.Generator().manual_seed(1)
    old, reference = (
        -torch.rand(20, generator=generator).double(),
        -torch.rand(20, generator=generator).double(),
    )
    sequence_ids = torch.arange(4).repeat_interleave(5)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0]).double()[sequence_ids]
    inputs = LossInputs(
        old.clone().requires_grad_(),
        old,
        advantages,
        sequence_ids,
        4,
        algorithm.config,
        ref_logprobs=reference,
    )
    weights = algorithm.token_weights(torch.full((4,), 5), torch.zeros(4, dtype=torch.int64))
    loss, _ = aggregate_loss(algorithm.token_loss(inputs), weights[sequence_ids])
    u = [float(r - p) for r, p in zip(reference, old, strict=True)]
    assert loss.item() == pytest.approx(0.3 * sum(math.exp(x) - x - 1 for x in u) / 20, rel=1e-9)


def test_pass_at_k_equals_the_worked_number():
    golden = GOLDEN["pass_at_k"]
    assert compute_pass_at_k(golden["n"], golden["c"], golden["k"]) == golden["expect"]
