"""Token losses against their papers' objectives, written as plain loops over sequences in float64 with
autograd.

Each reference is the objective of a whole group, 1/G sum_i ..., so value and gradient test the loss together
with `sequence_mean`.
"""

import math
from dataclasses import replace

import pytest
import torch

from megagrpo.algorithms.aggregation import aggregate_loss, compute_token_weights
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.losses import LOSSES, LossInputs, LossOutput, register_loss
from megagrpo.algorithms.metrics import finalize_metrics
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import UserError

LENGTHS = [1, 7, 4, 12, 3]
ADVANTAGES = [1.0, -0.7, 0.0, 1.3, -1.6]
LOW, HIGH = 0.1, 0.4  # far apart, so that a swap of the two shows


def clip(value, low=1 - LOW, high=1 + HIGH):
    return torch.clamp(value, low, high)


def make_batch(seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
    actor = old + spread * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    sequence_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return actor, old, sequence_ids


def build_inputs(name, actor, old, sequence_ids, **options):
    config = AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH, **options)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[sequence_ids]
    return LossInputs(actor.requires_grad_(), old, advantages, sequence_ids, len(LENGTHS), config)


def ppo_clip_objective(ratios, advantage, logprobs):
    return sum(torch.minimum(r * advantage, clip(r) * advantage) for r in ratios) / len(ratios)


def dual_clip_objective(ratios, advantage, logprobs):
    values = []
    for r in ratios:
        value = torch.minimum(r * advantage, clip(r) * advantage)
        values.append(torch.maximum(value, 1.5 * advantage) if advantage < 0 else value)
    return sum(values) / len(values)


def gspo_objective(ratios, advantage, logprobs):
    s = torch.stack(list(ratios)).prod() ** (1 / len(ratios))
    return torch.minimum(s * advantage, clip(s) * advantage)


def cispo_objective(ratios, advantage, logprobs):
    return sum(clip(r).detach() * advantage * p for r, p in zip(ratios, logprobs, strict=True)) / len(ratios)


def sapo_objective(ratios, advantage, logprobs):
    tau = 1.0 if advantage > 0 else 1.05
    return sum(4 / tau / (1 + torch.exp(-tau * (r - 1))) * advantage for r in ratios) / len(ratios)


def gmpo_objective(ratios, advantage, logprobs):
    """The paper's form: the geometric mean of |min(r A, clip(r) A)| with the sign of A; its clip range is
    (e^-low, e^high).
    """
    product = 1.0
    for r in ratios:
        bounded = clip(r, math.exp(-LOW), math.exp(HIGH))
        product = product * torch.minimum(r * advantage, bounded * advantage).abs()
    sign = (advantage > 0).double() - (advantage < 0).double()
    return product ** (1 / len(ratios)) * sign if sign != 0 else 0.0 * sum(ratios)


def policy_gradient_objective(ratios, advantage, logprobs):
    return sum(advantage * p for p in logprobs) / len(logprobs)


OBJECTIVES = {
    "ppo_clip": (ppo_clip_objective, {}),
    "dual_clip": (dual_clip_objective, {"loss_options": {"dual_clip": 1.5}}),
    "gspo": (gspo_objective, {}),
    "cispo": (cispo_objective, {}),
    "sapo": (sapo_objective, {}),
    "gmpo": (gmpo_objective, {}),
    "policy_gradient": (policy_gradient_objective, {}),
}
ONLY_GRADIENT_IS_THE_PAPERS = {"cispo", "policy_gradient"}  # their value is -w A by design, see their files


def naive_loss(objective, actor, old):
    total, start = 0.0, 0
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        logprobs = actor[start : start + length]
        ratios = torch.exp(logprobs - old[start : start + length])
        total = total + objective(list(ratios), torch.tensor(advantage, dtype=torch.float64), list(logprobs))
        start += length
    return -total / len(LENGTHS)


def sequence_weights(sequence_ids):
    weights = compute_token_weights(
        torch.tensor(LENGTHS), torch.zeros(len(LENGTHS), dtype=torch.int64), "sequence_mean"
    )
    return weights[sequence_ids]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5, 2.0])
def test_loss_and_gradient_equal_the_papers_objective(name, spread):
    objective, options = OBJECTIVES[name]
    actor, old, sequence_ids = make_batch(spread=spread)
    reference_actor = actor.clone().requires_grad_()
    expected = naive_loss(objective, reference_actor, old)
    expected.backward()

    inputs = build_inputs("ppo_clip" if name == "dual_clip" else name, actor, old, sequence_ids, **options)
    loss, _ = aggregate_loss(LOSSES.get(inputs.config.loss)(inputs), sequence_weights(sequence_ids))
    loss.backward()
    assert torch.allclose(actor.grad, reference_actor.grad, rtol=1e-10, atol=1e-14)
    if name not in ONLY_GRADIENT_IS_THE_PAPERS:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-14)


def test_cases_reach_both_clip_sides_and_the_dual_clip():
    """Without this the comparison above could pass on unclipped tokens alone."""
    actor, old, sequence_ids = make_batch(spread=0.5)
    for name in ("ppo_clip", "gspo", "cispo", "gmpo"):
        options = {"loss_options": {"dual_clip": 1.5}} if name == "ppo_clip" else {}
        results = finalize_metrics(
            LOSSES.get(name)(build_inputs(name, actor, old, sequence_ids, **options)).metrics
        )
        assert results["clip_fraction_high"] + results["clip_fraction_low"] > 0, name
        if name == "ppo_clip":
            assert min(results[f"clip_fraction_{side}"] for side in ("low", "high", "dual")) > 0


@pytest.mark.parametrize("name", LOSSES.names())
def test_gradient_at_ratio_one_is_reinforce(name):
    _, old, sequence_ids = make_batch()
    actor = old.clone()
    inputs = build_inputs(name, actor, old, sequence_ids)
    LOSSES.get(name)(inputs).loss.sum().backward()
    assert torch.allclose(actor.grad, -inputs.advantages, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES.names())
def test_token_with_advantage_zero_adds_exactly_nothing(name):
    # ratios far beyond every bound, and beyond exp's range
    actor, old, sequence_ids = make_batch(spread=40.0)
    inputs = build_inputs(name, actor, old, sequence_ids)
    loss = LOSSES.get(name)(inputs).loss
    loss.sum().backward()
    untrained = inputs.advantages == 0
    assert LOSSES.get(name).zero_at_zero_advantage
    assert loss[untrained].eq(0).all() and actor.grad[untrained].eq(0).all()
    assert torch.isfinite(loss).all() and torch.isfinite(actor.grad).all()


@pytest.mark.parametrize("name", LOSSES.names())
def test_ratio_is_against_the_old_policy_and_never_the_reference(name):
    actor, old, sequence_ids = make_batch()
    inputs = build_inputs(name, actor, old, sequence_ids)
    algorithm = Algorithm(inputs.config, 5, 16)
    without = algorithm.token_loss(inputs).loss
    with_reference = LossInputs(
        actor,
        old,
        inputs.advantages,
        sequence_ids,
        len(LENGTHS),
        inputs.config,
        ref_logprobs=old - 5,
        rollout_logprobs=old - 3,
    )
    assert torch.equal(without, algorithm.token_loss(with_reference).loss)
    moved = LossInputs(actor, old - 0.05, inputs.advantages, sequence_ids, len(LENGTHS), inputs.config)
    assert torch.equal(without, algorithm.token_loss(moved).loss) != LOSSES.get(name).uses_old_logprobs


@pytest.mark.parametrize("name", LOSSES.names())
def test_sequences_cut_over_context_parallel_ranks_give_the_same_loss_and_gradient(name):
    """Rank r holds every second token; `sequence_sum` returns the sums over both ranks, as an all-reduce
    would.

    Losses, and gradients of each rank's own tokens, must be those of the uncut batch: no backward
    communication is needed. A real process group is not covered here.
    """
    actor, old, sequence_ids = make_batch()
    recorded, uncut_actor = [], actor.clone()
    uncut = build_inputs(name, uncut_actor, old, sequence_ids)

    def record(values):
        assert not values.requires_grad
        recorded.append(values.new_zeros(len(LENGTHS)).index_add(0, sequence_ids, values))
        return recorded[-1]

    object.__setattr__(uncut, "sequence_sum", record)
    expected = LOSSES.get(name)(uncut).loss
    expected.sum().backward()
    for rank in range(2):
        mine = torch.arange(len(old)) % 2 == rank
        replies, my_actor = iter(recorded), actor[mine].clone().requires_grad_()
        inputs = LossInputs(
            my_actor,
            old[mine],
            uncut.advantages[mine],
            sequence_ids[mine],
            len(LENGTHS),
            uncut.config,
            sequence_sum=lambda values, replies=replies: next(replies),
        )
        loss = LOSSES.get(name)(inputs).loss
        loss.sum().backward()
        assert torch.allclose(loss, expected[mine], rtol=1e-12)
        assert torch.allclose(my_actor.grad, uncut_actor.grad[mine], rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES.names())
def test_rows_taken_alone_have_the_same_loss_unless_the_loss_needs_whole_sequences(name):
    actor, old, sequence_ids = make_batch()
    inputs = build_inputs(name, actor, old, sequence_ids)
    whole = LOSSES.get(name)(inputs).loss
    chunks = [slice(0, 5), slice(5, 18), slice(18, 27)]  # cuts within sequences

    def take(rows):
        return replace(
            inputs,
            actor_logprobs=actor[rows],
            old_logprobs=old[rows],
            advantages=inputs.advantages[rows],
            sequence_ids=sequence_ids[rows],
        )

    alone = torch.cat([LOSSES.get(name)(take(rows)).loss for rows in chunks])
    assert torch.equal(alone, whole) != LOSSES.get(name).needs_whole_sequences


@pytest.mark.parametrize("name", LOSSES.names())
def test_micro_batch_without_tokens_gives_an_empty_loss(name):
    empty = torch.zeros(0, requires_grad=True)
    inputs = LossInputs(
        empty,
        torch.zeros(0),
        torch.zeros(0),
        torch.zeros(0, dtype=torch.int64),
        3,
        AlgorithmConfig(loss=name, kl={"coef": 0.1}),
        ref_logprobs=torch.zeros(0),
    )
    loss, metrics = aggregate_loss(Algorithm(inputs.config, 4, 8).token_loss(inputs), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0.0 and "ratio" not in finalize_metrics(metrics)


def test_ratio_beyond_its_limit_keeps_its_gradient():
    """exp(120) overflows float32; the loss of a token with a negative advantage must still push it down."""
    actor = torch.tensor([-1.0], requires_grad=True)
    inputs = LossInputs(
        actor, torch.tensor([-121.0]), torch.tensor([-1.0]), torch.tensor([0]), 1, AlgorithmConfig()
    )
    LOSSES.get("ppo_clip")(inputs).loss.sum().backward()
    assert math.isfinite(actor.grad.item()) and actor.grad.item() > 1e6


@pytest.mark.parametrize("log_ratios", [(21.0, -21.0), (30.0, -25.0, -5.0), (-60.0, 60.5)])
def test_gspo_takes_the_mean_of_log_ratios_of_any_size(log_ratios):
    """GSPO's s = exp(mean of the log-ratios) is near 1 where large ones cancel, bounded or not."""
    actor = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        actor,
        torch.zeros_like(actor),
        torch.ones_like(actor),
        torch.zeros(len(log_ratios), dtype=torch.int64),
        1,
        AlgorithmConfig(loss="gspo", clip_low=0.5, clip_high=0.5),
    )
    loss = LOSSES.get("gspo")(inputs).loss
    assert loss.tolist() == pytest.approx([-math.exp(sum(log_ratios) / len(log_ratios))] * len(log_ratios))
    loss.sum().backward()
    assert torch.allclose(actor.grad, loss.detach())  # s A grad log pi for each token


def test_gmpo_takes_the_mean_of_log_ratios_of_any_size():
    """With A < 0 only the lower side is clipped: exp((21 - 18) / 2), though 21 and more are beyond exp's
    bound.
    """
    log_ratios, advantage = (21.0, -30.0), -1.0
    actor = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        actor,
        torch.zeros_like(actor),
        torch.full_like(actor, advantage),
        torch.zeros(2, dtype=torch.int64),
        1,
        AlgorithmConfig(loss="gmpo", clip_low=18.0, clip_high=0.4),
    )
    loss = LOSSES.get("gmpo")(inputs).loss
    assert loss.tolist() == pytest.approx([math.exp(1.5)] * 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("old_logprobs", torch.zeros(4)),
        ("advantages", torch.zeros(2)),
        ("sequence_ids", torch.zeros(1, dtype=torch.int64)),
    ],
)
def test_tensor_of_the_wrong_length_is_refused_by_name(field, value):
    good = {
        "actor_logprobs": torch.zeros(3),
        "old_logprobs": torch.zeros(3),
        "advantages": torch.zeros(3),
        "sequence_ids": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(UserError, match=rf"{field}: shape \[{len(value)}\], but actor_logprobs has 3 tokens"):
        LossInputs(**{**good, field: value}, num_sequences=1, config=AlgorithmConfig())


def test_padded_rows_are_refused():
    with pytest.raises(UserError, match="packed tokens"):
        LossInputs(*[torch.zeros(2, 3)] * 3, torch.zeros(2, 3, dtype=torch.int64), 2, AlgorithmConfig())


def test_registered_loss_gets_its_options(monkeypatch):
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))  # the registration ends with this test

    @register_loss("test_scaled", options={"scale": 1.0})
    def scaled(inputs):
        return LossOutput(-inputs.option("scale") * inputs.advantages * inputs.actor_logprobs)

    actor, old, sequence_ids = make_batch()
    inputs = build_inputs("test_scaled", actor, old, sequence_ids, loss_options={"scale": 3.0})
    assert torch.equal(
        Algorithm(inputs.config, 5, 16).token_loss(inputs).loss, -3 * inputs.advantages * actor
    )
