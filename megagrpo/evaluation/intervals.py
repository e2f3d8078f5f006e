"""How far a mean over prompts can be trusted: a percentile bootstrap over the prompts."""

from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
DRAWS = 2000
_CHUNK = 1 << 22  # numbers that are held at once


def bootstrap_interval(values: Sequence[float], draws: int = DRAWS) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `values`, one number for each prompt.

    Prompts are drawn, never completions: those of a prompt are no independent facts (Efron and Tibshirani
    1993, chapter 13: the percentile interval). The draws have a seed of their own, so that equal values give
    equal intervals on every machine.

    Raises:
        ValueError: there is no value.
    """
    if not len(values):
        raise ValueError("no interval of no values")
    rng, array = np.random.default_rng(0), np.asarray(values, np.float64)
    rows = max(1, min(draws, _CHUNK // len(array)))
    means: list[float] = []
    while len(means) < draws:
        picked = rng.integers(len(array), size=(min(rows, draws - len(means)), len(array)))
        means += array[picked].mean(axis=1).tolist()
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
