"""The sections of what is sampled and scored: prompts, rollouts, rewards, held-out sets."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.config.section import (
    FREE,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class DataConfig(Section):
    """Training prompts."""

    source: str = Field(
        description="JSONL file, or FILE.py:function / package.module:function that returns rows"
    )
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
    limit: PositiveInt | None = Field(None, description="use the first rows only")


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
    metrics: tuple[str, ...] = Field(
        ("pass_at_k",), description="what is told beside the mean: registered metrics, or FILE.py:function"
    )


class EvaluationConfig(Section):
    """Held-out evaluation."""

    every: NonNegativeInt = Field(10, description="steps between evaluations; 0 = first and last only")
    sets: tuple[EvaluationSetConfig, ...] = ()
