"""Models, tokenizers and their settings from an HF folder; what is broken there becomes one line."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from megagrpo.errors import UserError


def load_from_folder(factory: Any, folder: str | Path, **options: Any) -> Any:
    """Call `factory.from_pretrained` on a local folder; whatever it raises becomes one line."""
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"model.path: {folder} is not an HF folder (no config.json)")
    try:
        return factory.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ... by what is broken
        raise UserError(
            f"model.path: {folder}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def build_model(
    folder: str | Path, attention: str, dtype: torch.dtype, load_weights: bool
) -> torch.nn.Module:
    """Return the causal LM of `folder` in evaluation mode, without gradients.

    Args:
        attention: name of a registered attention function.
        load_weights: read the folder's weights; otherwise they are uninitialised memory.

    Raises:
        UserError: a file is missing or broken, a tensor is missing or misshapen, or a layer's attention is
            not full attention.
    """
    config = load_from_folder(AutoConfig, folder)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UserError(
            f"model.path: {folder}: layer_types {sorted(kinds)}; the embedded engine has full attention only"
        )
    if load_weights:
        model, report = load_from_folder(
            AutoModelForCausalLM, folder, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
        if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
            raise UserError(
                f"model.path: {folder}: {len(wrong)} tensors are missing or misshapen: {', '.join(wrong[:5])}"
            )
    else:
        with no_init_weights():  # every tensor is written before it is read
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        model.tie_weights()
    return model.eval().requires_grad_(False)


def end_token_ids(folder: str | Path, config: Any, tokenizer: Any) -> set[int]:
    """Return the union of the end-of-sequence ids of generation_config.json, config.json and the
    tokenizer.
    """
    declared = [config.eos_token_id, tokenizer.eos_token_id]
    if (Path(folder) / "generation_config.json").is_file():
        declared.append(load_from_folder(GenerationConfig, folder).eos_token_id)
    return {
        token
        for entry in declared
        if entry is not None
        for token in (entry if isinstance(entry, list) else [entry])
    }
