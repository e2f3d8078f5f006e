"""One file per family; each registers itself under its HF `model_type`."""

import importlib

NAMES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def load_all() -> None:
    """Import all families, so that the registry holds them."""
    for name in NAMES:
        importlib.import_module(f"{__name__}.{name}")
