"""Conversion between HF folders and Megatron distributed checkpoints, on one process or under torchrun."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megagrpo.config.model_folder import hf_folder_of, is_megatron_checkpoint, write_model_folder
from megagrpo.config.run_sections import ExportDtype
from megagrpo.config.training_sections import ModelConfig
from megagrpo.device import device as device_module
from megagrpo.errors import UserError

if TYPE_CHECKING:
    from megagrpo.models.stage import StageModel

_BF16 = ("bfloat16", "torch.bfloat16")


def convert_hf_to_megatron(
    source: ModelConfig, target: str | Path, tp: int = 1, pp: int = 1, dtype: ExportDtype = "source"
) -> None:
    """Write an HF folder as a Megatron checkpoint that can be read in any layout.

    Under torchrun the ranks share the work and the memory (tp, pp); a single process needs no launcher.

    Args:
        source: the folder, with what is changed in its config.json.
        dtype: of the weights, named in the config too; source: bfloat16 where the config says so, float32
            for all others.

    Raises:
        UserError: an HF folder that cannot be read, or a target that exists.
    """
    folder = _folder_of(source, Path(target))
    model = _load(source, folder, tp, pp, dtype)
    from megagrpo.models.carried_tensors import save_carried_tensors
    from megagrpo.models.hf_export import copy_hf_files
    from megagrpo.models.hf_files import check_no_unknown_tensors
    from megagrpo.models.megatron_files import save_megatron_model

    check_no_unknown_tensors(model, folder)
    staging = _stage(Path(target))
    save_megatron_model(model, staging)
    if dist.get_rank() == 0:
        copy_hf_files(folder, staging / "hf_files", dtype=model.config.params_dtype)
        save_carried_tensors(folder, staging / "hf_files")
        staging.rename(target)
    _close(source, folder)


def convert_megatron_to_hf(
    source: ModelConfig, target: str | Path, tp: int = 1, pp: int = 1, dtype: ExportDtype = "source"
) -> None:
    """Write a Megatron checkpoint (a converted one, or one of a run) as an HF folder that
    `AutoModelForCausalLM` loads.

    Args:
        source: the checkpoint, with what is changed in its config.json.
        dtype: of the tensors, named in the config too; source: what the checkpoint's config.json names.

    Raises:
        UserError: no such checkpoint, a damaged one, or a target that exists.
    """
    if not is_megatron_checkpoint(source.path):
        raise UserError(f"{source.path}: not a Megatron checkpoint (no .metadata and hf_files/ in it)")
    if Path(target).exists():
        raise UserError(f"{target}: exists already; choose a new folder")
    folder = _folder_of(source, Path(target))
    model = _load(source, folder, tp, pp, "source")
    from megagrpo.models.hf_export import export_dtype, write_hf_folder
    from megagrpo.weights.export import WeightExporter

    tensors = WeightExporter(model).tensors()
    if dist.get_rank() == 0:
        files = hf_folder_of(folder)
        write_hf_folder(tensors, files, target, export_dtype(dtype, files))
    else:
        for _ in tensors:  # takes part in the collectives; the first rank writes
            pass
    _close(source, folder)


def _folder_of(source: ModelConfig, target: Path) -> Path:
    """Return the folder that is read: the source's, or one beside the target where fields are changed."""
    if not source.changed_fields:
        return Path(source.path)
    folder = target.with_name(target.name + ".source")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for line in write_model_folder(source, folder):
        print(line)
    return folder


def _load(source: ModelConfig, folder: Path, tp: int, pp: int, dtype: ExportDtype) -> "StageModel":
    device = device_module.setup()
    from megagrpo.checkpoint.identity import check_own_config, check_own_files
    from megagrpo.models.hf_config import read_hf_config
    from megagrpo.models.load_stage import load_stage_model
    from megagrpo.models.precision import build_precision
    from megagrpo.models.transformer_config import build_transformer_config
    from megagrpo.parallel.groups import build_groups
    from megagrpo.parallel.layout import ParallelLayout

    hf = read_hf_config(hf_folder_of(folder), source.family)
    check_own_config(folder, hf, source.changed_fields)
    name = dtype if dtype != "source" else hf.raw.get("dtype", hf.raw.get("torch_dtype"))
    recipe = "bf16" if name in _BF16 else "fp32"
    layout = ParallelLayout(int(os.environ.get("WORLD_SIZE", "1")), tp=tp, pp=pp)
    groups = build_groups(layout, timeout_seconds=600)
    check_own_files(source.path)
    config = build_transformer_config(hf, groups, build_precision(recipe), sp=False)
    return load_stage_model(str(folder), hf, config, groups, device, use_te=False)


def _stage(target: Path) -> Path:
    if target.exists():
        raise UserError(f"{target}: exists already; choose a new folder")
    staging = target.with_name(target.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    return staging


def _close(source: ModelConfig, folder: Path) -> None:
    """End the ranks, and remove the folder that `_folder_of` wrote."""
    from megagrpo.parallel.groups import destroy_groups

    dist.barrier()
    if source.changed_fields and dist.get_rank() == 0:
        shutil.rmtree(folder)
    destroy_groups()
