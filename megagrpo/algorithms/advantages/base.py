"""The contract of an advantage estimator, and the group statistics that estimators share.

Everything here works on metadata: rewards [N, G] of all groups of the step, equal on every rank, in float64
on CPU. Groups may be ragged: completions with `valid = False` (rejected, aborted, missing) take no part in
any statistic and get advantage 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.registry import Registry

# Values that differ by a few rounding errors are equal: their difference is no signal. The errors are those
# that float32 makes, for float64 values too: a reward model's float32 score comes here as a Python number.
EQUAL_ULPS = 8
ROUNDING = EQUAL_ULPS * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class PenaltySums:
    """KL that is taken from the rewards token by token, as statistics over tokens need it: sums over each
    completion's loss tokens of K_t, the penalty of token t and of all tokens behind it.
    """

    totals: Tensor  # [N, G] float64: sum of K_t
    squares: Tensor  # [N, G] float64: sum of K_t^2


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of an estimator that takes KL token by token: that of token t is
    `completions - penalty_scale * K_t`.
    """

    completions: Tensor  # [N, G] float64
    penalty_scale: float


@dataclass(frozen=True)
class AdvantageInputs:
    """Checked inputs of an estimator; values at invalid positions are 0."""

    rewards: Tensor  # [N, G] float64
    valid: Tensor  # [N, G] bool
    config: AlgorithmConfig
    options: Mapping[str, float]  # the estimator's constants: the user's, else its defaults
    lengths: Tensor | None = None  # [N, G] float64 trained tokens per completion
    reward_parts: Tensor | None = None  # [N, G, R] float64, one column per reward
    part_weights: Tensor | None = None  # [R] float64
    penalties: PenaltySums | None = None  # the KL in the reward, where the estimator takes it by token


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages and what happened to the groups."""

    advantages: Tensor  # [N, G] float64; exactly 0 at invalid positions and in degenerate groups
    counters: Mapping[str, int]  # groups, groups_too_small, groups_equal_rewards, completions_invalid
    penalty_scale: float = 0.0  # that of `TokenAdvantages`


@dataclass(frozen=True)
class Estimator:
    """A registered estimator: its function and what it needs."""

    function: Callable[[AdvantageInputs], Tensor | TokenAdvantages]
    # compares completions of one group: needs 2, and a group without differences gets exactly 0
    group_baseline: bool
    needs_lengths: bool
    needs_parts: bool
    kl_to_go: bool  # KL in the reward comes as `penalties`, not as a part of `rewards`
    options: Mapping[str, float] = field(default_factory=dict)


Function = TypeVar("Function", bound=Callable[[AdvantageInputs], Tensor | TokenAdvantages])

ADVANTAGES: Registry[Estimator] = Registry(
    "advantage estimator", read=lambda function: ADVANTAGES.entry_of(function)
)


def register_estimator(
    name: str,
    group_baseline: bool = True,
    needs_lengths: bool = False,
    needs_parts: bool = False,
    kl_to_go: bool = False,
    options: Mapping[str, float] | None = None,
) -> Callable[[Function], Function]:
    """Register an estimator under `name`, with the constants that `algorithm.advantage_options` may set."""

    def add(function: Function) -> Function:
        ADVANTAGES.register(name)(
            Estimator(function, group_baseline, needs_lengths, needs_parts, kl_to_go, dict(options or {}))
        )
        return function

    return add


def count_valid(valid: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the number of valid entries along `dim`, kept, float64, at least 1 so that it can divide."""
    return valid.sum(dim, keepdim=True).clamp(min=1).to(torch.float64)


def compute_mean(values: Tensor, valid: Tensor, dim: int | tuple[int, ...] = 1) -> Tensor:
    """Return the mean of the valid entries along `dim`, kept; 0 where there is none."""
    return torch.where(valid, values, 0.0).sum(dim, keepdim=True) / count_valid(valid, dim)


def center(values: Tensor, valid: Tensor, dim: int | tuple[int, ...] = 1) -> Tensor:
    """Return values - mean over the valid entries along `dim`; 0 at invalid entries."""
    return torch.where(valid, values - compute_mean(values, valid, dim), 0.0)


def normalize(
    centered: Tensor, valid: Tensor, config: AlgorithmConfig, dim: int | tuple[int, ...] = 1
) -> Tensor:
    """Divide centred values by their floored standard deviation along `dim`; 0 where it is 0."""
    squares = torch.where(valid, centered, 0.0).square().sum(dim, keepdim=True)
    return centered / compute_divisor(squares, valid.sum(dim, keepdim=True), config)


def compute_divisor(squares: Tensor, count: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the floored standard deviation of `count` values whose squared deviations add up to `squares`;
    infinite where it is 0, so that what is divided by it is no advantage.

    population divides the squares by n, sample by n - 1; the floor is std + epsilon (`add`) or max(std,
    epsilon) (`max`).
    """
    correction = 1 if config.advantage_std == "sample" else 0
    std = (squares / (count - correction).clamp(min=1)).sqrt()
    epsilon = config.advantage_std_epsilon
    floored = std + epsilon if config.advantage_std_floor == "add" else std.clamp(min=epsilon)
    return torch.where(std > 0, floored, torch.inf)


def find_equal_rewards(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return for each group whether its valid rewards are all equal to the rounding of float32 [N]; true
    for groups with fewer than 2 valid members.

    Args:
        rewards: [N, G], or [N, G, R] where all R rewards must be equal each; invalid entries are ignored, NaN
            too.
        valid: [N, G] bool.
    """
    if rewards.dim() == 3:
        return torch.stack([find_equal_rewards(part, valid) for part in rewards.unbind(2)]).all(0)
    high = torch.where(valid, rewards, -torch.inf).amax(1)
    low = torch.where(valid, rewards, torch.inf).amin(1)
    largest = torch.where(valid, rewards, 0.0).abs().amax(1)
    return (high - low <= ROUNDING * largest) | (valid.sum(1) < 2)
