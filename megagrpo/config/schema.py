"""The configuration: one frozen section per subsystem. No torch, no Megatron here.

Every value lives in one place; derived values are properties. An unknown key is an error. Checks that need
one section only are written beside its fields; checks across sections are in `planning/checks.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.engine import EngineConfig, TransformersConfig, WeightsConfig
from megagrpo.config.section import (
    FREE,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class RunConfig(Section):
    """The run as a whole."""

    dir: Annotated[str, FREE] = Field(
        "runs/run", description="run folder: config, metrics, checkpoints, exports"
    )
    steps: Annotated[PositiveInt, FREE] = Field(100, description="outer steps: rollout, update, publish")
    seed: NonNegativeInt = Field(0, description="seed of prompt order and sampling")
    resume: Annotated[Literal["auto", "never"], FREE] = Field(
        "auto", description="auto: go on from the newest good checkpoint of the run folder"
    )
    export_hf: Annotated[bool, FREE] = Field(
        True, description="write the final weights as an HF folder, DIR/hf"
    )
    allow_config_changes: Annotated[tuple[str, ...], FREE] = Field(
        (),
        description="sections or fields, as optimizer.lr, that may differ from the checkpoint's when a "
        "run goes on from it; data.source: its prompts too, whose first epoch then begins",
    )
    deterministic: Annotated[bool, FREE] = Field(
        False, description="two runs are equal to the bit on GPUs too, slower; on the CPU they always are"
    )
    max_nonfinite_steps: Annotated[PositiveInt, FREE] = Field(
        3, description="stop after this many skipped (non-finite) updates in a row"
    )
    collective_timeout_seconds: Annotated[PositiveInt, FREE] = Field(
        600, description="a collective that waits longer than this ends the run"
    )


class ModelConfig(Section):
    """The pretrained model."""

    path: Annotated[str, FREE] = Field(
        description="HF folder: config.json, safetensors (sharded or not), tokenizer"
    )
    tokenizer: Annotated[str | None, FREE] = Field(
        None, description="tokenizer folder, where it is not the model's"
    )
    attention: Annotated[Literal["auto", "local", "te"], FREE] = Field(
        "auto", description="layer spec: te = Transformer Engine (CUDA only), auto = te where it can be used"
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


class ParallelConfig(Section):
    """The rank grid. dp = world size / (tp * pp * cp)."""

    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    vpp: Annotated[int, Field(ge=2)] | None = Field(
        None, description="model chunks per pipeline stage (interleaved schedule)"
    )
    layers_first_stage: PositiveInt | None = Field(
        None, description="layers of the first stage, where it has others than the middle ones"
    )
    layers_last_stage: PositiveInt | None = Field(
        None, description="layers of the last stage, where it has others than the middle ones"
    )
    pipeline_layout: str | None = Field(
        None, description="every chunk written out, as Et|tt|ttL: E embedding, t layer, L loss"
    )
    cp: PositiveInt = Field(
        1, description="context parallel size: the tokens of a micro-batch are shared out"
    )
    overlap_grad_reduce: bool = Field(
        False, description="reduce gradients while the last micro-batch's backward runs"
    )
    overlap_param_gather: bool = Field(
        False, description="gather updated weights while the next forward runs; needs overlap_grad_reduce"
    )
    sp: bool = Field(False, description="sequence parallel (activations between TP regions sharded over tp)")
    ep: PositiveInt = Field(
        1, description="expert parallel size: the experts of a layer are shared out over cp * dp ranks"
    )
    etp: PositiveInt | None = Field(None, description="ranks that split one expert; null: tp")
    moe_dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall",
        description="how tokens reach their experts; allgather moves every token to every rank, "
        "in fewer messages",
    )


class PrecisionConfig(Section):
    """Number formats of the actor and the reference."""

    recipe: Literal["fp32", "bf16", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"] = Field(
        "fp32",
        description="bf16 and fp8 keep float32 main parameters and gradients; fp8 needs CUDA and "
        "Transformer Engine",
    )


class LogprobGapConfig(Section):
    """Bounds on |engine - actor| log-probs, over a step's tokens that the actor's own weights sampled, before
    its first update.

    The largest of thousands of rounding errors grows with the run: it is what a warning looks at. A stop
    judges the mean, or a maximum that rounding cannot reach, and saves the last finished step first.
    """

    warn_above: PositiveFloat | Literal["auto"] | None = Field(
        "auto",
        description="warn where the largest gap is over this; auto: 1e-3 where actor and engine are float32, "
        "else 0.5, and none where top_p or top_k narrow the engine's log-probs; null: never",
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
        1.0, description="nucleus; below 1 the engine's log-probs are renormalised"
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
    def is_narrowed(self) -> bool:
        """Whether top_p or top_k leave tokens out: the engine's log-probs are over those kept, the actor's
        over all, and the two cannot be compared.
        """
        return self.top_p < 1 or self.top_k > 0

    @property
    def max_policy_age(self) -> int:
        """Publishes that may lie between the weights that sampled a completion and those that are trained
        on it.
        """
        return 1 if self.off_policy == "one_step_off" else 0


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat = 1e-6
    min_lr_fraction: Fraction = Field(1.0, description="final learning rate as a fraction of lr")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer updates over which lr rises from 0")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = Field(1.0, description="global gradient norm; 0 = off")


class UpdateConfig(Section):
    """How a step's samples become optimizer updates."""

    mini_batches_per_step: PositiveInt = Field(
        1, description="optimizer updates per pass over the step's groups"
    )
    epochs_per_step: PositiveInt = Field(1, description="passes over the step's groups")
    max_tokens_per_microbatch: Annotated[PositiveInt, FREE] = Field(
        8192, description="never exceeded, alignment padding included"
    )
    packing: Annotated[bool, FREE] = Field(True, description="false: one sequence per micro-batch")
    share_prompts: Annotated[bool, FREE] = Field(
        True, description="compute a group's prompt once per micro-batch (local layer spec only)"
    )
    recompute: Annotated[Literal["none", "selective", "full"], FREE] = Field(
        "none", description="activation recompute"
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        0.0,
        description="weight of the balance loss of each expert layer (DeepSeek-V3, Eq. 17, per sequence); "
        "0: none",
    )

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return self.mini_batches_per_step * self.epochs_per_step


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
        True, description="false: reward processes reach no network (needs Linux user namespaces)"
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


class CheckpointConfig(Section):
    """Distributed checkpoints."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0 = none")
    asynchronous: bool = Field(
        True, description="write in the background from a copy in host memory; false: training waits"
    )
    keep_last: PositiveInt = Field(
        2, description="the newest ones; the very newest complete one always stays"
    )
    keep_every: NonNegativeInt = Field(
        0, description="checkpoints of steps that are a multiple of it stay for ever; 0 = none"
    )
    keep_best: NonNegativeInt = Field(
        0, description="how many of those with the best value of best_metric stay"
    )
    best_metric: str | None = Field(
        None, description="held-out set, NAME of evaluation.sets, evaluated at the checkpoint's step"
    )
    best_mode: Literal["max", "min"] = Field("max", description="which value of best_metric is best")
    hf_every: NonNegativeInt = Field(
        0, description="steps between HF exports of the same weights, CHECKPOINT/hf; 0 = none"
    )
    save_reference: bool = Field(
        False, description="write the reference weights too; otherwise they are named by source and checksum"
    )


class TelemetryConfig(Section):
    """What is written while the run goes."""

    writers: tuple[str, ...] = Field(
        ("jsonl", "tensorboard"), description="registered metrics writers, or FILE.py:NAME"
    )
    completions_every: NonNegativeInt = Field(
        10, description="steps between samples in DIR/completions; 0 = none"
    )
    completions_count: PositiveInt = Field(8, description="completions written each time")

    @model_validator(mode="after")
    def _check(self) -> "TelemetryConfig":
        if "jsonl" not in self.writers:
            raise ValueError("writers: jsonl must be one of them; summary and report read metrics.jsonl")
        if len(set(self.writers)) < len(self.writers):
            raise ValueError("writers: one of them is named twice")
        return self


class WatchdogConfig(Section):
    """A phase that takes longer than its budget ends the run, with the Python stacks of all ranks in
    DIR/stacks.
    """

    factor: PositiveFloat = Field(
        20.0, description="budget of a phase: this many times the median of its recent durations, ..."
    )
    floor_seconds: PositiveFloat = Field(300.0, description="... at least this, ...")
    limit_seconds: PositiveFloat = Field(
        7200.0, description="... at most this, which is also the budget of a phase's first run"
    )


class SpikesConfig(Section):
    """Updates and steps that leave the run's own track, judged against the running median of the last
    `window` of their kind.
    """

    loss_factor: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="an update whose |loss| is over this many times the median, and over 1, is a spike; "
        "null: not judged",
    )
    grad_norm_factor: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="an update whose gradient norm is over this many times the median is a spike; null: not "
        "judged",
    )
    reward_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="a step whose mean reward is under this fraction of a positive median has collapsed; "
        "null: not judged",
    )
    window: Annotated[int, Field(ge=2)] = Field(
        32, description="values of a median; nothing is judged before half of them are there"
    )
    action: Literal["warn", "skip", "roll_back"] = Field(
        "warn",
        description="skip: the update is not applied; roll_back: on from the newest checkpoint, with the "
        "prompts that come next",
    )
    max_roll_backs: PositiveInt = Field(3, description="one more ends the run")


class ExportConfig(Section):
    """HF folders of the trained weights: DIR/hf, and those in checkpoints."""

    dtype: Annotated[Literal["source", "float32", "bfloat16"], FREE] = Field(
        "source", description="of the tensors and in config.json; source: what the model's config.json names"
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
    def total_updates(self) -> int:
        """Optimizer updates of the whole run: what a decaying learning rate is stretched over."""
        return self.run.steps * self.update.updates_per_step
