"""The rollout part of the training loop: which prompts a step takes, and their scored completions."""

from megagrpo.config.schema import Config
from megagrpo.rollout.dynamic_sampling import SamplingCounts, collect_groups
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.prompts import PromptSampler
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import SamplingParams


class RolloutPipeline:
    """Feeds the loop with one step's groups after the other."""

    def __init__(self, config: Config, generator: RolloutGenerator, sampler: PromptSampler):
        self.config, self.generator, self.sampler = config, generator, sampler

    def collect(self, step: int) -> tuple[StepRollouts, SamplingCounts]:
        """Return the groups that train in `step`, and what it took to find them. Collective over all ranks."""
        rollout = self.config.rollout
        sampling = self._sampling(step)

        def generate(count: int, refill: int) -> StepRollouts:
            # A refill may draw a prompt again (small data sets): other completion indices make it another group.
            first_index = refill * rollout.prompts_per_step * rollout.completions_per_prompt
            return self.generator.generate(self.sampler.next(count), sampling, rollout.completions_per_prompt, first_index)

        return collect_groups(generate, rollout.prompts_per_step, self.config.algorithm.dynamic_sampling)

    def _sampling(self, step: int) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
            seed=self.config.run.seed,
            step=step,
        )
