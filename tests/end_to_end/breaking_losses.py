"""Token losses that stop being finite, on one rank only: what a bad batch does to one replica."""

import os

import torch

from megagrpo.algorithms.losses import LossInputs, LossOutput, register_loss

_calls = {"once": 0}


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
