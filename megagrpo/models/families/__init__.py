"""One file per family; each registers itself under its HF `model_type`."""

import importlib
import pkgutil


def load_all() -> None:
    """Import all files of this folder, so that the registry holds their families."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
