"""What the pool and its workers say to each other. In a file of its own, so that both sides pickle the
same classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.types import Completion, Prompt


@dataclass(frozen=True)
class RewardSpec:
    """One configured reward, without its weight."""

    name: str  # registered name, or FILE.py:function / package.module:function
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """First message to a worker, answered by Ready or Refused."""

    rewards: tuple[RewardSpec, ...]
    search_path: tuple[str, ...]  # the pool's sys.path: a worker finds the modules that the pool finds


@dataclass(frozen=True)
class Request:
    """Score these completions by one reward; answered by Scores, Failed or Refused."""

    reward: int  # position in Setup.rewards
    prompts: Sequence[Prompt]  # one per completion
    completions: Sequence[Completion]


@dataclass(frozen=True)
class Ready:
    """The rewards are built and warm."""


@dataclass(frozen=True)
class Scores:
    """One finite number per completion of the request."""

    values: list[float]


@dataclass(frozen=True)
class Failed:
    """The request has no score; the run goes on."""

    outcome: str  # "timeout", "crash" or "error", as in megagrpo.types.Reward
    detail: str


@dataclass(frozen=True)
class Refused:
    """A user's mistake, which ends the run."""

    message: str


Reply = Ready | Scores | Failed | Refused
