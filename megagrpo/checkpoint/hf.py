"""Conversion between HF folders and Megatron distributed checkpoints, on one process or under torchrun."""

import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from megagrpo.device import device as device_module
from megagrpo.errors import UserError

_BF16 = ("bfloat16", "torch.bfloat16")


def convert_hf_to_megatron(source: str | Path, target: str | Path, tp: int = 1, pp: int = 1) -> None:
    """Write the HF folder `source` as a Megatron checkpoint that can be read in any layout.

    bfloat16 weights stay bfloat16, all others are written as float32. Under torchrun the ranks share the work
    and the memory (tp, pp); a single process needs no launcher.

    Raises:
        UserError: an HF folder that cannot be read, or a target that exists.
    """
    model = _load(Path(source), tp, pp)
    from megagrpo.models.hf_export import copy_hf_files
    from megagrpo.models.hf_files import check_no_unknown_tensors
    from megagrpo.models.megatron_files import save_megatron_model

    check_no_unknown_tensors(model, source)
    staging = _stage(Path(target))
    save_megatron_model(model, staging)
    if dist.get_rank() == 0:
        copy_hf_files(Path(source), staging / "hf_files")
        staging.rename(target)
    _close()


def convert_megatron_to_hf(source: str | Path, target: str | Path, tp: int = 1, pp: int = 1) -> None:
    """Write a Megatron checkpoint (a converted one, or one of a run) as an HF folder that
    `AutoModelForCausalLM` loads.

    Raises:
        UserError: no such checkpoint, a damaged one, or a target that exists.
    """
    from megagrpo.config.model_folder import is_megatron_checkpoint

    if not is_megatron_checkpoint(source):
        raise UserError(f"{source}: not a Megatron checkpoint (no .metadata and hf_files/ in it)")
    if Path(target).exists():
        raise UserError(f"{target}: exists already; choose a new folder")
    model = _load(Path(source), tp, pp)
    from megagrpo.models.hf_export import export_dtype, write_hf_folder
    from megagrpo.weights.export import WeightExporter

    tensors = WeightExporter(model).tensors()
    if dist.get_rank() == 0:
        source_files = Path(source) / "hf_files"
        write_hf_folder(tensors, source_files, target, export_dtype("source", source_files))
    else:
        for _ in tensors:  # takes part in the collectives; the first rank writes
            pass
    _close()


def _load(source: Path, tp: int, pp: int):
    device = device_module.setup()
    from megagrpo.checkpoint.identity import check_own_config
    from megagrpo.config.model_folder import hf_folder_of
    from megagrpo.models.hf_config import read_hf_config
    from megagrpo.models.load_stage import load_stage_model
    from megagrpo.models.precision import build_precision
    from megagrpo.models.transformer_config import build_transformer_config
    from megagrpo.parallel.groups import build_groups
    from megagrpo.parallel.layout import ParallelLayout

    hf = read_hf_config(hf_folder_of(source))
    check_own_config(source, hf)
    raw = json.loads((hf_folder_of(source) / "config.json").read_text())
    recipe = "bf16" if raw.get("dtype", raw.get("torch_dtype")) in _BF16 else "fp32"
    layout = ParallelLayout(int(os.environ.get("WORLD_SIZE", "1")), tp=tp, pp=pp)
    groups = build_groups(layout, timeout_seconds=600)
    config = build_transformer_config(hf, groups, build_precision(recipe), sp=False)
    return load_stage_model(str(source), hf, config, groups, device, use_te=False)


def _stage(target: Path) -> Path:
    if target.exists():
        raise UserError(f"{target}: exists already; choose a new folder")
    staging = target.with_name(target.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    return staging


def _close() -> None:
    from megagrpo.parallel.groups import destroy_groups

    dist.barrier()
    destroy_groups()
