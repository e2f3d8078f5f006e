"""Check the inputs, run the configured estimator, zero what carries no signal, and count it."""

import torch
from torch import Tensor

from megagrpo.algorithms.advantages.base import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageResult,
    Estimator,
    PenaltySums,
    TokenAdvantages,
    find_equal_rewards,
)
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import UserError


def compute_advantages(
    rewards: Tensor,
    valid: Tensor,
    config: AlgorithmConfig,
    *,
    lengths: Tensor | None = None,
    reward_parts: Tensor | None = None,
    part_weights: Tensor | None = None,
    penalties: PenaltySums | None = None,
) -> AdvantageResult:
    """Compute the advantage of every completion of the step.

    Args:
        rewards: [N, G] float32 or float64; values at invalid positions are ignored, NaN too.
        valid: [N, G] bool; False for rejected, aborted or missing completions.
        config: estimator, standard deviation and its floor, the estimator's constants.
        lengths: [N, G] trained tokens per completion; `opo` and the REINFORCE++ estimators need them.
        reward_parts: [N, G, R] one column per reward; `gdpo` needs them.
        part_weights: [R] weights of the columns; default all 1.
        penalties: KL in the reward, for an estimator with `kl_to_go`.

    Returns:
        advantages [N, G] float64: exactly 0 for invalid completions, and for a group baseline also in groups
            with fewer than 2 valid
        members or with equal rewards (never the raw reward, never a difference blown up by a small standard
        deviation), unless KL tells its completions apart; counters; what a token's KL to go is scaled by.

    Raises:
        UserError: an unknown estimator, shapes that do not match, a NaN or infinite reward (the row is
            named), a group baseline with G = 1, or an input that the estimator needs and does not get.
    """
    estimator = ADVANTAGES.find(config.advantages)
    _check_shapes(rewards, valid, lengths, reward_parts, part_weights)
    _check_needs(config, estimator, rewards.shape[1], lengths, reward_parts)
    _check_finite("rewards", rewards, valid)
    equal = find_equal_rewards(rewards, valid)
    if reward_parts is not None:
        _check_finite("reward_parts", reward_parts, valid[:, :, None])
        if estimator.needs_parts:
            equal = find_equal_rewards(reward_parts, valid)
        if part_weights is None:
            part_weights = torch.ones(reward_parts.shape[2])
    inputs = AdvantageInputs(
        rewards=torch.where(valid, rewards, 0.0).double(),
        valid=valid,
        config=config,
        options={**estimator.options, **config.advantage_options},
        lengths=None if lengths is None else lengths.double(),
        reward_parts=None
        if reward_parts is None
        else torch.where(valid[:, :, None], reward_parts, 0.0).double(),
        part_weights=None if part_weights is None else part_weights.double(),
        penalties=penalties,
    )
    found = estimator.function(inputs)
    by_token = found if isinstance(found, TokenAdvantages) else TokenAdvantages(found, 0.0)
    advantages = torch.where(valid, by_token.completions, 0.0)
    if estimator.group_baseline and penalties is None:
        advantages = torch.where(equal[:, None], 0.0, advantages)
    too_small = valid.sum(1) < 2
    counters = {
        "groups": rewards.shape[0],
        "groups_too_small": int(too_small.sum()),
        "groups_equal_rewards": int((equal & ~too_small).sum()),
        "completions_invalid": int((~valid).sum()),
    }
    return AdvantageResult(advantages, counters, by_token.penalty_scale)


def _check_shapes(
    rewards: Tensor,
    valid: Tensor,
    lengths: Tensor | None,
    reward_parts: Tensor | None,
    part_weights: Tensor | None,
) -> None:
    if rewards.dim() != 2:
        raise UserError(f"rewards: shape {list(rewards.shape)}; must be [prompts, completions per prompt]")
    if not rewards.is_floating_point():
        raise UserError(f"rewards: {rewards.dtype}; must be float32 or float64")
    if valid.dtype != torch.bool:
        raise UserError(f"valid: {valid.dtype}; must be bool")
    shapes = {
        "valid": valid,
        "lengths": lengths,
        "reward_parts": None if reward_parts is None else reward_parts[..., 0],
    }
    for name, value in shapes.items():
        if value is not None and value.shape != rewards.shape:
            raise UserError(
                f"{name}: shape {list(value.shape)}, but rewards has {list(rewards.shape)}; "
                "rows and columns must agree"
            )
    if reward_parts is not None and part_weights is not None and part_weights.shape != reward_parts.shape[2:]:
        raise UserError(
            f"part_weights: {part_weights.numel()} weights for {reward_parts.shape[2]} rewards; "
            "must be one each"
        )


def _check_needs(
    config: AlgorithmConfig,
    estimator: Estimator,
    completions_per_prompt: int,
    lengths: Tensor | None,
    reward_parts: Tensor | None,
) -> None:
    name = f"algorithm.advantages: {config.advantages}"
    if estimator.group_baseline and completions_per_prompt < 2:
        raise UserError(
            f"{name} compares completions of one prompt; rollout.completions_per_prompt is 1 "
            "and must be at least 2"
        )
    if estimator.needs_lengths and lengths is None:
        raise UserError(f"{name} needs the completions' lengths")
    if estimator.needs_parts and reward_parts is None:
        raise UserError(f"{name} needs each reward apart (reward_parts)")


def _check_finite(name: str, values: Tensor, valid: Tensor) -> None:
    bad = valid & ~torch.isfinite(values)
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise UserError(
            f"{name}{index}: {float(values[tuple(index)])}; the reward of a valid completion must be finite"
        )
