"""Shares that holders make alone combine to the CRC-32 that zlib makes of the whole tensor."""

import zlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megagrpo.weights.partial_checksums import combine_shares, compute_share
from megagrpo.weights.plan.boxes import slices

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def whole_checksum(tensor):
    return f"{zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()):08x}"


def cut(data, box):
    """Cut a box into boxes that do not overlap and cover it."""
    wide = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if not wide or not data.draw(st.booleans()):
        return [box]
    dim = data.draw(st.sampled_from(wide))
    middle = data.draw(st.integers(box[dim][0] + 1, box[dim][1] - 1))
    halves = [(box[dim][0], middle), (middle, box[dim][1])]
    return [part for half in halves for part in cut(data, (*box[:dim], half, *box[dim + 1 :]))]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_shares_of_any_cut_combine_to_the_checksum_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = torch.randint(
        0, 200, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ).to(dtype)
    boxes = cut(data, tuple((0, size) for size in shape))
    shares = [compute_share(tensor[slices(box)], box, shape) for box in boxes]
    assert combine_shares(shares, tensor.nbytes) == whole_checksum(tensor)


def test_rows_that_nobody_sends_count_as_zeros():
    tensor = torch.randn(7, 5)
    padded = torch.cat([tensor, torch.zeros(3, 5)])
    assert combine_shares(
        [compute_share(tensor, ((0, 7), (0, 5)), (10, 5))], padded.nbytes
    ) == whole_checksum(padded)


def test_a_part_at_another_place_has_another_share():
    part = torch.randn(2, 3)
    shares = {
        compute_share(part, ((row, row + 2), (column, column + 3)), (6, 6))
        for row in range(5)
        for column in range(4)
    }
    assert len(shares) == 20


@pytest.mark.parametrize("shape", [(2048, 1536), (4, 96, 512)])
def test_columns_of_a_real_size_are_joined_over_all_rows(shape):
    tensor, middle = torch.randn(shape).to(torch.bfloat16), shape[-1] // 3
    halves = [((0, middle),), ((middle, shape[-1]),)]
    whole = tuple((0, size) for size in shape[:-1])
    shares = [compute_share(tensor[slices((*whole, *half))], (*whole, *half), shape) for half in halves]
    assert combine_shares(shares, tensor.nbytes) == whole_checksum(tensor)
