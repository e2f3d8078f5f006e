"""What a server and this process both know of the model that it serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from megagrpo.config.engine_sections import ServerEngineConfig
from megagrpo.engines.hf_model import end_token_ids, load_from_folder
from megagrpo.models.family import checkpoint_tensors
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.quantization import quantization_config, quantized_shapes


@dataclass(frozen=True)
class ServedModel:
    """A model and how it is served."""

    folder: Path
    config: ServerEngineConfig  # the `engine:` section
    hf: Any  # the folder's config.json, as transformers reads it
    tokenizer: Any  # decodes completions and searches stop strings
    end_token_ids: frozenset[int]
    device: torch.device  # what the server computes on, as its type says
    dtype: torch.dtype
    load_weights: bool  # the server reads the folder's weights and serves them as version 0
    tensor_shapes: Mapping[str, torch.Size]  # a whole version, by names in an HF checkpoint
    quantization_config: dict[str, Any] | None  # None: the server's model is not quantised

    @classmethod
    def read(
        cls,
        folder: str | Path,
        config: ServerEngineConfig,
        tokenizer: Any,
        device: torch.device | str,
        dtype: torch.dtype,
        load_weights: bool,
    ) -> "ServedModel":
        """Read what is not given from an HF folder (the tokenizer, if None). Raises UserError if it can't be
        read.
        """
        hf = load_from_folder(AutoConfig, folder)
        tokenizer = tokenizer if tokenizer is not None else load_from_folder(AutoTokenizer, folder)
        tensors, quantized = checkpoint_tensors(read_hf_config(folder)), None
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        if config.server.quantization != "none":
            quantized, shapes = quantization_config(tensors), quantized_shapes(tensors)
        return cls(
            Path(folder),
            config,
            hf,
            tokenizer,
            frozenset(end_token_ids(folder, hf, tokenizer)),
            torch.device(device),
            dtype,
            load_weights,
            {name: torch.Size(shape) for name, shape in shapes.items()},
            quantized,
        )

    @property
    def context_tokens(self) -> int:
        """Largest number of tokens of a prompt with its completion."""
        return self.config.server.max_model_len or self.hf.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to this, exclusive."""
        return self.hf.vocab_size

    @property
    def tokenizer_folder(self) -> str | None:
        """Where the server finds the tokenizer, with which it notices stop strings; None: it was not loaded
        from a folder.
        """
        folder = self.tokenizer.name_or_path
        return folder if folder and Path(folder).is_dir() else None
