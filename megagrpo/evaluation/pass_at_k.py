"""Accuracy over several samples of one prompt: pass@k, maj@k, mean@k. Pure; averages over prompts are the
caller's.
"""

from collections.abc import Hashable, Sequence
from math import comb


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
    _check_k(k, samples)
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def compute_maj_at_k(answers: Sequence[Hashable], right: Sequence[bool], k: int) -> float:
    """Return whether the most frequent of the first k answers is right: 1.0 or 0.0, or a fraction where
    several are equally frequent.

    A tie counts as drawing one of the tied answers at random. An answer of None (nothing could be extracted)
    has no vote; without any vote the result is 0.0. Self-consistency: Wang et al. 2022, arXiv 2203.11171.

    Args:
        answers: the extracted answer of each sample.
        right: whether each answer is right; equal answers must agree.
        k: number of samples that vote, 1 <= k <= len(answers).

    Raises:
        ValueError: k is outside its range, the lengths differ, or equal answers are judged differently.
    """
    if len(answers) != len(right):
        raise ValueError(f"{len(answers)} answers but {len(right)} judgements")
    _check_k(k, len(answers))
    votes: dict[Hashable, int] = {}
    judgement: dict[Hashable, bool] = {}
    for answer, is_right in zip(answers[:k], right[:k], strict=True):
        if answer is None:
            continue
        if judgement.setdefault(answer, is_right) != is_right:
            raise ValueError(f"answer {answer!r} is judged right and wrong")
        votes[answer] = votes.get(answer, 0) + 1
    leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(judgement[answer] for answer in leaders) / len(leaders) if leaders else 0.0


def compute_mean_at_k(scores: Sequence[float], k: int) -> float:
    """Return the mean score of the first k samples; k outside 1 to len(scores) raises ValueError."""
    _check_k(k, len(scores))
    return sum(scores[:k]) / k


def _check_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; 1 to {samples} (samples) is allowed")
