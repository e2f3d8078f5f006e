"""The gathered algorithm: how its terms combine, what it tells the trainer it needs, and its checks."""

import pytest
import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.losses import LOSSES, LossInputs
from megagrpo.algorithms.metrics import finalize_metrics
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import ConfigError, UserError


def build(completions_per_prompt=4, max_new_tokens=100, **values):
    return Algorithm(AlgorithmConfig(**values), completions_per_prompt, max_new_tokens)


def make_inputs(config, **extra):
    generator = torch.Generator().manual_seed(5)
    old = -torch.rand(6, generator=generator).double()
    actor = (old + 0.1 * torch.randn(6, generator=generator).double()).requires_grad_()
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    return LossInputs(actor, old, torch.tensor([1.0, -1.0]).double()[ids], ids, 2, config, **extra)


def test_terms_add_up_to_the_loss():
    entropy = torch.rand(6).double().requires_grad_()
    algorithm = build(kl={"coef": 0.2}, entropy_coef=0.01)
    inputs = make_inputs(algorithm.config, ref_logprobs=torch.full((6,), -0.5).double(), entropy=entropy)
    output = algorithm.token_loss(inputs)
    policy = build().token_loss(make_inputs(AlgorithmConfig())).loss
    u = -0.5 - inputs.actor_logprobs
    assert torch.allclose(output.loss, policy + 0.2 * (u.exp() - u - 1) - 0.01 * entropy)
    assert torch.allclose(sum(output.terms.values()), output.loss)
    output.loss.sum().backward()
    assert torch.allclose(entropy.grad, torch.full((6,), -0.01).double())


def test_exact_kl_is_taken_as_it_is():
    algorithm = build(kl={"coef": 0.5, "estimator": "exact"})
    exact = torch.rand(6).double().requires_grad_()
    output = algorithm.token_loss(make_inputs(algorithm.config, exact_kl=exact))
    output.loss.sum().backward()
    assert algorithm.needs_exact_kl and torch.equal(exact.grad, torch.full((6,), 0.5).double())


def test_correction_weights_scale_the_policy_term_alone():
    algorithm = build(kl={"coef": 0.2}, correction={"importance": "token"})
    weights, reference = torch.rand(6).double(), torch.full((6,), -0.5).double()
    plain = algorithm.token_loss(make_inputs(algorithm.config, ref_logprobs=reference))
    corrected = algorithm.token_loss(
        make_inputs(algorithm.config, ref_logprobs=reference, correction_weights=weights)
    )
    assert torch.allclose(corrected.terms["policy"], plain.terms["policy"] * weights)
    assert torch.equal(corrected.terms["kl"], plain.terms["kl"])


def test_gap_to_the_engine_is_reported():
    inputs = make_inputs(AlgorithmConfig(), rollout_logprobs=torch.full((6,), -0.4).double())
    results = finalize_metrics(build().token_loss(inputs).metrics)
    gap = (inputs.actor_logprobs.detach() + 0.4).abs()
    assert results["actor_rollout_gap"] == pytest.approx(gap.mean().item())
    assert results["actor_rollout_gap_max"] == pytest.approx(gap.max().item())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"kl": {"coef": 0.1}}, "ref_logprobs"),
        ({"kl": {"coef": 0.1, "estimator": "exact"}}, "exact_kl"),
        ({"entropy_coef": 0.1}, "entropy"),
    ],
)
def test_missing_input_is_named(values, field):
    algorithm = build(**values)
    with pytest.raises(UserError, match=f"{field}: missing"):
        algorithm.token_loss(make_inputs(algorithm.config))


@pytest.mark.parametrize(
    ("values", "reference", "old", "skip"),
    [
        ({}, False, True, True),
        ({"kl": {"coef": 0.1}}, True, True, False),
        ({"kl": {"coef": 0.1, "estimator": "k1", "placement": "reward"}}, True, True, True),
        ({"entropy_coef": 0.1}, False, True, False),
        ({"old_logprobs": "engine"}, False, False, True),
        ({"loss": "policy_gradient"}, False, False, True),
        ({"loss": "policy_gradient", "correction": {"importance": "token"}}, False, True, True),
        # a skipped completion's masked tokens would count
        ({"correction": {"band_high": 5.0}}, False, True, False),
    ],
)
def test_trainer_is_told_what_is_needed(values, reference, old, skip):
    algorithm = build(**values)
    assert (algorithm.needs_reference, algorithm.needs_old_logprobs, algorithm.can_skip_zero_advantage) == (
        reference,
        old,
        skip,
    )


def test_rejections_are_known_before_the_advantages():
    assert build(correction={"veto_below": 1e-4}).correction_before_advantages
    assert not build(correction={"importance": "token", "band_high": 5.0}).correction_before_advantages


def test_overlong_shaping_falls_back_to_a_fifth_of_the_limit():
    lengths, cut = torch.tensor([[80, 90]]), torch.tensor([[False, False]])
    assert build(overlong={"penalty": 1.0}).shape_rewards(torch.ones(1, 2), lengths, cut).tolist() == [
        [1.0, 0.5]
    ]
    rewards = torch.ones(1, 2)
    assert build().shape_rewards(rewards, lengths, cut) is rewards


def test_overlong_masking_is_off_unless_asked():
    valid, cut = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[True, False]])
    assert build().mask_completions(valid, cut).tolist() == [[True, True]]
    assert build(overlong={"mask": True}).mask_completions(valid, cut).tolist() == [[False, True]]


def test_kl_in_the_reward_is_measured_on_the_tokens_it_was_taken_from():
    algorithm = build(kl={"coef": 0.2, "estimator": "k1", "placement": "reward"})
    old, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.7])
    measured = finalize_metrics(algorithm.measure_kl_penalty(old, reference))["ref_kl"]
    penalty = algorithm.kl_penalty(old, reference, torch.tensor([0, 0, 1]), 2)
    assert measured == pytest.approx((0.5 - 1.0 + 0.2) / 3, rel=1e-6)
    assert penalty.tolist() == pytest.approx([0.2 * -0.5, 0.2 * 0.2], rel=1e-6)


def test_adaptive_coefficient_survives_a_checkpoint():
    values = {"kl": {"coef": 0.1, "adaptive_target": 0.01}}
    algorithm = build(**values)
    algorithm.update_kl(1.0)
    resumed = build(**values)
    resumed.load_state_dict(algorithm.state_dict())
    assert resumed.kl_coef == algorithm.kl_coef != 0.1


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        build(
            completions_per_prompt=1,
            max_new_tokens=10,
            loss="ppo_clpi",
            advantage_options={"kk": 3},
            overlong={"penalty": 1.0, "buffer_tokens": 11},
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in (
        "did you mean ppo_clip",
        "grpo compares completions",
        "kk: not an option of grpo; it takes no options",
        "must be 1 to",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"advantages": "grpoo"}, "did you mean grpo"),
        ({"loss_options": {"dual_clp": 3.0}}, "dual_clp: not an option of ppo_clip; did you mean dual_clip"),
        ({"loss_options": {"dual_clip": 0.5}}, "dual_clip: 0.5; must be above 1"),
        ({"loss": "sapo", "loss_options": {"tau_positive": 0.0}}, "must be above 0"),
        ({"advantages": "gdpo", "overlong": {"penalty": 1.0}}, "gdpo normalises each reward apart"),
        (
            {"advantages": "gdpo", "kl": {"coef": 0.1, "placement": "reward"}},
            "gdpo normalises each reward apart",
        ),
        (
            {"advantages": "pass_at_k", "advantage_options": {"k": 5}},
            "k: 5; must be 1 to rollout.completions_per_prompt = 4",
        ),
    ],
)
def test_mistake_is_named_with_its_place(values, message):
    with pytest.raises(ConfigError, match=message):
        build(**values)


CUSTOM_LOSS = """
from megagrpo.algorithms.losses import LossOutput, register_loss

@register_loss("test_from_a_file", options={"scale": 1.0})
def scaled(inputs):
    return LossOutput(-inputs.option("scale") * inputs.advantages * inputs.actor_logprobs)

def plain(inputs):
    return scaled(inputs)
"""


def test_loss_is_found_by_the_place_of_its_function(tmp_path, monkeypatch):
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))  # the registration ends with this test
    (tmp_path / "mine.py").write_text(CUSTOM_LOSS)
    algorithm = build(loss=f"{tmp_path}/mine.py:scaled", loss_options={"scale": 2.0})
    inputs = make_inputs(algorithm.config)
    assert torch.equal(algorithm.token_loss(inputs).loss, -2 * inputs.advantages * inputs.actor_logprobs)
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.loss: .*mine\.py:plain: is no loss: the function is not decorated",
    ):
        build(loss=f"{tmp_path}/mine.py:plain")
    with pytest.raises(ConfigError, match=r"algorithm\.loss: .*no file"):
        build(loss=f"{tmp_path}/missing.py:plain")


@pytest.mark.parametrize("values", [{"clip_low": 0.0}, {"clip_high": -0.1}, {"aggregation": "constant"}])
def test_configuration_refuses_impossible_values(values):
    with pytest.raises(ValueError):
        AlgorithmConfig(**values)
