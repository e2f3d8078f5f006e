"""The contract of a token loss.

A loss maps the loss tokens of one micro-batch to one unreduced value per token; `aggregation.py` alone
reduces. Only tokens that train are passed: prompt, padding, invalid completions and tokens that a correction
masked are not in the tensors at all.

**Every loss is token-local in its gradient.** Losses with a sequence statistic (gspo, gmpo) take the
statistic detached and carry the gradient by `attach_gradient`, which is exact for them (their papers'
gradient, derived in each file). So `sequence_sum` is called on detached tensors only, context parallelism
needs one forward all-reduce and no backward one, and a sequence statistic never couples the backward passes
of two ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from megagrpo.algorithms.metrics import Metric
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import UserError
from megagrpo.registry import Registry

# exp(20) = 4.9e8 is far beyond every clip bound and finite in float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """The T loss tokens of one micro-batch on this rank (float32, or float64 in tests; all 1-D of length T).

    `sequence_sum` maps detached values [T] to their sums per sequence [num_sequences]. Where context
    parallelism cuts sequences, the trainer passes one that all-reduces the local sums over the
    context-parallel group; without it the local tokens are summed. A user's loss that calls `sum_sequences`
    on a tensor with a gradient needs one whose backward all-reduces (SUM) too.
    """

    actor_logprobs: Tensor  # [T] being trained: the only ratio numerator, requires grad
    # [T] actor before the update (or engine, by config): the ratio's denominator, never the reference
    old_logprobs: Tensor
    advantages: Tensor  # [T] advantage of the token's completion
    sequence_ids: Tensor  # [T] int64, 0 <= id < num_sequences
    num_sequences: int
    config: AlgorithmConfig
    ref_logprobs: Tensor | None = None  # [T] reference, for the sampled KL estimators
    rollout_logprobs: Tensor | None = None  # [T] engine, for the reported gap
    # [T] entropy of the actor's distribution; requires grad where entropy_coef is not 0
    entropy: Tensor | None = None
    exact_kl: Tensor | None = None  # [T] full-vocabulary KL(actor || reference), requires grad
    correction_weights: Tensor | None = None  # [T] detached importance weights of `correction.py`
    # None: sum the local tokens
    sequence_sum: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        tokens = self.actor_logprobs.shape
        if len(tokens) != 1:
            raise UserError(f"actor_logprobs: shape {list(tokens)}; a loss takes packed tokens, shape [T]")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor) and value.shape != tokens:
                raise UserError(
                    f"{item.name}: shape {list(value.shape)}, but actor_logprobs has "
                    f"{tokens[0]} tokens; they must agree"
                )

    def option(self, name: str) -> float:
        """Return a constant of the configured loss: the user's `loss_options`, else the default that the
        loss declares.
        """
        return self.config.loss_options.get(name, LOSSES.find(self.config.loss).options[name])

    def log_ratio(self) -> Tensor:
        """Return log(actor / old) [T], without any bound; `exp_log_ratio` takes its exponential."""
        return self.actor_logprobs - self.old_logprobs.detach()

    def sum_sequences(self, values: Tensor) -> Tensor:
        """Return the sums of `values` [T] over each sequence's loss tokens [num_sequences], those on other
        ranks included.
        """
        if self.sequence_sum is not None:
            return self.sequence_sum(values)
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence_ids, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return for each token the mean of `values` [T] over its sequence's loss tokens [T], detached."""
        values = values.detach()
        counts = self.sum_sequences(torch.ones_like(values))
        return (self.sum_sequences(values) / counts.clamp(min=1))[self.sequence_ids]


@dataclass(frozen=True)
class LossOutput:
    """Unreduced loss of a micro-batch's tokens."""

    loss: Tensor  # [T]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    # name -> [T] detached summands of the loss, for reporting
    terms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoss:
    """A registered loss: its function and what the trainer may assume of it."""

    function: Callable[[LossInputs], LossOutput]
    options: Mapping[str, float]  # names and defaults of what `algorithm.loss_options` may set
    zero_at_zero_advantage: bool  # a token with advantage 0 adds exactly 0 to the loss and to every gradient
    uses_old_logprobs: bool
    # a token's loss depends on the other tokens of its sequence (or of the batch)
    needs_whole_sequences: bool

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return self.function(inputs)


LOSSES: Registry[TokenLoss] = Registry("loss", read=lambda function: LOSSES.entry_of(function))


def register_loss(
    name: str,
    options: Mapping[str, float] | None = None,
    zero_at_zero_advantage: bool = True,
    uses_old_logprobs: bool = True,
    needs_whole_sequences: bool = False,
) -> Callable[[Callable[[LossInputs], LossOutput]], Callable[[LossInputs], LossOutput]]:
    """Register a token loss under `name`, with the constants that `algorithm.loss_options` may set; see
    `TokenLoss` for the flags.

    Example:
        >>> @register_loss("scaled_gradient", options={"scale": 1.0})
        ... def scaled_gradient(inputs):
        ...     return LossOutput(-inputs.option("scale") * inputs.advantages * inputs.actor_logprobs)
    """

    def add(function: Callable[[LossInputs], LossOutput]) -> Callable[[LossInputs], LossOutput]:
        entry = TokenLoss(
            function, dict(options or {}), zero_at_zero_advantage, uses_old_logprobs, needs_whole_sequences
        )
        LOSSES.register(name)(entry)
        return function

    return add


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), limited to exp(20) in value but not in gradient, which stays that of exp(20).

    The one place where a log-ratio is bounded: a sum or a mean of log-ratios (gspo, gmpo) is taken first.
    """
    return torch.exp(log_ratio - (log_ratio.detach() - LOG_RATIO_LIMIT).clamp(min=0))


def attach_gradient(values: Tensor, logprobs: Tensor) -> Tensor:
    """Return `values` [T] (detached) with the gradient of `values * logprobs`: exp(logprobs - detached
    logprobs) is exactly 1.
    """
    return values.detach() * torch.exp(logprobs - logprobs.detach())
