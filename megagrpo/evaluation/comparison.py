"""Two evaluations of the same prompts, compared in pairs: how far they differ, and whether by chance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from rich.table import Table

from megagrpo.errors import UserError
from megagrpo.evaluation.intervals import bootstrap_interval

EXACT_PAIRS = 16  # so many pairs that differ are flipped in all 2^n ways
FLIPS = 20_000  # drawn where more pairs differ
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Comparison:
    """One set in two evaluations, over the prompts that both have."""

    name: str
    pairs: int
    unpaired: int  # prompts that one of them has alone
    first: float  # mean score over the pairs
    second: float
    interval: tuple[float, float]  # 95 %, for second - first
    better: int  # prompts that the second scores higher
    worse: int
    p_value: float  # by the paired permutation test, two-sided
    sign_p_value: float  # by the exact sign test, two-sided


def compare_results(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Comparison]:
    """Return the comparison of each set that both evaluations have, in the order of the first.

    Raises:
        UserError: they share no set, or a set without a prompt that is the same.
    """
    shared = [name for name in first["sets"] if name in second["sets"]]
    if not shared:
        raise UserError(
            f"--compare: no set is in both: {', '.join(first['sets'])} and {', '.join(second['sets'])}"
        )
    return [
        compare_prompts(name, first["sets"][name]["prompts"], second["sets"][name]["prompts"])
        for name in shared
    ]


def compare_prompts(
    name: str, first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Comparison:
    """Compare the mean scores of the prompts with equal digests; UserError where none is."""
    left, right = _mean_scores(first), _mean_scores(second)
    shared = [key for key in left if key in right]
    if not shared:
        raise UserError(f"--compare: set {name!r}: no prompt is in both")
    differences = [right[key] - left[key] for key in shared]
    better = sum(difference > _ROUNDING for difference in differences)
    worse = sum(difference < -_ROUNDING for difference in differences)
    return Comparison(
        name,
        len(shared),
        len(left) + len(right) - 2 * len(shared),
        sum(left[key] for key in shared) / len(shared),
        sum(right[key] for key in shared) / len(shared),
        bootstrap_interval(differences),
        better,
        worse,
        permutation_test(differences),
        sign_test(better, worse),
    )


def permutation_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the paired permutation test (Fisher 1935, section 21): the share of the
    ways to flip the signs of the differences whose sum is as far from 0 as theirs, or farther.

    All ways where at most `EXACT_PAIRS` differ; otherwise `FLIPS` drawn ones with a seed of their own, the
    observed one among them (Phipson and Smyth 2010), so that it is never 0.
    """
    values = np.array([each for each in differences if abs(each) > _ROUNDING])
    if not len(values):
        return 1.0
    observed = abs(values.sum()) - _ROUNDING
    if len(values) <= EXACT_PAIRS:
        ways = np.arange(1 << len(values))[:, None] >> np.arange(len(values)) & 1
        return float((abs((1 - 2 * ways) @ values) >= observed).mean())
    rng, hits = np.random.default_rng(0), 0
    for _ in range(FLIPS // 100):
        signs = rng.integers(2, size=(100, len(values))) * 2 - 1
        hits += int((abs(signs @ values) >= observed).sum())
    return (1 + hits) / (1 + FLIPS)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of the exact sign test (McNemar's, where prompts are right or wrong): so
    uneven a split of the prompts that differ, by a fair coin.
    """
    count, most = better + worse, max(better, worse)
    return min(1.0, 2 * sum(comb(count, heads) for heads in range(most, count + 1)) / 2**count)


def build_comparison_table(comparisons: Sequence[Comparison], names: tuple[str, str]) -> Table:
    """Return a row for each set."""
    table = Table(title=f"{names[1]} against {names[0]}, in pairs")
    table.add_column("set")
    for heading in ("prompts", *("first", "second", "difference", "95 % interval")):
        table.add_column(heading, justify="right")
    for heading in ("better", "worse", "p (permutation)", "p (sign)"):
        table.add_column(heading, justify="right")
    for each in comparisons:
        table.add_row(
            each.name,
            str(each.pairs) + (f" ({each.unpaired} unpaired)" if each.unpaired else ""),
            f"{each.first:.3f}",
            f"{each.second:.3f}",
            f"{each.second - each.first:+.3f}",
            f"{each.interval[0]:+.3f} to {each.interval[1]:+.3f}",
            str(each.better),
            str(each.worse),
            f"{each.p_value:.2g}",
            f"{each.sign_p_value:.2g}",
        )
    return table


def _mean_scores(prompts: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Return the mean score of each prompt, by digest and how often that came before."""
    seen: Counter[str] = Counter()
    means = {}
    for prompt in prompts:
        means[prompt["digest"], seen[prompt["digest"]]] = sum(prompt["scores"]) / len(prompt["scores"])
        seen[prompt["digest"]] += 1
    return means
