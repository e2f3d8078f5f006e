"""The held-out evaluation of a run: which sets, and when."""

from collections.abc import Sequence

from megagrpo.config.rollout_sections import EvaluationSetConfig, RolloutConfig
from megagrpo.evaluation.evaluate import Keep, evaluate_set, keep_nothing
from megagrpo.evaluation.outcomes import SetOutcome
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.types import Prompt

HeldOutSets = Sequence[tuple[EvaluationSetConfig, Sequence[Prompt]]]


class Evaluator:
    """Evaluates all held-out sets of a run."""

    def __init__(
        self,
        generator: RolloutGenerator,
        sets: HeldOutSets,
        rollout: RolloutConfig,
        seed: int,
        every: int,
        num_steps: int,
    ):
        """Take what evaluations need; nothing is generated yet.

        Args:
            every: steps between evaluations; 0: before the first step and after the last one alone.
        """
        self._generator, self._sets, self._rollout, self._seed = generator, sets, rollout, seed
        self._every, self._num_steps = every, num_steps

    def is_due(self, step: int) -> bool:
        """Say whether the sets are evaluated after `step`."""
        return step == self._num_steps or bool(self._every and step % self._every == 0)

    def run(self, keep: Keep = keep_nothing) -> list[SetOutcome]:
        """Return what all sets came to. Collective over all ranks. `keep`: see `evaluate_set`."""
        return [
            evaluate_set(self._generator, config, prompts, self._rollout, self._seed, keep)
            for config, prompts in self._sets
        ]
