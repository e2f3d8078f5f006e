"""Loads a quantised model layer by layer, by vLLM's own reload: its kernels may have changed the layout of
the parameters when it started.

Each layer gets parameters as checkpoints have them, is loaded, and then laid out as at the start. What comes
for a layer is kept until the layer is complete, so it is copied: the sender's memory is its own again once a
bucket is acknowledged.
"""

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class LayerwiseReload:
    """One update of a worker's model."""

    def __init__(self, worker: Any, version: int):
        self.version = version
        self._worker, self._names = worker, set[str]()
        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(self._model)

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def takes(self, version: int, names: set[str]) -> bool:
        """Return whether tensors belong to this update: tensors that come again, or are of another version,
        belong to another attempt.
        """
        return version == self.version and not names & self._names

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors under their HF names; return the names of the parameters."""
        self._names |= {name for name, _ in tensors}
        with set_current_vllm_config(self._worker.vllm_config):
            return self._model.load_weights([(name, tensor.clone()) for name, tensor in tensors])

    def finish(self) -> None:
        """Bring every layer into the layout of the start, loaded or not."""
        with set_current_vllm_config(self._worker.vllm_config):
            finalize_layerwise_reload(self._model, self._worker.model_config)
