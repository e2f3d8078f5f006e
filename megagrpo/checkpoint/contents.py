"""What a model folder holds, HF or Megatron, read from headers and manifests: no weight is loaded, but for
checksums.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from megagrpo.checkpoint.manifest import MANIFEST, ManifestError, read_manifest, verify_files
from megagrpo.config.model_folder import hf_folder_of, is_megatron_checkpoint
from megagrpo.errors import UserError
from megagrpo.models.carried_tensors import is_carried
from megagrpo.models.family import checkpoint_tensors
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.safetensors_folder import read_index
from megagrpo.models.stacked_experts import stacked_rules

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1, "I8": 1,
}  # fmt: skip
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a folder."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    crc32: str | None = None  # taken over its bytes where checksums were asked for


@dataclass
class FolderContents:
    """What a folder holds, and what is wrong with it."""

    folder: Path
    kind: str
    facts: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Return the contents in lines: facts, tensors by dtype, problems."""
        counts = Counter(tensor.dtype for tensor in self.tensors.values())
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        lines = [f"{self.folder}: {self.kind}", *(f"  {name}: {value}" for name, value in self.facts.items())]
        lines.append(f"  tensors: {len(self.tensors)}, {total:,} bytes")
        lines += [f"    {dtype}: {count}" for dtype, count in sorted(counts.items())]
        return lines + [f"  wrong: {problem}" for problem in self.problems]


def read_contents(folder: str | Path, checksums: bool = False) -> FolderContents:
    """Return what a folder holds.

    Args:
        checksums: read all bytes: each tensor of an HF folder gets a checksum, and the files of a Megatron
            checkpoint are compared with those in its manifest.

    Raises:
        UserError: it is neither an HF folder nor a Megatron checkpoint.
    """
    folder = Path(folder)
    if is_megatron_checkpoint(folder):
        return _megatron_contents(folder, checksums)
    if (folder / "config.json").is_file():
        return _hf_contents(folder, checksums)
    raise UserError(
        f"{folder}: neither an HF folder (config.json) nor a Megatron checkpoint (.metadata, hf_files/)"
    )


def compare_contents(one: FolderContents, other: FolderContents) -> Iterator[str]:
    """Yield what differs of two folders, one line each: facts, then tensors."""
    for name in sorted(one.facts.keys() | other.facts.keys()):
        here, there = one.facts.get(name, "-"), other.facts.get(name, "-")
        if here != there:
            yield f"{name}: {here} | {there}"
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        first, second = one.tensors.get(name), other.tensors.get(name)
        if first is None or second is None:
            yield f"{name}: only in {(one if second is None else other).folder}"
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            yield f"{name}: {first.dtype} {list(first.shape)} | {second.dtype} {list(second.shape)}"
        elif first.crc32 != second.crc32:
            yield f"{name}: values differ (checksums {first.crc32} | {second.crc32})"


def _config_facts(contents: FolderContents, config_folder: Path) -> None:
    """Note the family and what is wrong with config.json or, of an HF folder, with its tensors."""
    try:
        hf = read_hf_config(config_folder)
    except UserError as error:
        contents.problems += str(error).splitlines()
        return
    contents.facts |= {"family": hf.model_type, "layers": str(hf.num_layers)}
    if hf.num_experts:
        contents.facts["experts"] = str(hf.num_experts)
    if contents.kind != "HF folder":
        return
    expected = {tensor.name: tensor.shape for tensor in checkpoint_tensors(hf)}
    stacked = stacked_rules(hf)
    found = {name: tensor.shape for name, tensor in contents.tensors.items()}
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            contents.problems.append(f"{name}: shape {list(found[name])}, by config.json it is {list(shape)}")
    if not stacked.keys() & found.keys():
        contents.problems += [f"{name}: missing" for name in sorted(expected.keys() - found.keys())]
    known = expected.keys() | stacked.keys() | ({"lm_head.weight"} if hf.tie_word_embeddings else set())
    unknown = [name for name in sorted(found.keys() - known) if not is_carried(name, hf.raw)]
    contents.problems += [f"{name}: family {hf.model_type} does not know it" for name in unknown]
    if carried := [name for name in found if is_carried(name, hf.raw)]:
        contents.facts["carried untrained"] = f"{len(carried)} tensors"


def _hf_contents(folder: Path, checksums: bool) -> FolderContents:
    contents = FolderContents(folder, "HF folder")
    index = folder / "model.safetensors.index.json"
    file_of: Mapping[str, str] = {}
    if index.is_file():
        try:
            file_of = read_index(index)
        except UserError as error:
            contents.problems.append(str(error))
    names = sorted(set(file_of.values())) or ["model.safetensors"]
    contents.facts["files"] = str(len(names))
    for name in names:
        try:
            held = dict(_safetensors_contents(folder / name, checksums))
        except (OSError, ValueError, KeyError) as error:
            contents.problems.append(f"{name}: not readable: {type(error).__name__}: {error}")
            continue
        twice = sorted(held.keys() & contents.tensors.keys())
        contents.problems += [f"{tensor}: in {name} and in another file too" for tensor in twice]
        missing = sorted(tensor for tensor, file in file_of.items() if file == name and tensor not in held)
        contents.problems += [f"{tensor}: the index says {name}, which lacks it" for tensor in missing]
        contents.tensors |= held
    _config_facts(contents, folder)
    return contents


def _safetensors_contents(path: Path, checksums: bool) -> Iterator[tuple[str, TensorFacts]]:
    """Yield the tensors of a file, from its header.

    Raises:
        ValueError: it is truncated, or its header does not describe what follows.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > size:
            raise ValueError(f"header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"{size} bytes, by its header it has {end}")
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            if stop - start != prod(entry["shape"]) * _ITEM_BYTES[entry["dtype"]]:
                raise ValueError(f"{name}: {stop - start} bytes for {entry['dtype']} {entry['shape']}")
            crc32 = None
            if checksums:
                file.seek(8 + length + start)
                value, left = 0, stop - start
                while left:
                    block = file.read(min(left, _BLOCK_BYTES))
                    value, left = zlib.crc32(block, value), left - len(block)
                crc32 = f"{value:08x}"
            yield name, TensorFacts(entry["dtype"], tuple(entry["shape"]), stop - start, crc32)


def _megatron_contents(folder: Path, checksums: bool) -> FolderContents:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megagrpo.models.restricted_pickles import reading_checkpoint

    contents = FolderContents(folder, "Megatron checkpoint")
    if (folder / MANIFEST).is_file():
        try:
            manifest = read_manifest(folder)
        except ManifestError as error:
            contents.problems.append(str(error))
        else:
            layout = ", ".join(f"{name} {value}" for name, value in manifest.layout.items() if value)
            versions = ", ".join(f"{name} {value}" for name, value in sorted(manifest.versions.items()))
            contents.facts |= {"step": str(manifest.step), "weight version": str(manifest.weight_version)}
            contents.facts |= {"layout": layout, "versions": versions}
            problems = verify_files(folder, manifest.files) if checksums else []
            contents.problems += problems
            if checksums:
                contents.facts["checksums"] = f"{len(problems)} of {len(manifest.files)} files are bad"
    try:
        with reading_checkpoint(folder):
            stored = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    except UserError as error:
        contents.problems.append(str(error))
        stored = {}
    for name, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            facts = TensorFacts(str(dtype).removeprefix("torch."), shape, prod(shape) * dtype.itemsize)
            contents.tensors[name] = facts
    _config_facts(contents, hf_folder_of(folder))
    return contents
