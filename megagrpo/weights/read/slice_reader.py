"""Reads boxes of this rank's weights, as transfers of a plan ask for them."""

from collections.abc import Iterator

import torch

from megagrpo.models.slices import HFSlices
from megagrpo.models.stage import StageModel
from megagrpo.weights.plan.boxes import Box, box_after, shift, slices
from megagrpo.weights.plan.publish_plan import Bucket, PublishPlan, Transfer
from megagrpo.weights.plan.sources import box_held, holders_with


class SliceReader:
    """This rank's slices of the HF tensors, read parameter by parameter: views of the live weights where
    the layout allows it.
    """

    def __init__(self, model: StageModel, plan: PublishPlan, rank: int):
        self.model, self.plan = model, plan
        self._slices = HFSlices(model)
        self._origins: dict[str, tuple[int, ...]] = {}
        for source in plan.sources.values():
            if (found := holders_with(source, rank, plan.trainer)) and (
                box := box_held(source, found[0], plan.trainer)
            ):
                self._origins[source.name] = tuple(start for start, _ in box)

    def prepare(self, bucket: Bucket) -> None:
        """Make ready to read what is sent of a bucket. Every rank calls it: it may be collective."""

    def read(self, transfer: Transfer) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield (place in the target's grid, tensor of that shape) of a transfer; of stacked experts one
        by one.
        """
        source, local = (
            self.plan.sources[transfer.source],
            shift(transfer.box, self._origins[transfer.source], -1),
        )
        if not source.is_expert:
            yield transfer.place, self._slices[source.name][slices(local)]
            return
        for number, expert in enumerate(range(*transfer.box[0])):
            tensor = self._slices[source.hf_name(expert)][slices(local[1:])]
            yield box_after(transfer.place, number), tensor.unsqueeze(0)

    def forget(self) -> None:
        """Drop what was copied for the bucket that is done: slices of query, key and value are copies."""
        self._slices.forget()
