"""Soft overlong punishment against DAPO's Eq. 13, and overlong masking."""

import pytest
import torch

from megagrpo.algorithms.overlong import compute_overlong_penalty, mask_overlong
from megagrpo.errors import UserError


def paper_equation_13(length, limit=20480, cache=4096):
    if length <= limit - cache:
        return 0.0
    if length <= limit:
        return ((limit - cache) - length) / cache
    return -1.0


def test_penalty_equals_the_papers_equation():
    lengths = [0, 1, 16384, 16385, 18432, 20479, 20480, 20481]
    penalty = compute_overlong_penalty(
        torch.tensor(lengths), torch.zeros(8, dtype=torch.bool), 20480, 4096, 1.0
    )
    assert penalty.tolist() == pytest.approx([paper_equation_13(length) for length in lengths])


def test_penalty_scales_and_a_cut_completion_gets_all_of_it():
    cut = torch.tensor([[False, True], [False, True]])
    penalty = compute_overlong_penalty(torch.tensor([[10, 10], [95, 100]]), cut, 100, 10, 0.5)
    assert penalty.tolist() == [[0.0, -0.5], [-0.25, -0.5]]


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_buffer_of_zero_or_beyond_the_limit_is_refused(buffer):
    with pytest.raises(
        UserError, match=f"buffer_tokens: {buffer}; must be 1 to rollout.max_new_tokens = 100"
    ):
        compute_overlong_penalty(torch.tensor([1]), torch.tensor([False]), 100, buffer, 1.0)


def test_masking_takes_out_what_was_cut():
    valid, cut = torch.tensor([True, True, False]), torch.tensor([False, True, True])
    assert mask_overlong(valid, cut).tolist() == [True, False, False]
