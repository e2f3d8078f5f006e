"""The configuration: one frozen section per subsystem. No torch, no Megatron here.

Every value lives in one place; derived values are properties. An unknown key is an error. Checks that need
one section only are written beside its fields; checks across sections are in `planning/checks.py`.
"""

from typing import Annotated

from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.config.engine_sections import EngineConfig, TransformersConfig, WeightsConfig
from megagrpo.config.rollout_sections import DataConfig, EvaluationConfig, RewardsConfig, RolloutConfig
from megagrpo.config.run_sections import (
    CheckpointConfig,
    ExportConfig,
    RunConfig,
    TelemetryConfig,
    WatchdogConfig,
)
from megagrpo.config.section import FREE, Section
from megagrpo.config.training_sections import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    SpikesConfig,
    UpdateConfig,
)


class Config(Section):
    """A run, fully described."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    parallel: Annotated[ParallelConfig, FREE] = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    engine: Annotated[EngineConfig, FREE] = TransformersConfig()
    weights: WeightsConfig = WeightsConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    update: UpdateConfig = UpdateConfig()
    rewards: RewardsConfig
    evaluation: Annotated[EvaluationConfig, FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, FREE] = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    telemetry: Annotated[TelemetryConfig, FREE] = TelemetryConfig()
    watchdog: Annotated[WatchdogConfig, FREE] = WatchdogConfig()
    spikes: Annotated[SpikesConfig, FREE] = SpikesConfig()

    @property
    def model_folder(self) -> str:
        """The model's folder as every part of the run reads it: its own, or one in the run folder where
        fields of its config.json are changed (`write_model_folder`).
        """
        return f"{self.run.dir}/model" if self.model.changed_fields else self.model.path

    @property
    def has_narrowed_logprobs(self) -> bool:
        """Whether the engine's log-probs are over fewer tokens than the actor's."""
        rollout = self.rollout
        return self.engine.narrows_logprobs(rollout.temperature, rollout.top_k, rollout.top_p)

    @property
    def longest_sequence_tokens(self) -> int:
        """Tokens of the longest prompt with the longest completion, those of held-out sets too."""
        new_tokens = [
            self.rollout.max_new_tokens,
            *(each.max_new_tokens or 0 for each in self.evaluation.sets),
            *(each.max_new_tokens or 0 for each in self.data.mixture),
        ]
        return self.data.max_prompt_tokens + max(new_tokens)

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run: what a decaying learning rate is stretched over."""
        return self.run.steps * self.update.updates_per_step
