"""Reads boxes of this rank's weights as blockwise float8, and of their scales."""

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist

from megagrpo.models.quantization import scale_name, scale_shape
from megagrpo.models.stage import StageModel
from megagrpo.weights.plan.boxes import Box, box_after, slices
from megagrpo.weights.plan.publish_plan import Bucket, PublishPlan, Transfer
from megagrpo.weights.plan.sources import SourceTensor, box_held, holders_with
from megagrpo.weights.read.block_fp8 import (
    FP8_DTYPE,
    SCALE_DTYPE,
    accumulate_amax,
    compute_scales,
    quantize_slice,
)
from megagrpo.weights.read.slice_reader import SliceReader


class QuantizingReader(SliceReader):
    """The reader of a plan whose sources are quantised (`quantize_sources`)."""

    def __init__(self, model: StageModel, plan: PublishPlan, rank: int):
        super().__init__(model, plan, rank)
        self._held: dict[str, Box] = {}  # by name of a weight that is quantised
        for source in plan.sources.values():
            found = holders_with(source, rank, plan.trainer)
            if source.dtype == FP8_DTYPE and found and (box := box_held(source, found[0], plan.trainer)):
                self._held[source.name] = box
        # by name of the scales and expert (0 where there is none)
        self._scales: dict[tuple[str, int], torch.Tensor] = {}

    def prepare(self, bucket: Bucket) -> None:
        """Make the scales of a bucket's weights known. Collective over the tp group and the etp group."""
        groups = self.model.groups
        for is_expert, group in ((False, groups.tp), (True, groups.etp)):
            weights = [
                source
                for source in self.plan.sources_of(bucket)
                if source.name in self._held and source.is_expert == is_expert
            ]
            if weights:
                self._reduce_scales(weights, group)

    def read(self, transfer: Transfer) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield (place in the target's grid, tensor of that shape) of a transfer, in the dtype in which it
        travels.
        """
        source = self.plan.sources[transfer.source]
        if source.dtype == SCALE_DTYPE:
            yield from self._read_scales(source, transfer)
        elif source.dtype != FP8_DTYPE:
            yield from super().read(transfer)
        else:
            for expert, (place, tensor) in zip(
                _experts(source, transfer.box), super().read(transfer), strict=True
            ):
                scales = self._scales[scale_name(source.name), expert]
                quantized = quantize_slice(tensor.view(tensor.shape[-2:]), transfer.box[-2:], scales)
                yield place, quantized.view(tensor.shape)

    def forget(self) -> None:
        """Drop what was made for the bucket that is done."""
        super().forget()
        self._scales.clear()

    def _reduce_scales(self, weights: list[SourceTensor], group: dist.ProcessGroup) -> None:
        """Reduce the maxima of all blocks of these weights in one collective over `group`."""
        tensors = [
            (source, expert) for source in weights for expert in _experts(source, self._held[source.name])
        ]
        shapes = [scale_shape(source.shape[-2:]) for source, _ in tensors]
        sizes = [prod(shape) for shape in shapes]
        device = next(iter(self.model.chunks[0].parameters())).device
        amax = torch.zeros(sum(sizes), device=device)
        for (source, expert), part, shape in zip(tensors, amax.split(sizes), shapes, strict=True):
            accumulate_amax(
                self._slices[source.hf_name(expert)], self._held[source.name][-2:], part.view(shape)
            )
        if group.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        for (source, expert), part, shape in zip(
            tensors, compute_scales(amax).split(sizes), shapes, strict=True
        ):
            self._scales[scale_name(source.name), expert] = part.view(shape)

    def _read_scales(self, source: SourceTensor, transfer: Transfer) -> Iterator[tuple[Box, torch.Tensor]]:
        if not source.is_expert:
            yield transfer.place, self._scales[source.name, 0][slices(transfer.box)]
            return
        for number, expert in enumerate(_experts(source, transfer.box)):
            yield (
                box_after(transfer.place, number),
                self._scales[source.name, expert][slices(transfer.box[1:])].unsqueeze(0),
            )


def _experts(source: SourceTensor, box: Box) -> range:
    """Return the experts in a box of a tensor; one, number 0, where it has none."""
    return range(*box[0]) if source.is_expert else range(1)
