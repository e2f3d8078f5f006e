"""The `algorithm:` section: advantages, token loss, aggregation, KL, correction, overlong handling."""

from typing import Literal

from pydantic import Field

from megagrpo.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476, Eq. 11): groups whose rewards are all equal are replaced."""

    enabled: bool = False
    max_refills: NonNegativeInt = Field(3, description="extra generation rounds per step at most; then the step trains on what it has")


class OverlongConfig(Section):
    """Completions that reach the length limit."""

    penalty: NonNegativeFloat = Field(0.0, description="DAPO soft punishment (Eq. 13): largest deduction; 0 = off")
    buffer_tokens: PositiveInt | None = Field(None, description="tokens before the limit over which the deduction grows")
    mask: bool = Field(False, description="completions cut by the limit take no part in the loss")


class KLConfig(Section):
    """Penalty towards the reference."""

    coef: NonNegativeFloat = Field(0.0, description="0: no reference model is built")
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    placement: Literal["loss", "reward"] = "loss"


class AlgorithmConfig(Section):
    """Advantages, loss, aggregation. A preset fills what the user leaves out."""

    preset: str | None = Field(None, description="named set of defaults for this section and the ones it names")
    advantages: str = Field("grpo", description="registered estimator")
    advantage_std: Literal["population", "sample"] = "population"
    advantage_std_floor: Literal["add", "max"] = "add"
    advantage_std_epsilon: NonNegativeFloat = 1e-6
    loss: str = Field("ppo_clip", description="registered token loss")
    clip_low: PositiveFloat = Field(0.2, description="ratio is clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="ratio is clipped above 1 + clip_high")
    loss_options: dict[str, float] = Field(default_factory=dict, description="further constants of the chosen loss")
    aggregation: Literal["sequence_mean", "group_token_mean", "token_mean", "constant", "sequence_sum"] = "sequence_mean"
    aggregation_constant: PositiveInt | None = Field(None, description="denominator length of `constant` (Dr. GRPO)")
    entropy_coef: float = Field(0.0, description="entropy bonus (negative: penalty)")
    old_logprobs: Literal["actor", "engine"] = Field("actor", description="where the ratio's denominator comes from")
    kl: KLConfig = KLConfig()
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
