"""The one reducer: a weight per sequence, with the denominator of the whole mini-batch.

Sources: sequence_mean is GRPO's (DeepSeekMath, arXiv 2402.03300, Eq. 3), group_token_mean DAPO's (arXiv
2503.14476, Eq. 12: all tokens of a group alike, then the mean over groups), constant Dr. GRPO's (arXiv
2503.20783, Section 3.2).

Differences from the papers: completions without a valid token are not counted, so a ragged group is averaged
over what it has; sequence_mean weighs all completions of the mini-batch alike (the papers have equal groups,
where both readings agree).

The trainer passes the lengths of ALL sequences of the mini-batch (every data-parallel rank, every
micro-batch, those skipped for a zero advantage too). So the weights need no communication, and the loss is
exactly the sum over tokens of weight * token loss, however the sequences are spread over ranks and
micro-batches. A correction's masks come first: lengths are counts after masking.
"""

from typing import get_args

import torch
from torch import Tensor

from megagrpo.algorithms.losses.base import LossOutput
from megagrpo.algorithms.metrics import Metric, measure
from megagrpo.config.algorithm_section import Aggregation
from megagrpo.errors import UserError

MODES: tuple[str, ...] = get_args(Aggregation)


def compute_token_weights(
    lengths: Tensor, group_ids: Tensor, mode: str, constant: int | None = None
) -> Tensor:
    """Compute the weight of each token of each sequence of a mini-batch.

    Args:
        lengths: [B] int64 valid loss tokens per sequence (0: the sequence never counts).
        group_ids: [B] int64, equal for the completions of one prompt; any values.
        mode: with n = sequences with tokens, L_i = lengths: `sequence_mean` 1 / (n L_i); `group_token_mean` 1
            / (groups with tokens * tokens of the group); `token_mean` 1 / all tokens; `constant` 1 / (n *
            constant); `sequence_sum` 1 / n.
        constant: the length that `constant` divides by.

    Returns:
        [B] float64; exactly 0 for sequences without tokens, so all 0 (never NaN) where no sequence has any.

    Raises:
        UserError: unknown mode, lengths and group_ids that do not match, a negative length, or no constant
            where it is needed.
    """
    if mode not in MODES:
        raise UserError(f"algorithm.aggregation: {mode!r} is not one of {', '.join(MODES)}")
    if lengths.shape != group_ids.shape or lengths.dim() != 1:
        raise UserError(
            f"group_ids: shape {list(group_ids.shape)}, lengths: shape {list(lengths.shape)}; "
            "both must be [B]"
        )
    if bool((lengths < 0).any()):
        row = int((lengths < 0).nonzero()[0])
        raise UserError(f"lengths[{row}]: {int(lengths[row])}; a sequence has 0 or more valid tokens")
    tokens = lengths.to(torch.float64)
    counted = lengths > 0
    num_sequences = counted.sum().to(torch.float64)
    if mode == "sequence_mean":
        denominators = num_sequences * tokens
    elif mode == "group_token_mean":
        _, group = torch.unique(group_ids, return_inverse=True)
        group_tokens = tokens.new_zeros(lengths.numel()).index_add(0, group, tokens)
        denominators = (group_tokens > 0).sum() * group_tokens[group]
    elif mode == "token_mean":
        denominators = tokens.sum().expand_as(tokens)
    elif mode == "constant":
        if constant is None or constant < 1:
            raise UserError(
                f"algorithm.aggregation_constant: {constant}; aggregation constant divides by "
                "it, so it must be at least 1"
            )
        denominators = (num_sequences * constant).expand_as(tokens)
    else:
        denominators = num_sequences.expand_as(tokens)
    return torch.where(counted, 1 / torch.where(counted, denominators, 1.0), 0.0)


def aggregate_loss(output: LossOutput, token_weights: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    """Reduce a micro-batch's token losses; the mini-batch's loss is the SUM of the results over micro-batches
    and ranks.

    Args:
        output: unreduced losses [T].
        token_weights: [T] `compute_token_weights(...)` of each token's sequence.

    Returns:
        (loss, a float64 scalar with gradient; the output's metrics with `loss` and one `<term>_loss` per term
        added).
    """
    weights = token_weights.to(torch.float64)
    loss = (output.loss.to(torch.float64) * weights).sum()
    metrics = dict(output.metrics)
    metrics["loss"] = measure("loss", loss)
    for name, values in output.terms.items():
        metrics[f"{name}_loss"] = measure(f"{name}_loss", (values.to(torch.float64) * weights).sum())
    return loss, metrics
