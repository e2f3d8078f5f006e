"""Updates the weights of a model in this process, in place."""

from collections.abc import Iterable, Mapping

import torch

from megagrpo.engines.base import EngineError
from megagrpo.engines.expected_tensors import ExpectedTensors
from megagrpo.engines.lifecycle import Action, EngineLifecycle
from megagrpo.models.rules import ParameterRule

Stacked = Mapping[str, tuple[ParameterRule, int | None]]  # see `stacked_rules`


class InPlaceWeights:
    """The tensors of an HF model under their checkpoint names, which an update overwrites."""

    def __init__(self, model: torch.nn.Module, stacked: Stacked, lifecycle: EngineLifecycle):
        self._stacked, self._lifecycle = stacked, lifecycle
        self._targets: dict[str, torch.Tensor] = {}
        self._expected = ExpectedTensors({})
        self.bind(model)

    def bind(self, model: torch.nn.Module) -> None:
        """Find the tensors again, after the model was moved."""
        self._targets = checkpoint_views(model, self._stacked)
        self._expected = ExpectedTensors({name: target.shape for name, target in self._targets.items()})

    def begin(self, version: int) -> None:
        """Open a transaction; see Engine.begin_update."""
        self._lifecycle.begin(version)
        self._expected.begin()

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the model; see EmbeddedEngine.load."""
        self._lifecycle.require(Action.TAKE)
        for name, tensor in named_tensors:
            self._expected.check(name, tensor.shape)
            # NaN passes through aminmax
            if tensor.numel() and not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):
                raise EngineError(f"weight {name!r}: holds values that are not finite")
            self._lifecycle.overwrite()
            self._targets[name].copy_(tensor)
            self._expected.mark_loaded(name)

    def commit(self, version: int) -> None:
        """Close the transaction; see Engine.commit_update."""
        self._lifecycle.require_completable(version)
        self._expected.check_complete(version)
        self._lifecycle.complete(version)
        self._lifecycle.serve(version)


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
