"""Builds a stage and reads its weights, from either kind of folder."""

from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig

from megagrpo.config.model_folder import is_megatron_checkpoint
from megagrpo.models.family import HFConfig
from megagrpo.models.hf_files import load_hf_weights
from megagrpo.models.megatron_files import load_megatron_model
from megagrpo.models.stage import StageModel, build_stage_model
from megagrpo.parallel.groups import ParallelGroups


def load_stage_model(
    folder: str,
    hf: HFConfig,
    config: TransformerConfig,
    groups: ParallelGroups,
    device: torch.device,
    use_te: bool,
) -> StageModel:
    """Build this rank's part and read its weights: slices of an HF folder's tensors, or shards of a
    Megatron checkpoint.
    """
    model = build_stage_model(hf, config, groups, device, use_te)
    if is_megatron_checkpoint(folder):
        load_megatron_model(model, Path(folder))
    else:
        load_hf_weights(model, folder)
    return model
