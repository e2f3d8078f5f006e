"""Held-out evaluation: the mean reward of sampled completions, with draws of its own."""

import statistics
from collections.abc import Callable, Sequence

from megagrpo.config.rollout_sections import EvaluationSetConfig, RolloutConfig
from megagrpo.evaluation.score_metrics import measure_scores
from megagrpo.rollout.failed_scores import count_scores, failed_fractions
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest
from megagrpo.telemetry.completions import Samples
from megagrpo.telemetry.names import STANDARD_ERROR
from megagrpo.types import Prompt, SamplingParams

# Evaluations draw from a stream of their own, the same at every step: two evaluations differ by the weights
# alone.
EVALUATION_SEED_OFFSET = 1 << 32

Keep = Callable[[str, Callable[[], Samples]], None]


def keep_nothing(name: str, samples: Callable[[], Samples]) -> None:
    """Take completions that nobody reads."""


def standard_error(values: Sequence[float]) -> float:
    """Return that of the mean of `values`, from their own spread; 0 for one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def evaluate_set(
    generator: RolloutGenerator,
    config: EvaluationSetConfig,
    prompts: Sequence[Prompt],
    rollout: RolloutConfig,
    seed: int,
    keep: Keep = keep_nothing,
) -> dict[str, float]:
    """Sample and score one held-out set. Collective over all ranks.

    Args:
        generator: of all ranks.
        config: of the set.
        prompts: all of them are sampled.
        rollout: lengths, stops and narrowing of the sampling.
        seed: of the run.
        keep: told the set's name, and what returns this rank's completions.

    Returns:
        The mean over all completions of the first reward's value (mean@k; 0 where it has no opinion) under
        `eval/NAME`; below it its standard error over prompts, the set's further metrics, the fraction of
        completions that could not be scored (they count as `rewards.failure_value`) and the mean length.

    Raises:
        UserError: no completion could be scored.
    """
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=config.temperature,
        top_p=rollout.top_p if config.temperature > 0 else 1.0,
        top_k=rollout.top_k if config.temperature > 0 else 0,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        seed=seed + EVALUATION_SEED_OFFSET,
    )
    rollouts = generator.generate(RolloutRequest(prompts, sampling, config.completions_per_prompt))
    records = list(rollouts.records.values())
    counts = count_scores(rollouts)
    counts.require_any(f"evaluation set {config.name!r}")
    keep(config.name, rollouts.samples)
    first = next(iter(records[0].reward.parts))
    values: list[list[float]] = [[] for _ in prompts]
    for (prompt, _), record in rollouts.records.items():
        values[prompt].append(record.reward.parts[first] or 0.0)
    measured = measure_scores(config.metrics, values)
    return {
        f"eval/{config.name}": sum(map(sum, values)) / len(records),
        f"eval/{config.name}/{STANDARD_ERROR}": standard_error([sum(each) / len(each) for each in values]),
        **{f"eval/{config.name}/{key}": value for key, value in measured.items()},
        **failed_fractions(f"eval/{config.name}", counts),
        f"eval/{config.name}/completion_tokens": sum(record.length for record in records) / len(records),
    }
