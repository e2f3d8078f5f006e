"""Held-out evaluation: a set's completions, sampled with draws of their own, and what they came to."""

from collections.abc import Callable, Sequence

from megagrpo.config.rollout_sections import EvaluationSetConfig, RolloutConfig
from megagrpo.evaluation.outcomes import SetOutcome, read_outcome
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest
from megagrpo.telemetry.completions import Samples
from megagrpo.types import Prompt, SamplingParams

# Evaluations draw from a stream of their own, the same at every step: two evaluations differ by the weights
# alone.
EVALUATION_SEED_OFFSET = 1 << 32

Keep = Callable[[str, Callable[[], Samples]], None]


def keep_nothing(name: str, samples: Callable[[], Samples]) -> None:
    """Take completions that nobody reads."""


def evaluate_set(
    generator: RolloutGenerator,
    config: EvaluationSetConfig,
    prompts: Sequence[Prompt],
    rollout: RolloutConfig,
    seed: int,
    keep: Keep = keep_nothing,
) -> SetOutcome:
    """Sample and score one held-out set. Collective over all ranks.

    Args:
        generator: of all ranks.
        config: of the set.
        prompts: all of them are sampled.
        rollout: lengths, stops and narrowing of the sampling, where the set has none of its own.
        seed: of the run.
        keep: told the set's name, and what returns this rank's completions.

    Returns:
        The same on every rank. A completion that could not be scored counts as `rewards.failure_value`.

    Raises:
        UserError: no completion could be scored.
    """
    sampling = sampling_of_set(config, rollout, seed)
    rollouts = generator.generate(RolloutRequest(prompts, sampling, config.completions_per_prompt))
    described = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "completions_per_prompt": config.completions_per_prompt,
        "seed": seed,
    }
    outcome = read_outcome(config.name, config.metrics, rollouts, described)
    outcome.counts.require_any(f"evaluation set {config.name!r}")
    keep(config.name, rollouts.samples)
    return outcome


def sampling_of_set(config: EvaluationSetConfig, rollout: RolloutConfig, seed: int) -> SamplingParams:
    """Return how a set is sampled: its own values, where it has none those of the run."""
    is_greedy = config.temperature == 0
    top_p = rollout.top_p if config.top_p is None else config.top_p
    return SamplingParams(
        max_new_tokens=config.max_new_tokens or rollout.max_new_tokens,
        temperature=config.temperature,
        top_p=1.0 if is_greedy else top_p,
        top_k=0 if is_greedy else rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        seed=seed + EVALUATION_SEED_OFFSET,
    )
