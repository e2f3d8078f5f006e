"""Where the parameters of a bucket lie in its memory. Pure: the same on every rank."""

from dataclasses import dataclass
from math import prod

from megagrpo.weights.plan.boxes import sizes
from megagrpo.weights.plan.publish_plan import Bucket, PublishPlan
from megagrpo.weights.plan.targets import TargetTensor

ALIGNMENT = 64  # bytes: whole cache lines, and any dtype


@dataclass(frozen=True)
class PlacedTensor:
    """One parameter of one destination in a bucket's memory."""

    destination: int
    position: int  # in the destination's list of parameters
    target: TargetTensor
    offset: int
    nbytes: int

    @property
    def padding_rows(self) -> int:
        """Rows at the end that nobody sends: the engine's vocabulary padding, zeros."""
        filled = sum(prod(sizes(part.box)) for part in self.target.parts)
        return (
            (self.target.numel - filled) // prod(self.target.shape[1:]) if filled < self.target.numel else 0
        )


class BucketLayout:
    """The memory of one bucket of one replica.

    Attributes:
        tensors: in order, destination by destination.
        numbers: of the tensors in that order, by destination and position in its list.
        nbytes: of all of it.
    """

    def __init__(self, plan: PublishPlan, bucket: Bucket):
        self.bucket = bucket
        self.tensors: list[PlacedTensor] = []
        offset = 0
        for destination, targets in enumerate(plan.targets):
            for position in range(bucket.first, bucket.last):
                nbytes = plan.target_bytes(targets[position])
                self.tensors.append(PlacedTensor(destination, position, targets[position], offset, nbytes))
                offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset
        self.numbers = {
            (tensor.destination, tensor.position): number for number, tensor in enumerate(self.tensors)
        }

    def find(self, destination: int, position: int) -> PlacedTensor:
        """Return the parameter at a position of a destination's list."""
        return self.tensors[self.numbers[destination, position]]
