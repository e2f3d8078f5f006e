"""Completions at the length limit: DAPO's soft punishment, and overlong masking.

Source: DAPO (arXiv 2503.14476), Eq. 13 (soft overlong punishment) and Section 3.4 (overlong filtering).

Differences from the paper: the deduction is scaled by `penalty` (the paper's is 1), and a completion that was
cut (by the limit or by the context) gets all of it. Masking makes the completion invalid, so it leaves the
group's statistics as well as the loss.
"""

import torch
from torch import Tensor

from megagrpo.errors import UserError


def compute_overlong_penalty(
    lengths: Tensor, finish_by_length: Tensor, max_new_tokens: int, buffer_tokens: int, penalty: float
) -> Tensor:
    """Compute what is added to each reward: 0 up to max_new_tokens - buffer_tokens, then linear down to
    -penalty at max_new_tokens.

    Args:
        lengths: [...] tokens per completion.
        finish_by_length: [...] bool, cut instead of finished.
        max_new_tokens: L_max of the paper, the limit of a completion (20480 there).
        buffer_tokens: L_cache of the paper, the last tokens before the limit (4096 there).
        penalty: largest deduction, 0 or more.

    Returns:
        [...] float64, between -penalty and 0.

    Raises:
        UserError: a buffer of 0, or longer than the limit.
    """
    if problem := buffer_problem(buffer_tokens, max_new_tokens):
        raise UserError(problem)
    excess = lengths.to(torch.float64) - (max_new_tokens - buffer_tokens)
    share = torch.where(finish_by_length, 1.0, (excess / buffer_tokens).clamp(0, 1))
    return -penalty * share


def buffer_problem(buffer_tokens: int, max_new_tokens: int) -> str | None:
    """Return what is wrong with the buffer, None where it fits into the limit."""
    if 1 <= buffer_tokens <= max_new_tokens:
        return None
    return (
        f"algorithm.overlong.buffer_tokens: {buffer_tokens}; must be 1 to "
        f"rollout.max_new_tokens = {max_new_tokens}"
    )


def mask_overlong(valid: Tensor, finish_by_length: Tensor) -> Tensor:
    """Return `valid` [...] without the completions that were cut by the limit."""
    return valid & ~finish_by_length
