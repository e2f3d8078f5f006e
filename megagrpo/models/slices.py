"""This rank's slices of the HF tensors, read from the live weights parameter by parameter."""

from collections.abc import KeysView

import torch

from megagrpo.models.rules import ParameterRule, split
from megagrpo.models.stage import StageModel


class HFSlices:
    """Slices by HF name, padded vocabulary rows included; tied copies appear once.

    They are views of the weights where the layout allows it. Those of query, key and value are copies, made
    when one of them is asked for
    and kept until `forget`: never of the whole model at once.
    """

    def __init__(self, model: StageModel):
        self._model = model
        self._where: dict[str, tuple[str, ParameterRule, torch.nn.Parameter, int]] = {}
        for row in model.named_rules():
            for number, hf_name in enumerate(() if row.rule.is_tied_copy else row.hf_names):
                self._where[hf_name] = (row.name, row.rule, row.parameter, number)
        self._parts: dict[str, list[torch.Tensor]] = {}

    def names(self) -> KeysView[str]:
        """Return the HF names of the tensors of which this rank holds a slice, in the order of the
        parameters.
        """
        return self._where.keys()

    def __getitem__(self, hf_name: str) -> torch.Tensor:
        """Return this rank's slice of an HF tensor."""
        name, rule, parameter, number = self._where[hf_name]
        if name not in self._parts:
            self._parts[name] = split(rule, parameter.detach(), self._model.dims, self._model.shard(rule)[0])
        return self._parts[name][number]

    def forget(self) -> None:
        """Drop the copies: they are of the weights as they were when they were read."""
        self._parts.clear()
