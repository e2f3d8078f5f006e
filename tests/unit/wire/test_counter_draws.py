"""Tests of megagrpo.wire.counter_sampling: draws are pure functions, uniform, and follow the distribution
they claim.
"""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megagrpo.types import SamplingParams
from megagrpo.wire.counter_sampling import draw_uniforms, filter_scores, row_keys, sample_tokens, shuffled


def uniforms(seed=3, step=5, prompts=range(200), index=0, positions=(0,)):
    keys = row_keys(seed, step, prompts, [index] * len(prompts))
    return np.stack([draw_uniforms(keys, np.full(len(prompts), position)) for position in positions])


def random_logits(rows, vocabulary, scale=3.0, seed=0):
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def params(**fields):
    return SamplingParams(max_new_tokens=1, **fields)


def test_a_draw_depends_on_its_own_row_alone():
    together = uniforms(prompts=[7, 8, 9], positions=(4,))[0]
    assert np.array_equal(uniforms(prompts=[9, 7, 8], positions=(4,))[0], together[[2, 0, 1]])
    assert uniforms(prompts=[8], positions=(4,))[0, 0] == together[1]


@pytest.mark.parametrize(
    "changed", [{"seed": 4}, {"step": 6}, {"index": 1}, {"positions": (1,)}, {"prompts": range(1, 201)}]
)
def test_every_coordinate_changes_the_draw(changed):
    assert not np.any(uniforms() == uniforms(**changed))


def test_coordinates_do_not_stand_in_for_each_other():
    swapped = {
        draw_uniforms(row_keys(*key[:2], [key[2]], [key[3]]), np.array([key[4]]))[0]
        for key in np.ndindex(3, 3, 3, 3, 3)
    }
    assert len(swapped) == 3**5


def test_the_mixer_is_splitmix64():
    # of the reference implementation, prng.di.unimi.it/splitmix64.c
    first_output_for_seed_1234567 = 6457827717110365317
    drawn = draw_uniforms(np.zeros(1, dtype=np.uint64), np.array([1234567]))[0]
    assert drawn == (first_output_for_seed_1234567 >> 12) * 2.0**-52


def test_large_and_negative_seeds_are_taken_modulo_two_to_the_64():
    assert np.array_equal(uniforms(seed=2**64 + 3), uniforms(seed=3))
    assert np.array_equal(uniforms(seed=-1), uniforms(seed=2**64 - 1))


@pytest.mark.parametrize("axis", ["seed", "step", "prompts", "index", "positions"])
def test_draws_are_uniform_along_every_coordinate(axis):
    count, bins = 20_000, 64
    if axis == "prompts":
        values = uniforms(prompts=range(count))[0]
    elif axis == "positions":
        values = uniforms(prompts=[1], positions=range(count))[:, 0]
    else:
        values = np.array([uniforms(prompts=[1], **{axis: value})[0, 0] for value in range(count)])
    assert values.min() >= 0 and values.max() < 1
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    chi_square = ((counts - count / bins) ** 2 / (count / bins)).sum()
    assert 20 < chi_square < 125  # chi-square with 63 degrees of freedom: both tails beyond 1e-5
    ordered = np.sort(values)
    largest_gap = np.abs(ordered - (np.arange(count) + 0.5) / count).max()
    assert largest_gap * np.sqrt(count) < 2.5  # Kolmogorov-Smirnov: exceeded with probability below 1e-5
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / np.sqrt(count)


def test_tokens_follow_the_softmax_at_the_temperature():
    count, vocabulary = 40_000, 300  # 300 is no multiple of the block of partial sums
    logits = random_logits(1, vocabulary, scale=2.0)
    draws = torch.from_numpy(uniforms(prompts=range(count))[0])
    tokens, logprobs = sample_tokens(logits.expand(count, -1), draws, params(temperature=0.7))
    expected = (logits.double() / 0.7).softmax(-1)[0]
    observed = torch.bincount(tokens, minlength=vocabulary).double()
    common = expected * count >= 5
    assert common.sum() > 50
    chi_square = ((observed - expected * count) ** 2 / (expected * count))[common].sum()
    degrees = int(common.sum())
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=2e-6, rtol=0)


def test_the_token_is_the_inverse_of_the_float64_cdf():
    logits = random_logits(64, 1000)
    draws = torch.from_numpy(uniforms(prompts=range(64))[0])
    tokens, _ = sample_tokens(logits, draws, params())
    cumulative = logits.double().softmax(-1).cumsum(-1)
    assert torch.equal(tokens, (cumulative <= draws[:, None]).sum(-1))


def test_the_ends_of_the_unit_interval_never_pick_an_impossible_token():
    logits = torch.full((2, 700), -torch.inf)
    logits[:, 150] = 0.0
    logits[:, 400] = 1.0
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64), params())
    assert tokens.tolist() == [150, 400]
    assert torch.isfinite(logprobs).all()


def test_a_row_samples_the_same_token_in_any_batch():
    logits = random_logits(50, 777)
    draws = torch.from_numpy(uniforms(prompts=range(50))[0])
    for sampling in (params(), params(top_p=0.8), params(top_k=20, temperature=0.5)):
        tokens, logprobs = sample_tokens(logits, draws, sampling)
        one_by_one = [
            sample_tokens(logits[row : row + 1], draws[row : row + 1], sampling) for row in range(50)
        ]
        assert tokens.tolist() == [token.item() for token, _ in one_by_one]
        assert torch.equal(logprobs, torch.cat([logprob for _, logprob in one_by_one]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.9), (0, 0.1), (0, 0.999), (40, 0.8), (5000, 0.5)]
)
def test_top_k_and_top_p_keep_what_the_transformers_warpers_keep(temperature, top_k, top_p):
    logits = random_logits(32, 3000)  # more tokens than the nucleus candidates, so 0.999 takes the full sort
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(filter_scores(logits / temperature, top_k, top_p), expected)
    draws = torch.from_numpy(uniforms(prompts=range(32))[0])
    tokens, logprobs = sample_tokens(logits, draws, params(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.isfinite(expected.gather(1, tokens[:, None])).all()  # each is a token that was kept
    whole = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), whole, atol=2e-6, rtol=0)


def test_temperature_zero_takes_the_most_likely_token_at_unit_temperature():
    logits = random_logits(8, 100)
    tokens, logprobs = sample_tokens(
        logits, torch.zeros(8, dtype=torch.float64), params(temperature=0.0, top_k=2)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), atol=2e-6, rtol=0)


def test_rows_that_are_not_finite_are_marked_and_leave_others_alone():
    logits = random_logits(3, 200)
    logits[1, 7] = torch.nan
    _, logprobs = sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), params())
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


def test_a_shuffle_is_a_permutation_of_its_own_epoch():
    first, second = shuffled(1000, seed=1, epoch=0), shuffled(1000, seed=1, epoch=1)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert np.array_equal(first, shuffled(1000, seed=1, epoch=0))
    assert (first != second).mean() > 0.9 and (first != shuffled(1000, seed=2, epoch=0)).mean() > 0.9
