"""Reads a rank's slices of the tensors in an HF folder; writes an HF folder from a stream of full tensors."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megagrpo.errors import UserError
from megagrpo.models.family import checkpoint_tensors
from megagrpo.models.rules import Dimensions, ParameterRule, Size, merge
from megagrpo.models.stacked_experts import StackedExpertSlice, stacked_rules

if TYPE_CHECKING:
    from megagrpo.models.stage import StageModel

MAX_SHARD_BYTES = 5 * 2**30  # size of one safetensors file of an export, as on the Hugging Face hub
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


class SafetensorsFolder:
    """The tensors of an HF folder, sharded over files or not, read by name and slice."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._handles: dict[Path, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            self._file_of = {name: self.folder / file for name, file in weight_map.items()}
        else:
            single = self.folder / "model.safetensors"
            self._file_of = {name: single for name in self._open(single).keys()}  # noqa: SIM118 (a safetensors handle is not a dict)

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
            raise UserError(f"model.path: {self.folder}: tensor {name} is missing")
        path = self._file_of[name]
        try:
            return self._open(path).get_slice(name)
        except SafetensorError:
            raise UserError(f"model.path: {path}: tensor {name} is missing") from None


def open_tensor(
    source: SafetensorsFolder, rule: ParameterRule, place: int, layer: int | None, expert: int | None
) -> Any:
    """Return one of the HF tensors of a rule, lazily read, stored by itself or with those of other experts.

    Raises:
        UserError: it is not there, or its shape is not the one that follows from config.json.
    """
    name = rule.hf_names(layer, expert)[place]
    stacked = rule.stacked.format(layer=layer)
    if expert is not None and name not in source.names() and stacked in source.names():
        tensor: Any = StackedExpertSlice(source.tensor_slice(stacked), rule, expert, place)
    else:
        tensor = source.tensor_slice(name)
    found, expected = list(tensor.get_shape()), rule.shapes[place]
    if found != list(expected):
        sizes = [f"{size} ({size.fields})" if isinstance(size, Size) else str(size) for size in expected]
        raise UserError(f"model.path: {name}: shape {found}, by config.json it is [{', '.join(sizes)}]")
    return tensor


def read_part(tensor: Any, rule: ParameterRule, dims: Dimensions, tp: int, tp_rank: int) -> torch.Tensor:
    """Read one (expert) tensor parallel rank's slice of an HF tensor; vocabulary rows beyond the true size
    are zeros.
    """
    shape = tensor.get_shape()
    if rule.split_dimension is None:
        return tensor[:]
    size = dims.padded_vocab_size if rule.kind == "vocab" else shape[rule.split_dimension]
    start, stop = size // tp * tp_rank, size // tp * (tp_rank + 1)
    if rule.split_dimension == 1:
        return tensor[:, start:stop]
    if rule.kind != "vocab":
        return tensor[start:stop]
    rows = tensor[min(start, shape[0]) : min(stop, shape[0])]
    return torch.cat([rows, rows.new_zeros(stop - start - rows.shape[0], shape[1])])


def load_hf_weights(model: "StageModel", folder: str | Path) -> None:
    """Fill a stage model from an HF folder; each rank reads its slices only.

    Raises:
        UserError: a file or tensor is missing, truncated, unknown to the rules, of another shape, or holds
            values that are not finite.
    """
    source = SafetensorsFolder(folder)
    with torch.no_grad():
        for _, rule, layer, expert, parameter in model.named_rules():
            shards, shard = model.shard(rule)
            parts = []
            for place, name in enumerate(rule.hf_names(layer, expert)):
                part = read_part(
                    open_tensor(source, rule, place, layer, expert), rule, model.dims, shards, shard
                )
                # NaN passes through aminmax
                if part.numel() and not all(torch.isfinite(bound) for bound in torch.aminmax(part)):
                    raise UserError(f"model.path: {folder}: tensor {name} holds values that are not finite")
                parts.append(part)
            value = merge(rule, parts, model.dims, shards)
            assert value.shape == parameter.shape, f"{rule.megatron}: {value.shape}, {parameter.shape}"
            parameter.copy_(value)


def check_no_unknown_tensors(model: "StageModel", folder: str | Path) -> None:
    """Refuse an HF folder that holds tensors which no rule reads: they would be dropped silently.

    Raises:
        UserError: names the first of them.
    """
    known = {tensor.name for tensor in checkpoint_tensors(model.hf)} | stacked_rules(model.hf).keys()
    # some exports store the tied head twice
    ignored = {"lm_head.weight"} if model.hf.tie_word_embeddings else set()
    unknown = {
        name
        for name in SafetensorsFolder(folder).names() - known - ignored
        if not name.endswith("rotary_emb.inv_freq")
    }
    if unknown:
        raise UserError(
            f"model.path: {folder}: {len(unknown)} tensors that family {model.hf.model_type!r} does not "
            f"know, first: {min(unknown)}"
        )


def write_hf_folder(
    tensors: Iterable[tuple[str, torch.Tensor]], source: str | Path, target: str | Path
) -> None:
    """Write full HF tensors as safetensors files of at most 5 GiB, with the config and tokenizer of `source`.

    The folder appears complete or not at all: it is written beside its place and moved there by a rename.
    """
    target = Path(target)
    staging = target.with_name(target.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    files: list[tuple[str, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        name = f"part-{len(files)}.safetensors"
        save_file(pending, staging / name, metadata={"format": "pt"})
        files.append((name, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and sum(t.numel() * t.element_size() for t in pending.values()) + size > MAX_SHARD_BYTES:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        total += size
    flush()
    _name_files(staging, files, total)
    for pattern in ("config.json", *TOKENIZER_PATTERNS):
        for path in Path(source).glob(pattern):
            shutil.copy(path, staging / path.name)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)


def _name_files(folder: Path, files: list[tuple[str, list[str]]], total_bytes: int) -> None:
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, (part, names) in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / part).rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
