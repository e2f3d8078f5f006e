"""Advantage estimators. Importing this package registers the ones that megagrpo brings."""

from megagrpo.algorithms.advantages import dr_grpo, gdpo, grpo, opo, pass_at_k, reinforce_pp, rloo
from megagrpo.algorithms.advantages.base import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageResult,
    PenaltySums,
    TokenAdvantages,
    find_equal_rewards,
    register_estimator,
)
from megagrpo.algorithms.advantages.compute import compute_advantages

__all__ = [
    "ADVANTAGES",
    "AdvantageInputs",
    "AdvantageResult",
    "PenaltySums",
    "TokenAdvantages",
    "compute_advantages",
    "dr_grpo",
    "find_equal_rewards",
    "gdpo",
    "grpo",
    "opo",
    "pass_at_k",
    "register_estimator",
    "reinforce_pp",
    "rloo",
]
