"""The sections of what learns: the model, where it lies, and how it is updated."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megagrpo.config.section import (
    FREE,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class ModelConfig(Section):
    """The pretrained model."""

    path: Annotated[str, FREE] = Field(
        description="HF folder: config.json, safetensors (sharded or not), tokenizer"
    )
    tokenizer: Annotated[str | None, FREE] = Field(
        None, description="tokenizer folder, where it is not the model's"
    )
    family: str | None = Field(
        None,
        description="FILE.py:CLASS, an architecture of yours for the model_type of its config.json (or a "
        "registered one's name); null: the registered one",
    )
    ignore_fields: tuple[str, ...] = Field(
        (), description="fields of its config.json that are left out, for the whole run and its exports"
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="values in place of those in its config.json, for the whole run and its exports",
    )
    attention: Annotated[Literal["auto", "local", "te"], FREE] = Field(
        "auto", description="layer spec: te = Transformer Engine (CUDA only), auto = te where it can be used"
    )

    @property
    def changed_fields(self) -> frozenset[str]:
        """Fields of its config.json that the run reads otherwise."""
        return frozenset({*self.ignore_fields, *self.overrides})


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
        description="bf16 and fp8 keep float32 main parameters; fp8 needs CUDA and "
        "Transformer Engine, or emulate",
    )
    emulate: bool = Field(
        False,
        description="compute in float32, with operands rounded as by the fp8 recipe, on any device: to "
        "study it",
    )
    gradients: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="buffers in which micro-batches and ranks add gradients up; bf16: half the memory, each "
        "sum rounded",
    )


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
    recompute: Annotated[tuple[Literal["full", "core_attn", "layernorm", "mlp", "moe_act"], ...], FREE] = (
        Field(
            (),
            description="what the backward pass computes again in place of keeping it: whole layers "
            "(full), or parts: core_attn (of no use with Transformer Engine), layernorm (where it is a "
            "module of its own), mlp (dense layers), moe_act (experts' activation; Transformer Engine alone)",
        )
    )
    offload: Annotated[tuple[Literal["gradients", "optimizer", "reference"], ...], FREE] = Field(
        (),
        description="what leaves the device between updates, for engines that sleep while it is there: "
        "gradients are freed; main parameters and moments, and the reference's weights, go to pinned host "
        "memory",
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        0.0,
        description="weight of the balance loss of each expert layer (DeepSeek-V3, Eq. 17, per sequence); "
        "0: none",
    )

    @field_validator("recompute", mode="before")
    @classmethod
    def _read_recompute(cls, value: Any) -> Any:
        """Take a name alone for a list of one, and none for an empty one."""
        if isinstance(value, str):
            return () if value == "none" else (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("recompute")
    @classmethod
    def _check_recompute(cls, parts: tuple[str, ...]) -> tuple[str, ...]:
        if "full" in parts and len(parts) > 1:
            raise ValueError("full computes whole layers again; name it alone")
        return parts

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return self.mini_batches_per_step * self.epochs_per_step


class SpikesConfig(Section):
    """Updates and steps that differ sharply from those before them, judged against the running median of the
    last `window` of their kind.
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
