"""What an evaluation tells beside the mean: registered metrics, or a user's own by FILE.py:function.

A metric is called with the scores of a held-out set, a sequence of the first reward's values for each prompt,
and returns a number for each name: `eval/SET/NAME`. The same on every rank; pure.
"""

from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Any

from megagrpo.errors import SharedUserError
from megagrpo.registry import Registry, require_call

Metric = Callable[[Sequence[Sequence[float]]], Mapping[str, float]]
RIGHT = 1.0  # a completion is right where its value is at least this


def _read_metric(attribute: Any) -> Metric:
    require_call(attribute, ["scores"])
    return attribute


EVALUATION_METRICS: Registry[Metric] = Registry("evaluation metric", _read_metric)


def measure_scores(names: Sequence[str], scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return what the metrics called `names` tell of the scores; SharedUserError where a user's own fails."""
    measured: dict[str, float] = {}
    for name in names:
        metric = EVALUATION_METRICS.find(name)
        try:
            measured |= {str(key): float(value) for key, value in metric(scores).items()}
        except Exception as error:  # a user's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise SharedUserError(
                f"evaluation metric {name}: must return numbers by name: {reason}"
            ) from error
    return measured


@EVALUATION_METRICS.register("pass_at_k")
def measure_pass_at_k(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return `pass@k`, the mean over prompts, for k = 2, 4, 8, ... up to the samples that every prompt has;
    nothing where a prompt has one sample. pass@1 of right or wrong scores is the mean.
    """
    samples = min((len(values) for values in scores), default=0)
    ks = [2**power for power in range(1, samples.bit_length()) if 2**power <= samples]
    right = [sum(value >= RIGHT for value in values) for values in scores]
    return {
        f"pass@{k}": sum(
            compute_pass_at_k(correct, len(values), k) for correct, values in zip(right, scores, strict=True)
        )
        / len(scores)
        for k in ks
    }


def compute_pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k), with c of n samples right (Chen et al. 2021, arXiv 2107.03374, Eq. 1). Exact
    integers: no product of many factors that loses digits.

    Args:
        correct: c, 0 <= c <= n.
        samples: n.
        k: 1 <= k <= n.

    Raises:
        ValueError: a number is outside its range.

    Example:
        >>> compute_pass_at_k(correct=1, samples=4, k=2)
        0.5
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"correct is {correct}; 0 to {samples} (samples) is allowed")
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; 1 to {samples} (samples) is allowed")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
