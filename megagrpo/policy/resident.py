"""What a rank of a run holds from its start to its end, counted on a model that is built without memory.

The rank is one of a world of any size, whose process groups carry nothing; the buffers are those that
Megatron itself lays out, padding included. A program of its own, since it changes the process:

    python -m megagrpo.policy.resident CONFIG.yaml WORLD_SIZE [HF_FOLDER]

prints a JSON object for each kind of rank: the pipeline stages that differ.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.config.load import load_config
from megagrpo.config.training_sections import ParallelConfig, PrecisionConfig
from megagrpo.device import device as device_module
from megagrpo.device.meta import ToMeta
from megagrpo.parallel.layout import build_layout


@dataclass(frozen=True)
class ResidentBytes:
    """The first rank of a pipeline stage; others of the stage hold as much, or a little less."""

    stage: int
    stages: int  # that are alike
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int  # main parameters and moments of this rank's share
    whole_parameters: int  # on all ranks of the stage together
    largest_parameter: int  # elements of one, on all ranks that split it together


def measure_ranks(
    parallel: ParallelConfig, precision: PrecisionConfig, hf: Any, world_size: int
) -> Iterator[ResidentBytes]:
    """Yield what the ranks of each pipeline stage hold; stages between the first and the last that have as
    many layers once.

    Args:
        hf: what `read_hf_config` reads.
    """
    layout = build_layout(parallel, world_size)
    chunks = layout.chunk_layers(hf.num_layers)
    alike: dict[tuple[int, int], list[int]] = {}
    for stage in range(layout.pp):
        end = 0 if stage == 0 else 2 if stage == layout.pp - 1 else 1
        alike.setdefault((end, sum(chunks[stage :: layout.pp])), []).append(stage)
    for (_, layers), stages in alike.items():
        yield _measure(parallel, precision, hf, stages, layers, world_size)


def _measure(
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    hf: Any,
    stages: list[int],
    layers: int,
    world_size: int,
) -> ResidentBytes:
    from megagrpo.models.precision import Precision
    from megagrpo.models.stage import build_stage_model
    from megagrpo.models.transformer_config import build_transformer_config
    from megagrpo.parallel.groups import build_groups, destroy_groups

    layout = build_layout(parallel, world_size)
    rank = stages[0] * (world_size // layout.pp)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    is_float32 = precision.recipe == "fp32" or precision.emulate
    number_format = Precision(torch.float32 if is_float32 else torch.bfloat16)
    try:
        groups = build_groups(layout, 60, with_gloo=False)
        with ToMeta():
            transformer = build_transformer_config(hf, groups, number_format, sp=parallel.sp)
            model = build_stage_model(hf, transformer, groups, torch.device("meta"), use_te=False)
            buffers = _build_buffers(model.chunks, model.config, parallel, precision)
        states = 8 if is_float32 else 12  # two moments, and a main parameter where weights are narrower
        elements = [
            row.parameter.numel() * (model.shard(row.rule)[0] if row.rule.split_dimension is not None else 1)
            for row in model.named_rules()
        ]
        copies = [groups.ep.size() if row.rule.is_expert else 1 for row in model.named_rules()]
        return ResidentBytes(
            stage=stages[0],
            stages=len(stages),
            layers=layers,
            parameters=sum(row.parameter.numel() for row in model.named_rules()),
            weights=sum(buffer.param_data.nbytes for buffer in buffers),
            gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer=sum(
                states * buffer.grad_data.numel() // buffer.data_parallel_world_size for buffer in buffers
            ),
            whole_parameters=sum(size * count for size, count in zip(elements, copies, strict=True)),
            largest_parameter=max(elements),
        )
    finally:
        destroy_groups()


def _build_buffers(
    chunks: Any, transformer: Any, parallel: ParallelConfig, precision: PrecisionConfig
) -> list[Any]:
    """Return Megatron's buffers of parameters and gradients, as the actor has them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=precision.gradients == "fp32",
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    wrapped = [
        DistributedDataParallel(transformer, options, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    return [each for chunk in wrapped for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def main() -> None:
    """Print what the ranks hold."""
    device_module.setup()
    from megagrpo.models.hf_config import read_hf_config

    path, world_size, *folder = sys.argv[1:]
    config = load_config(path, [])
    hf = read_hf_config(folder[0] if folder else config.model_folder, config.model.family)
    for held in measure_ranks(config.parallel, config.precision, hf, int(world_size)):
        print(json.dumps(asdict(held)), flush=True)


if __name__ == "__main__":
    main()
