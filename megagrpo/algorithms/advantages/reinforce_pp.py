"""REINFORCE++: advantages standardised over all tokens of the batch, with or without a group baseline.

Source: "REINFORCE++" (arXiv 2501.03262): A_t = r - beta * (KL of token t and of all behind it), then (A_t -
mean) / std over the tokens of the global batch; the variant with a baseline subtracts the mean reward of the
group first.

A_t differs within a completion by its KL to go alone, so statistics over tokens are sums over completions of
lengths, KL sums and their squares, and no token leaves its rank.

Differences from the paper: with `kl.placement: loss` the KL is a term of the loss, and A_t is one number a
completion. With the group baseline, a group of equal rewards whose KL is not in the reward gets exactly 0.
"""

import torch
from torch import Tensor

from megagrpo.algorithms.advantages.base import (
    AdvantageInputs,
    TokenAdvantages,
    center,
    compute_divisor,
    find_equal_rewards,
    register_estimator,
)


@register_estimator("reinforce_pp", group_baseline=False, needs_lengths=True, kl_to_go=True)
def reinforce_pp(inputs: AdvantageInputs) -> TokenAdvantages:
    """Compute (A_t - mean) / std over all tokens of valid completions, A_t = r - K_t."""
    return standardise_tokens(inputs.rewards, inputs)


@register_estimator("reinforce_pp_baseline", needs_lengths=True, kl_to_go=True)
def reinforce_pp_baseline(inputs: AdvantageInputs) -> TokenAdvantages:
    """Compute (A_t - mean) / std over all tokens of valid completions, A_t = r - mean(r of the group) -
    K_t.
    """
    return standardise_tokens(center(inputs.rewards, inputs.valid), inputs)


def standardise_tokens(values: Tensor, inputs: AdvantageInputs) -> TokenAdvantages:
    """Standardise values - K_t over the loss tokens of the batch; `values` [N, G] float64 is what a
    completion's tokens share. Values that are equal to rounding, without KL, give exactly 0.
    """
    assert inputs.lengths is not None  # compute_advantages has checked
    penalties, valid = inputs.penalties, inputs.valid
    has_kl = penalties is not None and bool(torch.where(valid, penalties.squares, 0.0).any())
    if not has_kl and bool(find_equal_rewards(inputs.rewards.reshape(1, -1), valid.reshape(1, -1))):
        return TokenAdvantages(torch.zeros_like(values), 0.0)
    lengths = torch.where(valid, inputs.lengths, 0.0)
    kl = torch.zeros_like(values) if penalties is None else torch.where(valid, penalties.totals, 0.0)
    kl_squares = torch.zeros_like(values) if penalties is None else torch.where(valid, penalties.squares, 0.0)
    tokens = lengths.sum()
    centred = values - (lengths * values - kl).sum() / tokens.clamp(min=1)
    squares = (lengths * centred.square() - 2 * centred * kl + kl_squares).sum().clamp(min=0)
    divisor = compute_divisor(squares, tokens, inputs.config)
    return TokenAdvantages(centred / divisor, 1 / float(divisor))
