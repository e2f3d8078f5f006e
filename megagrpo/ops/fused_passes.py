"""The elementwise passes over a tile of logits in one kernel each, for accelerators.

On a CPU a tile stays in cache between the passes, and they run one after the other, in place
(`RowStatistics`, `LogitGradient`). On an accelerator a tile lies in memory: one after the other, the
statistics with their entropy read or write it nine times and the gradient eight; fused by `torch.compile`
they read it twice, and read and write it once.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Takes the place of -inf, the logit of a masked token, and of "no column seen yet": its probability is
# exactly 0, and 0 * log 0 and -inf - -inf, which would be NaN, never appear.
LOWEST_LOGIT = -1e30


def is_fused(device: torch.device) -> bool:
    """Whether tiles on `device` take the fused passes."""
    return device.type != "cpu"


def tile_statistics(x: Tensor, maximum: Tensor, with_moment: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Raise the maximum to the tile's and sum relative to it; see `row_statistics` for what the sums are.

    Args:
        x: [R, C] base-2 logits.
        maximum: [R] of the tiles before.
        with_moment: also return the moment.

    Returns:
        The raised maximum [R], and of this tile alone total [R] and moment [R] or None.
    """
    return _compiled(_statistics)(x, maximum, with_moment)


def tile_gradient_(x: Tensor, log2_normaliser: Tensor, constant: Tensor, slope: Tensor | None) -> None:
    """X [R, C] = p (constant + slope log2 p) with p = 2^(x - log2_normaliser); all others are [R, 1]."""
    _compiled(_gradient_)(x, log2_normaliser, constant, slope)


def _statistics(x: Tensor, maximum: Tensor, with_moment: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    x = x.clamp(min=LOWEST_LOGIT)
    raised = torch.maximum(maximum, x.amax(dim=1))
    centred = x - raised.unsqueeze(1)
    exponential = torch.exp2(centred)
    return raised, exponential.sum(dim=1), (centred * exponential).sum(dim=1) if with_moment else None


def _gradient_(x: Tensor, log2_normaliser: Tensor, constant: Tensor, slope: Tensor | None) -> None:
    log2_probability = x.clamp(min=LOWEST_LOGIT) - log2_normaliser
    factor = constant if slope is None else constant + slope * log2_probability
    x.copy_(torch.exp2(log2_probability) * factor)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)  # the last tile is narrower than the others
