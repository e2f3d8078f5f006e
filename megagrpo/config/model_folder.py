"""Where a model folder keeps its config and tokenizer: an HF folder itself, a Megatron checkpoint in
`hf_files/`. Imports no torch.
"""

from pathlib import Path


def is_megatron_checkpoint(folder: str | Path) -> bool:
    """Say whether the folder is a distributed checkpoint (a run's, or a converted one)."""
    return (Path(folder) / ".metadata").is_file() and (Path(folder) / "hf_files").is_dir()


def hf_folder_of(folder: str | Path) -> Path:
    """Return the folder that holds config.json and the tokenizer."""
    return Path(folder) / "hf_files" if is_megatron_checkpoint(folder) else Path(folder)
