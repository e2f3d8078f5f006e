"""The tensors of an HF folder, read lazily by name. Imports no Megatron."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megagrpo.errors import UserError

TIED_HEAD = "lm_head.weight"  # where some folders store the embedding again


class SafetensorsFolder:
    """The tensors of an HF folder, sharded over files or not, read by name and slice."""

    def __init__(self, folder: str | Path, file: Path | None = None):
        """Take the files and what is read of them.

        Args:
            file: the only one that is read; None: those of the model.
        """
        self.folder = Path(folder)
        self._handles: dict[Path, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        if file is None and index.is_file():
            self._file_of = {name: self.folder / file for name, file in read_index(index).items()}
        else:
            single = file or self.folder / "model.safetensors"
            self._file_of = dict.fromkeys(self._open(single).keys(), single)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            if not path.is_file():
                raise UserError(f"model.path: {path}: no such safetensors file")
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise UserError(f"model.path: {path}: not readable, truncated? ({error})") from None
        return self._handles[path]

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def tensor_slice(self, name: str) -> Any:
        """Return the lazily read tensor `name`.

        Raises:
            UserError: no file has it.
        """
        if name not in self._file_of:
            hint = " (config.json says tie_word_embeddings false)" if name == TIED_HEAD else ""
            raise UserError(f"model.path: {self.folder}: tensor {name} is missing{hint}")
        path = self._file_of[name]
        try:
            return self._open(path).get_slice(name)
        except SafetensorError:
            raise UserError(f"model.path: {path}: tensor {name} is missing") from None


def read_index(path: Path) -> dict[str, str]:
    """Return the file that holds each tensor.

    Raises:
        UserError: it is not an index, or names a file of another folder.
    """
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(file) for file in weight_map.values()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.path: {path}: not an index ({type(error).__name__}: {error})") from None
    if outside := sorted(name for name in names if Path(name).name != name or name == ".."):
        raise UserError(f"model.path: {path}: names {outside[0]!r}, which is not a file of this folder")
    return weight_map
