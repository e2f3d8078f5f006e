"""Weight updates of a model that is overwritten in place: the state of the transaction and the checks on every tensor."""

import re
from collections.abc import Iterable

import torch

from megagrpo.rollout.engines.base import EngineError

_FUSED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<part>gate_up_proj|down_proj)$")


class InPlaceWeights:
    """The tensors of an HF model under their checkpoint names, and the version they hold.

    Attributes:
        version: the committed version; None before the first commit and while stale.
        updating: whether a transaction is open.
        stale: whether an update failed after it overwrote some of the weights.
    """

    def __init__(self, model: torch.nn.Module):
        self.version: int | None = None
        self.updating = False
        self.stale = False
        self._last_version: int | None = None  # survives staleness: a retry needs a version above it
        self._opened: int | None = None
        self._loaded: set[str] = set()
        self.bind(model)

    def bind(self, model: torch.nn.Module) -> None:
        """Find the tensors again, after the model was moved."""
        self._targets = checkpoint_tensors(model)

    def begin(self, version: int) -> None:
        """Open a transaction; see Engine.begin_update."""
        if self.updating:
            raise EngineError(f"weight version {version}: the update to version {self._opened} is still open")
        if self._last_version is not None and version <= self._last_version:
            raise EngineError(f"weight version {version} is not above version {self._last_version}, which is committed")
        self.updating, self._opened = True, version
        self._loaded.clear()

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the model; see Engine.load."""
        if not self.updating:
            raise EngineError("load: no weight update is open")
        for name, tensor in named_tensors:
            target = self._targets.get(name)
            if target is None:
                raise EngineError(f"weight {name!r}: the model has no such tensor")
            if name in self._loaded:
                raise EngineError(f"weight {name!r}: loaded twice in one update")
            if tensor.shape != target.shape:
                raise EngineError(f"weight {name!r}: shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}")
            if tensor.numel() and not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):  # NaN passes through aminmax
                raise EngineError(f"weight {name!r}: holds values that are not finite")
            self.version, self.stale = None, True  # until the commit
            target.copy_(tensor)
            self._loaded.add(name)

    def commit(self, version: int) -> None:
        """Close the transaction; see Engine.commit_update."""
        if not self.updating or version != self._opened:
            raise EngineError(
                f"weight version {version}: no update to it is open" + (f", but one to {self._opened}" if self.updating else "")
            )
        missing = sorted(self._targets.keys() - self._loaded)
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise EngineError(f"weight version {version}: {len(missing)} of {len(self._targets)} tensors are missing: {shown}")
        self.mark_complete(version)

    def mark_complete(self, version: int) -> None:
        """Note that the model holds all of `version`."""
        self.updating, self.stale = False, False
        self.version = self._last_version = version

    def abort(self) -> None:
        """Close the transaction without a commit; the version before it stays if nothing was overwritten yet."""
        self.updating = False


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer under its name in an HF checkpoint; tied ones once.

    transformers fuses the experts of a layer into `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], checkpoints hold them one by
    one; those names get views of the fused tensors.
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
                {"down_proj": fused} if match["part"] == "down_proj" else dict(zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True))
            )
            tensors |= {f"{match['prefix']}.{expert}.{part}.weight": view for part, view in parts.items()}
    return tensors
