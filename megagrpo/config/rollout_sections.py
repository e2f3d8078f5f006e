"""The sections of what is sampled and scored: prompts, rollouts, rewards, held-out sets."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megagrpo.config.section import (
    FREE,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class MixtureSourceConfig(Section):
    """One source of a mixture."""

    name: str = Field(description="in metrics (source/NAME/...), and in rewards.functions.sources")
    source: str = Field(description="as data.source")
    weight: PositiveFloat | None = Field(
        None, description="share of the prompts that are drawn; null for all: each prompt once an epoch"
    )
    max_new_tokens: PositiveInt | None = Field(
        None, description="of its completions; null: rollout.max_new_tokens"
    )
    stop: tuple[str, ...] | None = Field(None, description="null: rollout.stop")


class CurriculumConfig(Section):
    """Visits to prompts that taught nothing the last time are passed over."""

    skip_solved: Fraction = Field(
        0.0, description="share of the visits to a prompt whose newest group was all right (equal, above 0)"
    )
    skip_unsolved: Fraction = Field(0.0, description="the same of all wrong (equal, 0 or below)")


class DataConfig(Section):
    """Training prompts: `source`, or `mixture`."""

    source: str = Field(
        "", description="JSONL file, or FILE.py:function / package.module:function that returns rows"
    )
    mixture: tuple[MixtureSourceConfig, ...] = Field((), description="several sources in place of one")
    curriculum: CurriculumConfig = CurriculumConfig()
    prompt_field: str = Field("prompt", description="column with the prompt: a string, or chat messages")
    chat_template: bool = Field(
        False,
        description="apply the tokenizer's chat template (a string becomes one user message; where the last "
        "message is the assistant's, it is gone on with)",
    )
    max_prompt_tokens: PositiveInt = Field(
        512, description="longer prompts are handled as `overlong_prompts` says"
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        "error", description="what happens to prompts over max_prompt_tokens"
    )
    shuffle: bool = Field(True, description="a new order each epoch, a function of (seed, epoch) alone")
    limit: PositiveInt | None = Field(None, description="use the first rows only, of each source")

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if bool(self.source) == bool(self.mixture):
            raise ValueError("source or mixture: one of the two must be set")
        names = [each.name for each in self.mixture]
        if len(set(names)) < len(names) or not all(names):
            raise ValueError("mixture: every source needs a name of its own")
        if len({each.weight is None for each in self.mixture}) > 1:
            raise ValueError("mixture: all sources have a weight, or none has")
        return self

    @property
    def parts(self) -> tuple[tuple[str, MixtureSourceConfig], ...]:
        """Each source with the field that names it."""
        if not self.mixture:
            return (("data.source", MixtureSourceConfig(name="", source=self.source)),)
        return tuple((f"data.mixture.{place}.source", each) for place, each in enumerate(self.mixture))

    @property
    def description(self) -> str:
        """Name all sources."""
        return ", ".join(each.source for _, each in self.parts)


class LogprobGapConfig(Section):
    """Bounds on |engine - actor| log-probs, over a step's tokens that the actor's own weights sampled, before
    its first update.

    The largest of thousands of rounding errors grows with the run: it is what a warning looks at. A stop
    judges the mean, or a maximum that rounding cannot reach, and saves the last finished step first.
    """

    warn_above: PositiveFloat | Literal["auto"] | None = Field(
        "auto",
        description="warn where the largest gap is over this; auto: 1e-3 where actor and engine are float32, "
        "else 0.5, and none where top_p or top_k narrow vLLM's log-probs; null: never",
    )
    stop_above_mean: PositiveFloat | None = Field(
        None, description="end the run where the mean gap of a step is over this"
    )
    stop_above: PositiveFloat | None = Field(
        None, description="end the run where the largest gap is over this; far above what rounding can give"
    )


class RolloutConfig(Section):
    """Sampling of the training completions."""

    prompts_per_step: PositiveInt = Field(32, description="N: groups per step, over all ranks")
    completions_per_prompt: PositiveInt = Field(8, description="G: completions per group")
    max_new_tokens: PositiveInt = Field(256, description="length limit of a completion")
    temperature: PositiveFloat = Field(
        1.0, description="sampling temperature, also that of the actor's log-probs"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="nucleus; below 1 vLLM's log-probs are renormalised"
    )
    top_k: NonNegativeInt = Field(0, description="0 keeps the whole vocabulary")
    stop: tuple[str, ...] = Field((), description="strings that end a completion")
    stop_token_ids: tuple[int, ...] = Field(
        (), description="token ids that end a completion, beside end-of-sequence"
    )
    logprob_gap: Annotated[LogprobGapConfig, FREE] = LogprobGapConfig()
    off_policy: Literal["synchronous", "one_step_off"] = Field(
        "synchronous",
        description="one_step_off: generate a step's completions while the step before is trained",
    )

    @property
    def max_policy_age(self) -> int:
        """Publishes that may lie between the weights that sampled a completion and those that are trained
        on it.
        """
        return 1 if self.off_policy == "one_step_off" else 0


class RewardConfig(Section):
    """One reward."""

    name: str = Field(description="registered reward, or FILE.py:function / package.module:function")
    weight: float = 1.0
    sources: tuple[str, ...] = Field(
        (), description="only prompts of these sources (data.mixture, or the rows' column `source`)"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword options of the reward")


class RewardsConfig(Section):
    """All rewards; the value of a completion is the weighted sum."""

    functions: tuple[RewardConfig, ...] = Field(min_length=1)
    workers: Annotated[PositiveInt, FREE] = Field(1, description="reward processes per rank")
    timeout_seconds: PositiveFloat = Field(
        10.0, description="a completion that takes longer is killed and scores `failure_value`"
    )
    failure_value: float = Field(0.0, description="reward of a completion whose scoring timed out or crashed")
    special_tokens: Literal["strip", "keep"] = Field(
        "strip",
        description="what rewards see of a completion's special tokens (<think>, tool marks, where they are "
        "some); the one that ends it is left out always",
    )
    outage_seconds: Annotated[PositiveFloat, FREE] = Field(
        60.0, description="the run stops where a reward scores nothing for so long, over several prompts"
    )
    memory_gib: Annotated[PositiveFloat, FREE] = Field(
        8.0, description="address space of a reward process, and of each process that it starts"
    )
    network: Annotated[bool, FREE] = Field(
        False, description="true: reward code reaches the network, as a judge behind HTTP must be"
    )
    environment: Annotated[tuple[str, ...], FREE] = Field(
        (), description="environment variables for reward processes beside PATH, HOME, LANG and the like"
    )


class EvaluationSetConfig(Section):
    """One held-out set. Its metric is the mean of the first reward (mean@k) over `completions_per_prompt`
    samples.
    """

    name: str
    source: str
    limit: PositiveInt | None = None
    completions_per_prompt: PositiveInt = 1
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="nucleus; null: rollout.top_p, and none where it is greedy"
    )
    max_new_tokens: PositiveInt | None = Field(None, description="null: rollout.max_new_tokens")
    metrics: tuple[str, ...] = Field(
        ("pass_at_k", "maj_at_k"),
        description="what is told beside the mean: registered metrics, or FILE.py:function",
    )


class EvaluationConfig(Section):
    """Held-out evaluation."""

    every: NonNegativeInt = Field(10, description="steps between evaluations; 0 = first and last only")
    sets: tuple[EvaluationSetConfig, ...] = ()
