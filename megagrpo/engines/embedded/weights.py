"""Weight updates of a model in this process, which is overwritten in place."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megagrpo.engines.base import EngineError
from megagrpo.engines.transaction import WeightTransaction

_FUSED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<part>gate_up_proj|down_proj)$")


class InPlaceWeights(WeightTransaction):
    """The tensors of an HF model under their checkpoint names, and the version they hold."""

    def __init__(self, model: torch.nn.Module):
        super().__init__({})
        self.bind(model)

    def bind(self, model: torch.nn.Module) -> None:
        """Find the tensors again, after the model was moved."""
        self._targets = checkpoint_tensors(model)
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


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer under its name in an HF checkpoint; tied ones once.

    transformers fuses the experts of a layer into `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I],
    checkpoints hold them one by one; those names get views of the fused tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        match = _FUSED_EXPERTS.fullmatch(name)
        if match is None or tensor.ndim != 3:
            tensors[name] = tensor
            continue
        for expert, fused in enumerate(tensor.detach()):
            parts = (
                {"down_proj": fused}
                if match["part"] == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True))
            )
            tensors |= {f"{match['prefix']}.{expert}.{part}.weight": view for part, view in parts.items()}
    return tensors


def checkpoint_shapes(hf: Any, dtype: torch.dtype) -> dict[str, torch.Size]:
    """Return the shapes of a model's tensors under their checkpoint names; no memory is taken for them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, dtype=dtype)
    model.tie_weights()
    return {name: tensor.shape for name, tensor in checkpoint_tensors(model).items()}
