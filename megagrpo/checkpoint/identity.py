"""What a checkpoint says about the model, the tokenizer and the reference weights, and how it is compared
with a run's own.
"""

import hashlib
import json
from collections.abc import Mapping, Set
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megagrpo.checkpoint.manifest import MANIFEST, ManifestError, read_manifest, record_file, verify_files
from megagrpo.config.model_folder import hf_folder_of
from megagrpo.errors import SharedUserError, UserError
from megagrpo.models.family import HFConfig
from megagrpo.parallel.groups import all_gather_metadata

# Fields of config.json that say nothing about the weights or the maths.
_VOLATILE = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
)
_SHARD_PATTERNS = (".metadata", "common.pt", "metadata.json", "*.distcp")
_WEIGHT_PATTERNS = ("*.safetensors", "*.distcp", ".metadata")


def describe_model(hf: HFConfig) -> dict[str, Any]:
    """Return the fields of config.json that the weights depend on."""
    return {name: value for name, value in sorted(hf.raw.items()) if name not in _VOLATILE}


def check_own_config(folder: str | Path, hf: HFConfig, chosen: Set[str] = frozenset()) -> None:
    """Refuse a run's checkpoint as a model where its config.json is not the one that the weights were saved
    with; other folders pass.

    Args:
        folder: the model's.
        hf: its config.json.
        chosen: fields that the user has set to other values.

    Raises:
        UserError: one line for each field that differs, or for a manifest that can't be read.
    """
    if not (Path(folder) / MANIFEST).is_file():
        return
    try:
        saved = read_manifest(Path(folder)).model
    except ManifestError as error:
        raise UserError(f"model.path: {folder}: {error}") from None
    own, missing = json.loads(json.dumps(describe_model(hf))), "(not set)"
    problems = [
        f"{hf_folder_of(folder) / 'config.json'}: {name}: {own.get(name, missing)}, the manifest "
        f"of the weights says {saved.get(name, missing)}"
        for name in sorted((saved.keys() | own.keys()) - chosen)
        if saved.get(name, missing) != own.get(name, missing)
    ]
    if problems:
        raise UserError("\n".join(problems))


def check_own_files(folder: str | Path) -> None:
    """Check the shards of a run's checkpoint that is used as a model against its manifest, before any of them
    is parsed; other folders pass. Collective over all ranks, which share the files out.

    Raises:
        SharedUserError: on all ranks, one line for each file that is missing or other than it was saved.
    """
    if not (Path(folder) / MANIFEST).is_file():
        return
    read = [
        record
        for record in read_manifest(Path(folder)).files
        if any(fnmatch(record.name, pattern) for pattern in _SHARD_PATTERNS)
    ]
    found = all_gather_metadata(verify_files(Path(folder), share_out(read)))
    if problems := [f"model.path: {folder}: {problem}" for part in found for problem in part]:
        raise SharedUserError("\n".join(problems))


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return the size and a digest of the vocabulary, and the special tokens: what decides which text a
    token id is.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    digest = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
    special = {"pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    return {"tokens": len(vocabulary), "sha256": digest, "special": special}


def describe_weights(folder: str | Path) -> dict[str, Any]:
    """Return the source and the checksums of a model folder's weights. Collective over all ranks, which
    share the files out.
    """
    root = Path(folder)
    names = sorted(str(path.relative_to(root)) for pattern in _WEIGHT_PATTERNS for path in root.glob(pattern))
    mine = [record_file(root, name) for name in share_out(names)]
    records = sorted(
        (record for part in all_gather_metadata(mine) for record in part), key=lambda record: record.name
    )
    return {"source": str(folder), "files": [[record.name, record.size, record.crc32] for record in records]}


def compare(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return one line for each field in which a checkpoint and a run differ, both values in it."""
    json_own = json.loads(json.dumps(own))  # as the checkpoint's went through JSON
    missing = "(not set)"
    return [
        f"{what} {name}: the checkpoint has {saved.get(name, missing)}, this run "
        f"{json_own.get(name, missing)}"
        for name in sorted(saved.keys() | json_own.keys())
        if saved.get(name, missing) != json_own.get(name, missing)
    ]


def compare_weights(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return one line for each weight file in which two results of `describe_weights` differ."""
    before, now = ({name: (size, crc32) for name, size, crc32 in each["files"]} for each in (saved, own))
    problems = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            problems.append(f"{name}: missing")
        elif name not in before:
            problems.append(f"{name}: was not there")
        elif before[name][0] != now[name][0]:
            problems.append(f"{name}: {now[name][0]} bytes, then {before[name][0]}")
        elif before[name] != now[name]:
            problems.append(f"{name}: checksum {now[name][1]}, then {before[name][1]}")
    return problems


class ReferenceWeights:
    """What a run's checkpoints say of the frozen weights: that they hold them, or whose they are."""

    def __init__(self, folder: str | Path, are_saved: bool):
        """`folder`: the model that they come from; `are_saved`: in every checkpoint."""
        self.folder, self.are_saved = folder, are_saved
        self._described: Mapping[str, Any] | None = None

    def describe(self) -> Mapping[str, Any]:
        """Return what a manifest says; the checksums of whole model files are taken once. Collective over
        all ranks.
        """
        if self.are_saved:
            return {"saved": True, "source": self.folder}
        return self._own()

    def lie_in(self, checkpoint: Path, saved: Mapping[str, Any] | None) -> bool:
        """Say whether a checkpoint holds them; where it names them instead, they must be this run's.
        Collective over all ranks.

        Args:
            saved: what its manifest says.

        Raises:
            UserError: the run has others, one line for each file.
        """
        if saved is None or saved.get("saved"):
            return saved is not None
        if problems := compare_weights(saved, self._own()):
            raise UserError(
                "\n".join(
                    f"{checkpoint}: the reference weights were those of {saved['source']}, model.path "
                    f"{self.folder} differs: {problem}"
                    for problem in problems
                )
            )
        return False

    def _own(self) -> Mapping[str, Any]:
        if self._described is None:
            self._described = describe_weights(self.folder)
        return self._described


def share_out(items: list) -> list:
    """Return this rank's part of a list that all ranks hold."""
    import torch.distributed as dist

    return items[dist.get_rank() :: dist.get_world_size()]
