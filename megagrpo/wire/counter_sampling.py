"""Counter-based sampling: a token depends on (seed, step, prompt id, completion index, position) and its
distribution alone.

No generator state is kept anywhere, so the same run draws the same tokens for any number of ranks, any batch
composition and any order of the rows. The uniform comes from the SplitMix64 finaliser (Steele, Lea and Flood,
OOPSLA 2014, variant 13 of Stafford); the token is the inverse of the cumulative distribution at that uniform,
summed in float64 so that rounding does not move it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # odd, nearest to 2**64 / golden ratio: spreads consecutive counters
_BLOCK = 128  # tokens per partial sum of the inverse CDF: only one block per row is scanned token by token
_TOP_P_CANDIDATES = 1024  # a nucleus is nearly always smaller; larger ones fall back to a full sort


class Sampling(Protocol):
    """How a token is drawn; `megagrpo.types.SamplingParams` is one."""

    @property
    def temperature(self) -> float:
        """0: greedy."""

    @property
    def top_k(self) -> int:
        """0: off."""

    @property
    def top_p(self) -> float:
        """1: off."""


def row_keys(
    seed: int,
    step: int,
    prompt_ids: Sequence[int] | np.ndarray,
    completion_indices: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """Return one 64-bit key per row, uint64 [R]: the identity of a completion's stream of uniforms.

    Args:
        seed, step: of the run; any integers, taken modulo 2**64.
        prompt_ids, completion_indices: R integers each.
    """
    keys = np.zeros(len(prompt_ids), dtype=np.uint64)
    for words in ([seed], [step], prompt_ids, completion_indices):
        keys = _absorb(keys, words)
    return keys


def draw_uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one uniform per row, float64 [R] in [0, 1 - 2**-52], for the `positions`-th token (0 = first) of
    each stream.

    52 bits, not 53: then u * total < total holds in float64 for every total, which the inverse CDF relies on.
    """
    return (_absorb(keys, positions) >> np.uint64(12)) * 2.0**-52


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(count), int64: a pure function of (count, seed, epoch), the same for
    every numpy version.
    """
    return np.argsort(row_keys(seed, epoch, np.arange(count), np.zeros(count, dtype=np.int64)), kind="stable")


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row and its log-prob in softmax(logits / temperature).

    The token is drawn from that distribution, restricted to what top-k, then top-p keep, and renormalised;
    its log-prob is over the whole vocabulary, as the trainer's are. Temperature 0 takes the most likely token
    and gives its log-prob at temperature 1.

    Args:
        logits: [R, V], any floating dtype; not modified.
        uniforms: float64 [R] in [0, 1), on the same device.
        sampling: temperature, top_k and top_p are used.

    Returns:
        (tokens int64 [R], logprobs float32 [R]). Rows whose logits are not finite have log-prob NaN.
    """
    greedy = sampling.temperature == 0
    scores = logits.float() if greedy or sampling.temperature == 1 else logits.float() / sampling.temperature
    kept = scores if greedy else filter_scores(scores, sampling.top_k, sampling.top_p)
    largest = scores.amax(dim=-1, keepdim=True)  # which every filter keeps
    block_sums, weights = _block_sums((kept - largest).exp_())
    cumulative = block_sums.cumsum(dim=-1)
    total = cumulative[:, -1]
    tokens = scores.argmax(dim=-1) if greedy else _inverse_cdf(weights, cumulative, uniforms * total)
    if kept is not scores:
        total = _block_sums((scores - largest).exp_())[0].cumsum(dim=-1)[:, -1]
    chosen = scores.gather(1, tokens[:, None]) - largest
    return tokens, (chosen[:, 0].double() - total.log()).float()


def filter_scores(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return `scores` with -inf where top-k (0: off), then top-p (1: off) remove a token.

    Top-p keeps the smallest set of most likely tokens whose mass, renormalised after top-k, reaches `top_p`:
    a token stays if the mass of the tokens above it is below `top_p` (Holtzman et al., arXiv 1904.09751).
    Tokens that tie with the last one kept stay.

    Args:
        scores: float32 [R, V], already divided by the temperature.
    """
    vocabulary = scores.shape[-1]
    if 0 < top_k < vocabulary:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_threshold(scores, top_p), -torch.inf)
    return scores


def _nucleus_threshold(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the smallest score in each row's nucleus, [R, 1]."""
    total = (scores - scores.amax(dim=-1, keepdim=True)).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    threshold, complete = _threshold_among_largest(
        scores, total, top_p, min(_TOP_P_CANDIDATES, scores.shape[-1])
    )
    if not bool(complete.all()):  # some nucleus is larger than the candidates
        rows = (~complete).nonzero()[:, 0]
        threshold[rows] = _threshold_among_largest(scores[rows], total[rows], top_p, scores.shape[-1])[0]
    return threshold


def _threshold_among_largest(
    scores: torch.Tensor, total: torch.Tensor, top_p: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (smallest kept score [R, 1], whether the nucleus lies within the `count` largest scores, bool
    [R]).
    """
    largest = scores.topk(count, dim=-1).values  # descending
    mass = (largest - largest[:, :1]).exp_().double() / total
    mass_above = mass.cumsum(dim=-1) - mass
    kept = (mass_above < top_p).sum(dim=-1).clamp(min=1)
    return largest.gather(1, kept[:, None] - 1), (kept < count) | (count == scores.shape[-1])


def _block_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (float64 [R, blocks] sums over _BLOCK tokens each, `weights` padded with zeros to [R, blocks
    * _BLOCK]).
    """
    rows, vocabulary = weights.shape
    padding = -vocabulary % _BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    return weights.view(rows, -1, _BLOCK).sum(dim=-1, dtype=torch.float64), weights


def _inverse_cdf(weights: torch.Tensor, cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return for each row the first token at which the running sum of `weights` exceeds `target`, int64
    [R].
    """
    rows, blocks = cumulative.shape
    # the clamp matters for NaN rows only
    block = (cumulative <= target[:, None]).sum(dim=-1).clamp(max=blocks - 1)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, block[:, None])
    inside = weights.view(rows, blocks, _BLOCK)[torch.arange(rows, device=weights.device), block].double()
    running = before + inside.cumsum(dim=-1)
    # The running sum inside the block may end a rounding below the block's own sum: never past the last token
    # with any weight.
    last = (running < running[:, -1:]).sum(dim=-1)
    offset = torch.minimum((running <= target[:, None]).sum(dim=-1), last)
    return (block * _BLOCK + offset).clamp(max=weights.shape[-1] - 1)


def _absorb(state: np.ndarray, words: Sequence[int] | np.ndarray) -> np.ndarray:
    """Mix one integer per row into `state` (uint64 [R]); for a fixed state different words give different
    results.
    """
    if not isinstance(words, np.ndarray) or words.dtype == object:
        words = np.array([int(word) % 2**64 for word in words], dtype=np.uint64)
    mixed = (state ^ words.astype(np.uint64)) + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
