"""Token losses that stop being finite, on one rank only: what a bad batch does to one replica."""

import os

import torch

from megagrpo.algorithms.losses import LossInputs, LossOutput, register_loss

_calls = {"once": 0, "huge": 0, "growing": 0}


@register_loss("always_nan_on_last_rank")
def always_nan_on_last_rank(inputs: LossInputs) -> LossOutput:
    """NaN in every update, on the last rank."""
    factor = torch.nan if os.environ.get("RANK") == "1" else 1.0
    return LossOutput(-inputs.advantages * inputs.actor_logprobs * factor)


@register_loss("nan_once_on_last_rank")
def nan_once_on_last_rank(inputs: LossInputs) -> LossOutput:
    """NaN in the first call of the last rank, fine afterwards."""
    _calls["once"] += 1
    factor = torch.nan if os.environ.get("RANK") == "1" and _calls["once"] == 1 else 1.0
    return LossOutput(-inputs.advantages * inputs.actor_logprobs * factor)


@register_loss("huge_in_sixth_call")
def huge_in_sixth_call(inputs: LossInputs) -> LossOutput:
    """A gradient 10,000 times as large in the sixth call of every rank, and never again."""
    _calls["huge"] += 1
    return LossOutput(-inputs.advantages * inputs.actor_logprobs * (1e4 if _calls["huge"] == 6 else 1.0))


@register_loss("growing")
def growing(inputs: LossInputs) -> LossOutput:
    """From the sixth call on a gradient that is 1,000 times as large as the one before."""
    _calls["growing"] += 1
    return LossOutput(-inputs.advantages * inputs.actor_logprobs * 1e3 ** max(0, _calls["growing"] - 5))
