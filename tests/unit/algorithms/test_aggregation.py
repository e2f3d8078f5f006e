"""The one reducer against plain loops over a ragged mini-batch, and its invariance to how the batch is
split.
"""

import pytest
import torch

from megagrpo.algorithms.aggregation import MODES, aggregate_loss, compute_token_weights
from megagrpo.algorithms.losses import LossOutput
from megagrpo.algorithms.metrics import finalize_metrics, measure, merge_metrics
from megagrpo.errors import UserError

LENGTHS = [5, 1, 0, 9, 3, 0, 0, 2]
GROUPS = [10, 10, 10, 11, 11, 12, 12, 13]  # group 12 lost all its completions
CONSTANT = 16


def loop_reference(losses, mode):
    """The published sums, written out; `losses` is one list of token losses per sequence."""
    present = [i for i, n in enumerate(LENGTHS) if n > 0]
    if mode == "sequence_mean":
        return sum(sum(losses[i]) / LENGTHS[i] for i in present) / len(present)
    if mode == "group_token_mean":
        groups = sorted({GROUPS[i] for i in present})
        means = []
        for group in groups:
            members = [i for i in present if GROUPS[i] == group]
            means.append(sum(sum(losses[i]) for i in members) / sum(LENGTHS[i] for i in members))
        return sum(means) / len(means)
    if mode == "token_mean":
        return sum(sum(losses[i]) for i in present) / sum(LENGTHS)
    if mode == "constant":
        return sum(sum(losses[i]) / CONSTANT for i in present) / len(present)
    return sum(sum(losses[i]) for i in present) / len(present)


def make_losses():
    values = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return values, [part.tolist() for part in values.split(LENGTHS)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [1, 2, 3, 8])
def test_loss_equals_the_loop_for_any_split_into_micro_batches(mode, split):
    """The weights come from the whole mini-batch, so the sum over micro-batches is the loss: nothing
    depends on the split.
    """
    values, per_sequence = make_losses()
    weights = compute_token_weights(torch.tensor(LENGTHS), torch.tensor(GROUPS), mode, CONSTANT)
    token_weights = weights.repeat_interleave(torch.tensor(LENGTHS))
    sequence_of_token = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    total, metrics = 0.0, []
    for part in range(split):
        mine = sequence_of_token % split == part
        output = LossOutput(values[mine], {"ratio": measure("ratio", values[mine])}, {"policy": values[mine]})
        loss, reported = aggregate_loss(output, token_weights[mine])
        total += loss.item()
        metrics.append(reported)
    results = finalize_metrics(merge_metrics(metrics))
    assert total == pytest.approx(loop_reference(per_sequence, mode), rel=1e-12)
    assert results["loss"] == results["policy_loss"] == pytest.approx(total, rel=1e-12)
    assert results["ratio"] == pytest.approx(values.mean().item(), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_mini_batch_without_a_valid_token_gives_zero_weights_not_nan(mode):
    weights = compute_token_weights(
        torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1]), mode, CONSTANT
    )
    assert weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_sequence_without_tokens_never_counts(mode):
    full = compute_token_weights(torch.tensor(LENGTHS), torch.tensor(GROUPS), mode, CONSTANT)
    present = torch.tensor(LENGTHS) > 0
    alone = compute_token_weights(
        torch.tensor(LENGTHS)[present], torch.tensor(GROUPS)[present], mode, CONSTANT
    )
    assert torch.equal(full[present], alone) and full[~present].eq(0).all()


def test_group_token_mean_weighs_every_prompt_alike_and_token_mean_does_not():
    lengths, groups = torch.tensor([1, 1, 50, 50]), torch.tensor([0, 0, 1, 1])
    by_group = compute_token_weights(lengths, groups, "group_token_mean") * lengths
    assert by_group.view(2, 2).sum(1).tolist() == pytest.approx([0.5, 0.5])
    by_token = compute_token_weights(lengths, groups, "token_mean") * lengths
    assert by_token.view(2, 2).sum(1).tolist() == pytest.approx([2 / 102, 100 / 102])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0], "token_mean"), r"group_ids: shape \[1\], lengths: shape \[2\]"),
        (([1, -2], [0, 0], "token_mean"), r"lengths\[1\]: -2"),
        (([1, 2], [0, 0], "mean"), "'mean' is not one of sequence_mean"),
        (([1, 2], [0, 0], "constant"), "aggregation_constant: None"),
    ],
)
def test_bad_input_is_refused_with_its_place(arguments, message):
    lengths, groups, mode = arguments
    with pytest.raises(UserError, match=message):
        compute_token_weights(torch.tensor(lengths), torch.tensor(groups), mode)
