"""float8 as the published definitions have it, bit by bit.

The oracle lists the numbers of a format from the OCP specification's own formula (FP8 rev 1.0, section 5.1:
(-1)^s 2^(e - bias) (1 + m / 2^M), subnormals 2^(1 - bias) m / 2^M), picks the nearest in float64 (the one
with the even mantissa of two that are as near), and walks over blocks one by one.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megagrpo.ops.emulated_linear import RECIPES, Float8Operands, emulated_linear
from megagrpo.ops.float8 import (
    E4M3,
    E5M2,
    DelayedScale,
    cast,
    largest_magnitudes,
    mx_exponents,
    quantize_blocks,
    quantize_mx,
    quantize_tensor,
)

SHAPES = {"e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B)}  # exponent and mantissa bits, bias, largest code
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def numbers(name):
    """The format's numbers from 0 on, by code, in float64."""
    _, bits, bias, last = SHAPES[name]
    found = []
    for code in range(last + 1):
        exponent, mantissa = code >> bits, code & (2**bits - 1)
        if exponent:
            found.append(2.0 ** (exponent - bias) * (1 + mantissa / 2**bits))
        else:
            found.append(2.0 ** (1 - bias) * mantissa / 2**bits)
    return np.array(found)


def nearest(values, name):
    """Each value as the nearest number of the format; codes are even where mantissas are."""
    table = numbers(name)
    out = np.empty(values.shape, np.float64)
    for place, value in np.ndenumerate(np.asarray(values, np.float64)):
        if math.isnan(value):
            out[place] = value
            continue
        distance = np.abs(table - min(abs(value), table[-1]))
        near = np.flatnonzero(distance == distance.min())
        code = next((code for code in near if code % 2 == 0), near[0])
        out[place] = math.copysign(table[code], value)
    return out


def blocks_of(shape, block):
    for row in range(0, shape[0], block[0]):
        for column in range(0, shape[1], block[1]):
            yield slice(row, row + block[0]), slice(column, column + block[1])


def magnitude(part):
    found = np.abs(part[~np.isnan(part)])
    return float(found.max()) if found.size else 0.0


def by_blocks(matrix, block, name):
    """Round trip with scales 2^floor(log2(largest / m)): exact in rationals."""
    out, largest = np.empty(matrix.shape), Fraction(FORMATS[name].largest)
    for place in blocks_of(matrix.shape, block):
        m = magnitude(matrix[place])
        scale = 1.0 if m == 0 or math.isinf(m) else 2.0 ** floor_log2(largest / Fraction(m))
        out[place] = nearest(matrix[place] * scale, name) / scale
    return out


def by_mx(matrix, name, round_up):
    """Round trip by section 6.3 of OCP Microscaling 1.0, or with the least scale that saturates nothing."""
    out, form = np.empty(matrix.shape), FORMATS[name]
    for place in blocks_of(matrix.shape, (1, 32)):
        m = magnitude(matrix[place])
        if m == 0 or math.isinf(m):
            exponent = -127 if m == 0 else 127
        elif round_up:
            exponent = -floor_log2(Fraction(form.largest) / Fraction(m))
        else:
            exponent = floor_log2(Fraction(m)) - form.emax
        with np.errstate(over="ignore"):
            out[place] = np.float32(nearest(matrix[place] * 2.0**-exponent, name) * 2.0**exponent)
    return out


def floor_log2(value):
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def awkward(rows, columns, seed=0):
    """Magnitudes over 40 powers of two, ties, zero blocks, an infinity, a NaN; odd sizes."""
    draw = np.random.default_rng(seed)
    matrix = draw.standard_normal((rows, columns)) * 2.0 ** draw.integers(-20, 20, (rows, columns))
    matrix[0, :] = 0.0
    matrix[1, : columns // 2] = 448.0 * 2.0**-3  # m exactly the largest number, times a power of two
    matrix[2, 3] = np.nan
    matrix[min(rows - 1, 130), columns - 1] = -np.inf
    return matrix.astype(np.float32)


def same(found, expected):
    """Equal to the bit, signs of zeros included; a NaN is one whatever its bits."""
    found, expected = found.numpy(), np.float32(expected)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    bits = [
        np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf).view(np.int32)
        for values in (found, expected)
    ]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_and_every_tie_rounds_to_the_nearest_even_and_the_rest_saturates(name):
    table = numbers(name)
    ties = (table[1:] + table[:-1]) / 2
    values = np.concatenate([table, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), [table[-1] * 3, np.inf]])
    values = np.float32(np.concatenate([values, -values]))
    same(cast(torch.from_numpy(values), FORMATS[name]).float(), nearest(values, name))
    assert cast(torch.tensor([torch.nan]), FORMATS[name]).float().isnan().all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_blocks_have_scales_that_are_powers_of_two(name, block):
    matrix = awkward(131, 261)
    found = quantize_blocks(torch.from_numpy(matrix), block, FORMATS[name])
    assert found.inverse_scales.shape == (-(-131 // block[0]), 3)
    same(found.dequantize(), by_blocks(matrix, block, name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("round_up", [False, True])
def test_mx_blocks_follow_the_specification_and_the_way_of_transformer_engine(name, round_up):
    matrix = awkward(7, 77)
    same(
        quantize_mx(torch.from_numpy(matrix), FORMATS[name], round_up).dequantize(),
        by_mx(matrix, name, round_up),
    )


def test_an_mx_scale_of_the_specification_saturates_what_rounding_it_up_does_not():
    """m = 500: 2^8 <= 500 < 2^9, so the scale of section 6.3 is 2^0 and 500 becomes 448."""
    m = torch.tensor([[500.0]])
    assert mx_exponents(m, E4M3).item() == 0 and mx_exponents(m, E4M3, round_up=True).item() == 1
    assert quantize_mx(m, E4M3).dequantize().item() == 448.0
    assert quantize_mx(m, E4M3, round_up=True).dequantize().item() == 512.0  # 250 is a tie of 240 and 256


@pytest.mark.parametrize("name", FORMATS)
def test_one_scale_brings_the_largest_element_to_the_largest_number(name):
    form, draw = FORMATS[name], np.random.default_rng(1)
    for size in (0.01, 1.0, 3.0, 5e3):
        matrix = np.float32(draw.standard_normal((9, 33)) * size)
        scale = np.float32(form.largest) / np.abs(matrix).max()
        expected = np.float32(nearest(matrix * scale, name)) * (np.float32(1) / scale)
        found = quantize_tensor(torch.from_numpy(matrix), form)
        same(found.dequantize(), expected)
        assert found.values.float().abs().max() == form.largest


@pytest.mark.parametrize("filler", [0.0, np.inf])
def test_a_tensor_without_a_largest_number_keeps_its_values(filler):
    matrix = torch.tensor([[filler, 0.0], [np.nan, 0.0]])
    found = quantize_tensor(matrix, E4M3)
    assert found.inverse_scales.item() == 1.0
    assert found.dequantize()[0, 0] == min(filler, 448.0) and found.dequantize()[1, 0].isnan()


def test_a_delayed_scale_is_that_of_the_time_before_and_stays_over_zeros():
    delayed, first, second = DelayedScale(E4M3), torch.full((2, 3), 3.0), torch.full((2, 3), 7.0)
    assert delayed.quantize(first).inverse_scales.item() == 1.0
    assert delayed.quantize(second).inverse_scales.item() == np.float32(1) / np.float32(448.0 / 3.0)
    seven = np.float32(1) / np.float32(448.0 / 7.0)
    assert delayed.quantize(torch.zeros(2, 3)).inverse_scales.item() == seven
    assert delayed.quantize(first).inverse_scales.item() == seven
    assert delayed.quantize(second).dequantize()[0, 0] == 3.0  # saturates at the magnitude before


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_a_part_on_block_borders_is_quantised_as_in_the_whole(along):
    """So a tensor parallel rank has the bytes of the whole matrix."""
    matrix = torch.from_numpy(awkward(256, 512))
    cut = (slice(128, 256), slice(None)) if along == "rows" else (slice(None), slice(128, 384))
    for whole, part in (
        (quantize_blocks(matrix, (128, 128), E4M3), quantize_blocks(matrix[cut], (128, 128), E4M3)),
        (quantize_blocks(matrix, (1, 128), E4M3), quantize_blocks(matrix[cut], (1, 128), E4M3)),
        (quantize_mx(matrix, E4M3), quantize_mx(matrix[cut], E4M3)),
    ):
        assert torch.equal(whole.values[cut].view(torch.uint8), part.values.view(torch.uint8))


def test_magnitudes_of_blocks_are_those_of_numbers_alone():
    found = largest_magnitudes(torch.tensor([[1.0, -3.0, torch.nan], [0.0, 2.0, 0.5]]), (2, 2))
    assert found.tolist() == [[3.0, 0.5]]


def rounded(matrix, recipe, operand, along):
    """The oracle's operand of a product that sums over `along`."""
    name = "e5m2" if operand == "gradient" and recipe in ("fp8_delayed", "fp8_tensorwise") else "e4m3"
    turned = matrix if along == "columns" else matrix.T
    if recipe == "fp8_delayed":  # the first time
        out = nearest(turned, name)
    elif recipe == "fp8_tensorwise":
        scale = np.float32(FORMATS[name].largest) / np.abs(turned).max()
        out = np.float32(nearest(turned * scale, name)) * (np.float32(1) / scale)
    elif recipe == "fp8_blockwise":
        out = by_blocks(turned, (128 if operand == "weight" else 1, 128), name)
    else:
        out = by_mx(turned, name, round_up=True)
    return (out if along == "columns" else out.T).astype(np.float64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_product_of_a_linear_layer_is_of_operands_in_blocks_along_its_sum(recipe):
    """Sums are compared at 1e-6 of the products' size, the rounding of float32 sums of 150 terms."""
    draw = np.random.default_rng(2)
    x, w, dy = (np.float32(draw.standard_normal(shape)) for shape in ((37, 150), (140, 150), (37, 140)))
    inputs = torch.from_numpy(x).requires_grad_()
    weight = torch.nn.Parameter(torch.from_numpy(w))
    output = emulated_linear(inputs.view(37, 1, 150), weight, Float8Operands(recipe))
    output.backward(torch.from_numpy(dy).view(37, 1, 140))
    q = lambda matrix, operand, along: rounded(matrix, recipe, operand, along)  # noqa: E731
    expected = {
        "y": q(x, "input", "columns") @ q(w, "weight", "columns").T,
        "dx": q(dy, "gradient", "columns") @ q(w, "weight", "rows"),
        "dw": q(dy, "gradient", "rows").T @ q(x, "input", "rows"),
    }
    found = {"y": output.detach()[:, 0], "dx": inputs.grad, "dw": weight.grad}
    for name, value in expected.items():
        size = np.abs(value).max()
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=1e-6 * size, err_msg=name)
        exact = {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}[name]
        assert np.abs(value - exact).max() > 1e-3 * size, f"{name}: nothing was rounded"


def test_an_expert_without_tokens_has_no_output_and_no_gradient():
    weight = torch.nn.Parameter(torch.ones(4, 6))
    emulated_linear(
        torch.zeros(0, 6, requires_grad=True), weight, Float8Operands("fp8_blockwise")
    ).sum().backward()
    assert not weight.grad.any()
