"""Weight updates of a model in this process, which is overwritten in place."""

from collections.abc import Iterable, Mapping

import torch

from megagrpo.engines.base import EngineError
from megagrpo.engines.transaction import WeightTransaction
from megagrpo.models.rules import ParameterRule

Stacked = Mapping[str, tuple[ParameterRule, int | None]]  # see `stacked_rules`


class InPlaceWeights(WeightTransaction):
    """The tensors of an HF model under their checkpoint names, and the version they hold."""

    def __init__(self, model: torch.nn.Module, stacked: Stacked):
        super().__init__({})
        self._stacked = stacked
        self.bind(model)

    def bind(self, model: torch.nn.Module) -> None:
        """Find the tensors again, after the model was moved."""
        self._targets = checkpoint_views(model, self._stacked)
        self.shapes = {name: target.shape for name, target in self._targets.items()}

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the model; see Engine.load."""
        self.require_open()
        for name, tensor in named_tensors:
            self.check(name, tensor.shape)
            # NaN passes through aminmax
            if tensor.numel() and not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):
                raise EngineError(f"weight {name!r}: holds values that are not finite")
            self.mark_overwritten()
            self._targets[name].copy_(tensor)
            self.mark_loaded(name)

    def commit(self, version: int) -> None:
        """Close the transaction; see Engine.commit_update."""
        self.check_complete(version)
        self.mark_complete(version)


def checkpoint_views(model: torch.nn.Module, stacked: Stacked) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer under its name in an HF checkpoint; tied ones once.

    transformers stacks the experts of a layer, checkpoints hold them one by one; those names get views of the
    stacked tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if name not in stacked:
            tensors[name] = tensor
            continue
        rule, layer = stacked[name]
        for expert, rows in enumerate(tensor.detach()):
            names = rule.hf_names(layer, expert)
            tensors |= dict(zip(names, rows.chunk(len(names)), strict=True))
    return tensors
