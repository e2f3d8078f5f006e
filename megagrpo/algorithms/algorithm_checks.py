"""What can be wrong with an algorithm's configuration or its token data, said in one line each."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from megagrpo.algorithms.advantages import ADVANTAGES
from megagrpo.algorithms.losses import LOSSES
from megagrpo.algorithms.overlong import buffer_problem
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import UserError
from megagrpo.registry import suggestion

# log-softmax in float32 rounds to a few ulp of the log-normaliser (up to about 20): a certain token may come
# out slightly above 0.
LOGPROB_ROUNDING = 1e-4

Found = TypeVar("Found")


def check_algorithm_config(
    config: AlgorithmConfig, completions_per_prompt: int, max_new_tokens: int
) -> list[str]:
    """Return every problem of the section that its registries and the rollout's sizes show; empty where
    there is none.
    """
    problems: list[str] = []
    kl_in_reward = config.kl.coef > 0 and config.kl.placement == "reward"
    estimator = _collect(lambda: ADVANTAGES.find(config.advantages), "algorithm.advantages", problems)
    if estimator is not None:
        problems += _unknown_options(
            "algorithm.advantage_options", config.advantage_options, estimator.options, config.advantages
        )
        if estimator.group_baseline and completions_per_prompt < 2:
            problems.append(
                f"algorithm.advantages: {config.advantages} compares completions of one prompt; "
                f"rollout.completions_per_prompt is {completions_per_prompt} and must be at least 2"
            )
        k = {**estimator.options, **config.advantage_options}.get("k", 1)
        if config.advantages == "pass_at_k" and not 1 <= k <= completions_per_prompt:
            problems.append(
                f"algorithm.advantage_options.k: {k:g}; must be 1 to "
                f"rollout.completions_per_prompt = {completions_per_prompt}"
            )
        if estimator.needs_parts and (config.overlong.penalty > 0 or kl_in_reward):
            problems.append(
                f"algorithm.advantages: {config.advantages} normalises each reward apart, so it does not "
                "see what overlong.penalty or "
                "kl.placement: reward take from their sum; use overlong.mask or a length reward, and "
                "kl.placement: loss"
            )
    loss = _collect(lambda: LOSSES.find(config.loss), "algorithm.loss", problems)
    if loss is not None:
        problems += _unknown_options("algorithm.loss_options", config.loss_options, loss.options, config.loss)
        if config.loss == "ppo_clip" and 0 != config.loss_options.get("dual_clip", 0.0) <= 1:
            problems.append(
                f"algorithm.loss_options.dual_clip: {config.loss_options['dual_clip']:g}; must "
                "be above 1 (0: off)"
            )
        if loss.needs_whole_sequences and estimator is not None and estimator.kl_to_go and kl_in_reward:
            problems.append(
                f"algorithm.loss: {config.loss} takes one advantage a completion, and {config.advantages} "
                "with kl.placement: reward gives each token its own; use kl.placement: loss, or loss ppo_clip"
            )
        if config.loss == "sapo" and min(config.loss_options.values(), default=1.0) <= 0:
            problems.append("algorithm.loss_options: tau_positive and tau_negative must be above 0")
    problem = buffer_problem(config.overlong.buffer_of(max_new_tokens), max_new_tokens)
    if config.overlong.penalty > 0 and problem:
        problems.append(problem)
    return problems


def check_logprobs(
    name: str, logprobs: Tensor, num_tokens: int | None = None, sequence_ids: Tensor | None = None
) -> None:
    """Refuse log-probs that are no log-probs, naming the first bad token.

    Args:
        name: what the caller calls them, for the message.
        logprobs: [T]; waits for the device once.
        num_tokens: T that the tokens have; None leaves the length unchecked.
        sequence_ids: [T] to name the sequence of the bad token.

    Raises:
        UserError: a length other than num_tokens, NaN, infinite, or above 0 by more than rounding.
    """
    if num_tokens is not None and logprobs.shape != (num_tokens,):
        raise UserError(
            f"{name}: shape {list(logprobs.shape)} for {num_tokens} tokens; must be one per token"
        )
    bad = ~torch.isfinite(logprobs) | (logprobs > LOGPROB_ROUNDING)
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        where = "" if sequence_ids is None else f" (sequence {int(sequence_ids[token])})"
        raise UserError(
            f"{name}[{token}]{where}: {float(logprobs[token]):g}; a log-probability must be "
            "finite and at most 0"
        )


def _collect(find: Callable[[], Found], place: str, problems: list[str]) -> Found | None:
    try:
        return find()
    except UserError as error:
        problems.append(f"{place}: {error}")
        return None


def _unknown_options(
    place: str, options: Mapping[str, float], known: Mapping[str, float], owner: str
) -> list[str]:
    allowed = f"takes {', '.join(sorted(known))}" if known else "takes no options"
    return [
        f"{place}.{name}: not an option of {owner}{suggestion(name, list(known))}; it {allowed}"
        for name in options
        if name not in known
    ]
