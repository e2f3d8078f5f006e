"""Blockwise float8 against a float64 reference that rounds with a table of all numbers of the format, and
against vLLM's own.
"""

import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.weights.read.block_fp8 import accumulate_amax, compute_scales, quantize_slice

# Every e4m3fn number that is not NaN: sign, 4 exponent bits of bias 7, 3 mantissa bits (OCP 8-bit floating
# point specification, table 2).
MAGNITUDES = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)
]
FINITE = [sign * magnitude for sign in (1, -1) for magnitude in MAGNITUDES if magnitude < 480]
VLLM_PYTHON = Path(".engines/vllm/bin/python")


def weights(rows, columns, dtype=torch.float32):
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02
    tensor[:128, :128] *= 1e-4  # a block whose maximum is below the smallest one
    if rows > 128:
        tensor[128:256, :128] = 0
    tensor[-1, -1] = 37.0  # an outlier: all else of its block is near zero
    return tensor.to(dtype)


def quantize(tensor, row_cuts=(), column_cuts=()):
    """(float8, scales) of a tensor that is cut in boxes, each of which is quantised alone."""
    rows, columns = tensor.shape
    row_edges, column_edges = [0, *row_cuts, rows], [0, *column_cuts, columns]
    boxes = [(r, c) for r in pairwise(row_edges) for c in pairwise(column_edges)]
    cut = lambda box: tensor[slice(*box[0]), slice(*box[1])]  # noqa: E731
    partial = []
    for box in boxes:
        partial.append(torch.zeros(-(-rows // 128), -(-columns // 128)))
        accumulate_amax(cut(box), box, partial[-1])
    scales = compute_scales(torch.stack(partial).amax(0))
    result = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for box in boxes:
        result[slice(*box[0]), slice(*box[1])] = quantize_slice(cut(box), box, scales)
    return result, scales


def in_blocks(scales, shape):
    """The scale of every element."""
    return np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 5), (257, 129)])
def test_values_and_scales_are_those_of_a_dense_float64_reference(shape, dtype):
    tensor = weights(*shape, dtype)
    quantized, scales = quantize(tensor)
    exact = tensor.double().numpy()
    amax = np.array(
        [
            [np.abs(exact[r : r + 128, c : c + 128]).max() for c in range(0, shape[1], 128)]
            for r in range(0, shape[0], 128)
        ]
    )
    np.testing.assert_array_equal(
        scales.numpy(), (np.maximum(amax, np.float32(1e-4)) / 448).astype(np.float32)
    )
    scaled = exact / in_blocks(scales.double().numpy(), shape)
    found, table = quantized.double().numpy(), np.array(FINITE)
    nearest = np.abs(table[:, None] - scaled.reshape(-1)).min(0).reshape(shape)
    # The nearest number of the format, but for what two float32 roundings of `scaled` (2^-23 of it) move
    # across a tie.
    assert (np.abs(found - scaled) <= nearest + np.abs(scaled) * 2.0**-22).all()
    # Half a step: 2^-4 of a normal number, 2^-10 below the smallest of these, 2^-6.
    error = np.abs(found - scaled)
    assert (error <= np.maximum(np.abs(scaled) * 2.0**-4, 2.0**-10) * (1 + 2.0**-20)).all()
    assert np.abs(found).max() <= 448


@pytest.mark.parametrize(
    ("row_cuts", "column_cuts"), [((100,), ()), ((), (70, 140)), ((128,), (128,)), ((1, 5, 257), (3, 150))]
)
def test_slices_quantise_to_the_bytes_of_the_whole(row_cuts, column_cuts):
    tensor = weights(300, 200)
    whole, scales = quantize(tensor)
    cut, cut_scales = quantize(tensor, row_cuts, column_cuts)
    assert torch.equal(cut.view(torch.uint8), whole.view(torch.uint8)) and torch.equal(cut_scales, scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_becomes_nan_so_that_the_receiver_refuses_it(value):
    tensor = weights(130, 10)
    tensor[129, 3] = value
    quantized, _ = quantize(tensor)
    assert torch.isnan(quantized[129, 3].float())


@pytest.mark.engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_and_scales_are_those_that_vllm_quantises_to(tmp_path, dtype):
    tensor = weights(300, 200, getattr(torch, dtype))
    torch.save(tensor, tmp_path / "weights")
    script = (
        "import sys, torch; from vllm.utils.deep_gemm import per_block_cast_to_fp8 as cast; "
        "torch.save(cast(torch.load(sys.argv[1] + '/weights')), sys.argv[1] + '/quantized')"
    )
    command = ["env", "TORCHDYNAMO_DISABLE=1", "PYTHONPATH=", str(VLLM_PYTHON), "-c", script, str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    expected, expected_scales = torch.load(tmp_path / "quantized")
    quantized, scales = quantize(tensor)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(
        scales, expected_scales
    )
