"""What an evaluation tells beside the mean: registered metrics, or a user's own by FILE.py:function.

A metric is called with the scores of a held-out set, a sequence of the first reward's values for each prompt,
and, where it has a parameter `answers`, with what the reward read as answers (`Reward.answer`). It returns a
number for each name: `eval/SET/NAME`. The same on every rank; pure.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Any

from megagrpo.errors import SharedUserError
from megagrpo.registry import Registry, require_call

Metric = Callable[..., Mapping[str, float]]
Scores = Sequence[Sequence[float]]
Answers = Sequence[Sequence[str | None]]
RIGHT = 1.0  # a completion is right where its value is at least this


def _read_metric(attribute: Any) -> Metric:
    require_call(attribute, ["scores"])
    return attribute


EVALUATION_METRICS: Registry[Metric] = Registry("evaluation metric", _read_metric)


def is_mean_over_prompts(name: str) -> bool:
    """Say whether a metric is the mean of what it tells of each prompt alone, as all of ours are."""
    return name in EVALUATION_METRICS.names()


def measure_scores(names: Sequence[str], scores: Scores, answers: Answers = ()) -> dict[str, float]:
    """Return what the metrics called `names` tell of the scores; SharedUserError where a user's own fails."""
    measured: dict[str, float] = {}
    for name in names:
        metric = EVALUATION_METRICS.find(name)
        try:
            takes_answers = "answers" in inspect.signature(metric).parameters
            told = metric(scores, answers=answers) if takes_answers else metric(scores)
            measured |= {str(key): float(value) for key, value in told.items()}
        except Exception as error:  # a user's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise SharedUserError(
                f"evaluation metric {name}: must return numbers by name: {reason}"
            ) from error
    return measured


@EVALUATION_METRICS.register("pass_at_k")
def measure_pass_at_k(scores: Scores) -> dict[str, float]:
    """Return `pass@k`, the mean over prompts, for k = 2, 4, 8, ... up to the samples that every prompt has;
    nothing where a prompt has one sample. pass@1 of right or wrong scores is the mean.
    """
    ks = _powers_of_two(scores)
    right = [sum(value >= RIGHT for value in values) for values in scores]
    return {
        f"pass@{k}": sum(
            compute_pass_at_k(correct, len(values), k) for correct, values in zip(right, scores, strict=True)
        )
        / len(scores)
        for k in ks
    }


def _powers_of_two(scores: Scores) -> list[int]:
    """Return 2, 4, 8, ... up to the samples that every prompt has."""
    samples = min((len(values) for values in scores), default=0)
    return [2**power for power in range(1, samples.bit_length())]


@EVALUATION_METRICS.register("maj_at_k")
def measure_maj_at_k(scores: Scores, answers: Answers = ()) -> dict[str, float]:
    """Return `maj@k`, the mean over prompts, for the k of pass@k: how often the answer that most of k samples
    give is right (Wang et al. 2022, arXiv 2203.11171). Nothing where the reward tells no answers.

    The samples of a prompt are cut, in the order of their draws, into groups of k that share none: the mean
    over them is unbiased.
    """
    if not any(answer is not None for each in answers for answer in each):
        return {}
    measured = {}
    for k in _powers_of_two(scores):
        votes = [
            [
                compute_majority(values[start : start + k], told[start : start + k])
                for start in range(0, len(values) - k + 1, k)
            ]
            for values, told in zip(scores, answers, strict=True)
        ]
        measured[f"maj@{k}"] = sum(sum(each) / len(each) for each in votes) / len(scores)
    return measured


def compute_majority(values: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the probability that the answer with most votes is right.

    Samples without an answer don't vote; where nobody votes it is 0. A tie is broken by lot among the
    answers that lead: of one right answer among m it is 1 / m. Samples with equal answers are judged alike;
    where they are not, the share of them that is right counts.

    Example:
        >>> compute_majority([1.0, 0.0, 0.0, 0.0], ["7", "8", "", ""])
        0.5
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    leading = [answer for answer, count in votes.items() if count == most]
    right = Counter(
        answer for answer, value in zip(answers, values, strict=True) if answer and value >= RIGHT
    )
    return sum(right[answer] / most for answer in leading) / len(leading)


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
