"""Token losses. Importing this package registers the ones that megagrpo brings."""

from megagrpo.algorithms.losses import cispo, gmpo, gspo, policy_gradient, ppo_clip, sapo
from megagrpo.algorithms.losses.base import (
    LOSSES,
    LossInputs,
    LossOutput,
    TokenLoss,
    attach_gradient,
    exp_log_ratio,
    register_loss,
)

__all__ = [
    "LOSSES",
    "LossInputs",
    "LossOutput",
    "TokenLoss",
    "attach_gradient",
    "cispo",
    "exp_log_ratio",
    "gmpo",
    "gspo",
    "policy_gradient",
    "ppo_clip",
    "register_loss",
    "sapo",
]
