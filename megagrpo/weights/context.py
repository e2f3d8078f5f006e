"""What selections and transports know of a run."""

from dataclasses import dataclass
from functools import cached_property

import torch

from megagrpo.weights.plan.bucket_layout import BucketLayout
from megagrpo.weights.plan.publish_plan import PublishPlan, Transfer
from megagrpo.weights.plan.sources import SourceTensor
from megagrpo.weights.plan.targets import TargetTensor
from megagrpo.weights.read.slice_reader import SliceReader


@dataclass(frozen=True)
class PublishContext:
    """A plan, and this rank's part in it."""

    plan: PublishPlan
    reader: SliceReader
    rank: int
    world_size: int
    owners: tuple[int, ...]  # the trainer rank that hands buckets to each replica
    dtype: torch.dtype  # weights travel in it, but for those that have one of their own
    timeout_seconds: float
    token: str  # names this run's memories; equal on all ranks

    @cached_property
    def layouts(self) -> list[BucketLayout]:
        """The memory layout of every bucket."""
        return [BucketLayout(self.plan, bucket) for bucket in self.plan.buckets]

    @cached_property
    def sends(self) -> list[list[Transfer]]:
        """What this rank has of every bucket, for all replicas."""
        return [self.plan.sends(bucket, self.rank) for bucket in self.plan.buckets]

    @property
    def slot_bytes(self) -> int:
        """Memory of the largest bucket."""
        return max(layout.nbytes for layout in self.layouts)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(iter(self.reader.model.chunks[0].parameters())).device

    def dtype_of(self, tensor: SourceTensor | TargetTensor) -> torch.dtype:
        """Return the dtype in which a tensor travels."""
        return self.dtype if tensor.dtype is None else getattr(torch, tensor.dtype)
