"""The `algorithm:` section: advantages, token loss, aggregation, KL, correction, overlong handling."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megagrpo.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

Aggregation = Literal["sequence_mean", "group_token_mean", "token_mean", "constant", "sequence_sum"]


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476, Eq. 11): groups whose rewards are all equal are replaced."""

    enabled: bool = False
    max_refills: NonNegativeInt = Field(
        3, description="extra generation rounds per step at most; then the step trains on what it has"
    )


class OverlongConfig(Section):
    """Completions that reach the length limit."""

    penalty: NonNegativeFloat = Field(
        0.0, description="DAPO soft punishment (Eq. 13): largest deduction; 0 = off"
    )
    buffer_tokens: PositiveInt | None = Field(
        None,
        description="tokens before the limit over which the deduction grows; default: a fifth of "
        "rollout.max_new_tokens",
    )
    mask: bool = Field(False, description="completions cut by the limit take no part in the loss")

    def buffer_of(self, max_new_tokens: int) -> int:
        """Return `buffer_tokens`, else a fifth of the limit (DAPO: 4096 of 20480)."""
        return self.buffer_tokens or max(1, max_new_tokens // 5)


class KLConfig(Section):
    """Penalty towards the reference."""

    coef: NonNegativeFloat = Field(0.0, description="0: no reference model is built")
    estimator: Literal["k1", "k2", "k3", "abs", "exact"] = Field(
        "k3", description="exact: over the full vocabulary (loss only)"
    )
    placement: Literal["loss", "reward"] = "loss"
    score_term: bool = Field(
        False,
        description="add the gradient of the sampling (KL estimate times that of the log-prob) to the loss "
        "term, so that k1 and k3 have the KL's own gradient on policy (arXiv 2506.09477)",
    )
    linear_above: Annotated[float, Field(gt=0, le=20)] = Field(
        10.0, description="k3 goes on linearly where log(reference / actor) exceeds this, 20 at most"
    )
    adaptive_target: PositiveFloat | None = Field(
        None, description="KL per token that an adaptive coefficient holds; default: fixed"
    )
    adaptive_gain: PositiveFloat = Field(
        0.1, description="largest share by which coef moves per step is a fifth of this"
    )

    @model_validator(mode="after")
    def _check(self) -> "KLConfig":
        if self.estimator == "exact" and self.placement == "reward":
            raise ValueError("estimator: exact is a loss term; placement reward takes k1, k2, k3 or abs")
        if self.score_term and (self.estimator == "exact" or self.placement == "reward"):
            raise ValueError("score_term: belongs to a sampled estimator in the loss; leave it out")
        if self.adaptive_target is not None and self.coef == 0:
            raise ValueError("coef: 0 stays 0; an adaptive coefficient (adaptive_target) starts above 0")
        return self


class CorrectionConfig(Section):
    """Correction for the gap between the engine's policy and the actor: ratio = old_logprobs (actor) over
    rollout_logprobs (engine).
    """

    importance: Literal["none", "token", "sequence"] = Field(
        "none", description="importance weight of the policy loss"
    )
    importance_cap: PositiveFloat = Field(2.0, description="weights are truncated at this")
    band_low: NonNegativeFloat = Field(0.0, description="IcePop: tokens with a smaller ratio are masked")
    band_high: PositiveFloat | None = Field(None, description="IcePop: tokens with a larger ratio are masked")
    reject: Literal["none", "geometric", "product"] = Field(
        "none", description="ratio of a sequence that the bounds below judge"
    )
    reject_low: NonNegativeFloat = Field(0.0, description="sequences with a smaller ratio are rejected")
    reject_high: PositiveFloat | None = Field(None, description="sequences with a larger ratio are rejected")
    veto_below: NonNegativeFloat = Field(
        0.0, description="a sequence with any token ratio below this is rejected; 0 = off"
    )

    @model_validator(mode="after")
    def _check(self) -> "CorrectionConfig":
        for name, low, high in (
            ("band", self.band_low, self.band_high),
            ("reject", self.reject_low, self.reject_high),
        ):
            if high is not None and low >= high:
                raise ValueError(f"{name}_low: {low:g} is not below {name}_high = {high:g}")
        if self.reject == "none" and (self.reject_low > 0 or self.reject_high is not None):
            raise ValueError(
                "reject: none, but reject_low or reject_high is set; choose geometric or product"
            )
        if self.reject != "none" and self.reject_low == 0 and self.reject_high is None:
            raise ValueError(f"reject: {self.reject} needs reject_low, reject_high or both")
        return self

    @property
    def masks(self) -> bool:
        """Whether tokens or sequences can be taken out of the loss."""
        return self.masks_tokens or self.rejects_sequences

    @property
    def masks_tokens(self) -> bool:
        """Whether single tokens can be taken out of the loss (IcePop)."""
        return self.band_low > 0 or self.band_high is not None

    @property
    def rejects_sequences(self) -> bool:
        """Whether whole sequences can be rejected; then the advantages need the correction first."""
        return self.reject != "none" or self.veto_below > 0

    @property
    def enabled(self) -> bool:
        """Whether anything here changes the loss."""
        return self.masks or self.importance != "none"


class AlgorithmConfig(Section):
    """Advantages, loss, aggregation. A preset fills what the user leaves out."""

    preset: str | None = Field(
        None, description="named set of defaults for this section and the ones it names"
    )
    advantages: str = Field("grpo", description="registered estimator")
    advantage_std: Literal["population", "sample"] = "population"
    advantage_std_floor: Literal["add", "max"] = Field(
        "max", description="std + epsilon, or max(std, epsilon)"
    )
    advantage_std_epsilon: NonNegativeFloat = 1e-6
    advantage_options: dict[str, float] = Field(
        default_factory=dict, description="further constants of the chosen estimator"
    )
    loss: str = Field("ppo_clip", description="registered token loss")
    clip_low: PositiveFloat = Field(0.2, description="ratio is clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="ratio is clipped above 1 + clip_high")
    loss_options: dict[str, float] = Field(
        default_factory=dict, description="further constants of the chosen loss"
    )
    aggregation: Aggregation = "sequence_mean"
    aggregation_constant: PositiveInt | None = Field(
        None, description="denominator length of `constant` (Dr. GRPO)"
    )
    entropy_coef: float = Field(0.0, description="entropy bonus (negative: penalty)")
    old_logprobs: Literal["actor", "engine"] = Field(
        "actor", description="where the ratio's denominator comes from"
    )
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @model_validator(mode="after")
    def _check(self) -> "AlgorithmConfig":
        if self.aggregation == "constant" and self.aggregation_constant is None:
            raise ValueError(
                "aggregation_constant: missing; aggregation constant divides by it (Dr. GRPO: "
                "rollout.max_new_tokens)"
            )
        if self.old_logprobs == "engine" and self.correction.enabled:
            raise ValueError(
                "correction: compares the actor's old log-probs with the engine's; set old_logprobs: actor"
            )
        return self
