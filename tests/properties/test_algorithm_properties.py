"""Properties that hold for every batch: of advantages, losses, aggregation and KL estimators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithms.advantages import ADVANTAGES, compute_advantages
from megagrpo.algorithms.aggregation import MODES, compute_token_weights
from megagrpo.algorithms.kl import estimate_kl
from megagrpo.algorithms.losses import LOSSES, LossInputs
from megagrpo.config.algorithm_section import AlgorithmConfig

# opo and reinforce_pp: the length-weighted sum is 0
ZERO_SUM = ["grpo", "dr_grpo", "rloo", "gdpo", "pass_at_k"]
SCALE_FREE = ["grpo", "reinforce_pp", "reinforce_pp_baseline", "gdpo"]
SHIFT_FREE = [name for name in ADVANTAGES.names() if name != "pass_at_k"]  # which reads success or failure
# Multiples of 1/8 add and centre without rounding trouble: equal rewards stay equal after a shift.
REWARD = st.integers(-80, 80).map(lambda n: n / 8)
quick = settings(max_examples=40, deadline=None)


@st.composite
def batches(draw):
    """Rewards, ragged validity and lengths of 1 to 4 groups of 2 to 6 completions."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 6))

    def table(element):
        return torch.tensor(
            draw(st.lists(st.lists(element, min_size=size, max_size=size), min_size=groups, max_size=groups))
        )

    return table(REWARD).double(), table(st.booleans()).bool(), table(st.integers(1, 50))


def run(name, rewards, valid, lengths):
    config = AlgorithmConfig(
        advantages=name,
        advantage_options={"k": 2.0} if name == "pass_at_k" else {},
        advantage_std_epsilon=1e-12,
    )
    return compute_advantages(
        rewards, valid, config, lengths=lengths, reward_parts=rewards[:, :, None]
    ).advantages


@pytest.mark.parametrize("name", ZERO_SUM)
@quick
@given(batches())
def test_advantages_of_a_group_sum_to_zero(name, batch):
    advantages = run(name, *batch)
    assert advantages.sum(1).abs().max() <= 1e-9 * max(1.0, float(advantages.abs().max()))


@quick
@given(batches())
def test_opo_advantages_weighted_by_length_sum_to_zero(batch):
    advantages = run("opo", *batch)
    assert (advantages * batch[2]).sum(1).abs().max() <= 1e-9 * 50 * max(1.0, float(advantages.abs().max()))


@quick
@given(batches())
def test_reinforce_pp_advantages_of_all_tokens_sum_to_zero(batch):
    advantages = run("reinforce_pp", *batch)
    assert (advantages * batch[2]).sum().abs() <= 1e-9 * 1200 * max(1.0, float(advantages.abs().max()))


@pytest.mark.parametrize("name", SHIFT_FREE)
@quick
@given(batches(), st.integers(-64, 64))
def test_adding_a_constant_to_all_rewards_changes_nothing(name, batch, shift):
    rewards, valid, lengths = batch
    assert torch.allclose(
        run(name, rewards + shift, valid, lengths), run(name, rewards, valid, lengths), atol=1e-9
    )


@pytest.mark.parametrize("name", SCALE_FREE)
@quick
@given(batches(), st.sampled_from([0.125, 0.5, 3.0, 64.0]))
def test_scaling_all_rewards_changes_nothing_where_they_are_normalised(name, batch, scale):
    rewards, valid, lengths = batch
    assert torch.allclose(
        run(name, rewards * scale, valid, lengths), run(name, rewards, valid, lengths), atol=1e-9
    )


@pytest.mark.parametrize("name", ADVANTAGES.names())
@quick
@given(batches(), st.randoms(use_true_random=False))
def test_order_of_groups_and_completions_does_not_matter(name, batch, random):
    rewards, valid, lengths = batch
    rows, columns = list(range(rewards.shape[0])), list(range(rewards.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    shuffled = run(name, *(table[rows][:, columns] for table in batch))
    assert torch.allclose(shuffled, run(name, rewards, valid, lengths)[rows][:, columns], atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES.names())
@quick
@given(batches(), REWARD)
def test_padding_a_group_with_invalid_completions_changes_nothing(name, batch, filler):
    rewards, valid, lengths = batch
    column = torch.full((rewards.shape[0], 1), filler).double()
    padded = run(
        name,
        torch.cat([rewards, column], 1),
        torch.cat([valid, column > 1e9], 1),
        torch.cat([lengths, torch.ones_like(column).long()], 1),
    )
    assert torch.allclose(padded[:, :-1], run(name, rewards, valid, lengths), atol=1e-12)
    assert padded[:, -1].eq(0).all()


@pytest.mark.parametrize("name", [n for n in ADVANTAGES.names() if ADVANTAGES.get(n).group_baseline])
@quick
@given(batches())
def test_groups_without_a_difference_are_exactly_zero(name, batch):
    rewards, valid, lengths = batch
    assert run(name, rewards[:, :1].expand_as(rewards), valid, lengths).eq(0).all()


@st.composite
def token_batches(draw, min_sequences=1):
    """Sequences of 1 to 6 tokens with old log-probs, log-ratios and one advantage each."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=min_sequences, max_size=5))
    floats = st.floats(-4, 0, width=32)
    total = sum(lengths)
    old = torch.tensor(draw(st.lists(floats, min_size=total, max_size=total))).double()
    log_ratio = torch.tensor(
        draw(st.lists(st.floats(-1, 1, width=32), min_size=total, max_size=total))
    ).double()
    advantages = torch.tensor(
        draw(st.lists(st.floats(-2, 2, width=32), min_size=len(lengths), max_size=len(lengths)))
    ).double()
    return torch.tensor(lengths), old, log_ratio, advantages


def token_losses(name, lengths, old, log_ratio, advantages):
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    actor = (old + log_ratio).requires_grad_()
    loss = LOSSES.get(name)(
        LossInputs(actor, old, advantages[ids], ids, len(lengths), AlgorithmConfig(loss=name))
    ).loss
    loss.sum().backward()
    return loss.detach(), actor.grad


@pytest.mark.parametrize("name", LOSSES.names())
@quick
@given(token_batches())
def test_ratio_one_gives_the_reinforce_gradient(name, batch):
    lengths, old, _, advantages = batch
    _, gradient = token_losses(name, lengths, old, torch.zeros_like(old), advantages)
    assert torch.allclose(gradient, -advantages.repeat_interleave(lengths), rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES.names())
@quick
@given(token_batches(min_sequences=2), st.integers(0, 3))
def test_splitting_a_batch_between_sequences_changes_no_token(name, batch, cut):
    lengths, old, log_ratio, advantages = batch
    cut = 1 + cut % (len(lengths) - 1)
    tokens = int(lengths[:cut].sum())
    whole = token_losses(name, lengths, old, log_ratio, advantages)
    first = token_losses(name, lengths[:cut], old[:tokens], log_ratio[:tokens], advantages[:cut])
    second = token_losses(name, lengths[cut:], old[tokens:], log_ratio[tokens:], advantages[cut:])
    for kind in range(2):
        assert torch.allclose(torch.cat([first[kind], second[kind]]), whole[kind], rtol=1e-12)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("constant", "sequence_sum")])
@quick
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=12))
def test_weights_of_all_tokens_sum_to_one(mode, sequences):
    lengths, groups = (torch.tensor(column) for column in zip(*sequences, strict=True))
    total = float((compute_token_weights(lengths, groups, mode) * lengths).sum())
    assert total == pytest.approx(1.0 if int(lengths.sum()) > 0 else 0.0, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@quick
@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_kl_estimates_are_non_negative(estimator, dtype, logprob, ref_logprob):
    estimate = estimate_kl(
        torch.tensor([logprob], dtype=dtype), torch.tensor([ref_logprob], dtype=dtype), estimator
    )
    assert estimate.item() >= 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@quick
@given(st.floats(-30, 0, width=32))
def test_kl_estimates_are_zero_at_equality(estimator, logprob):
    value = torch.tensor([logprob])
    assert estimate_kl(value, value, estimator).item() == 0
