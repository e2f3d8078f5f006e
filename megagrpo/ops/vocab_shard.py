"""The part of the vocabulary a rank holds, and the collectives over the ranks that hold the rest."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.errors import UserError


@dataclass(frozen=True)
class VocabShard:
    """Columns `first .. first + num_columns` of the true vocabulary; padded columns belong to nobody.

    Attributes:
        first: global id of the first column.
        num_columns: columns of this rank that are real tokens; 0 on a rank that holds padding alone.
        group: the tensor-parallel group, None for one rank.
    """

    first: int
    num_columns: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """The shard of `weight` [Vp, H] on this rank of `group`.

        Raises:
            UserError: the ranks' rows together are fewer than `vocab_size`.
        """
        tp = 1 if group is None else group.size()
        rank = 0 if group is None else group.rank()
        rows = weight.shape[0]
        if not 0 < vocab_size <= rows * tp:
            raise UserError(
                f"vocab_size = {vocab_size}, but {tp} x {rows} = {tp * rows} weight rows are there"
            )
        return cls(rank * rows, max(0, min(rows, vocab_size - rank * rows)), group if tp > 1 else None)

    def all_reduce_max_(self, tensor: Tensor) -> None:
        """Collective over the group: elementwise maximum, in place."""
        if self.group is not None and tensor.numel() > 0:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def all_reduce_sum_(self, tensor: Tensor) -> None:
        """Collective over the group: elementwise sum, in place."""
        if self.group is not None and tensor.numel() > 0:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)

    def locate(self, targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Where `targets` [R] (global ids) lie in the local column range `columns`.

        Returns:
            inside [R] bool, and position [R, 1] int64 within the range (clamped where outside).
        """
        position = targets - (self.first + columns.start)
        width = columns.stop - columns.start
        return (position >= 0) & (position < width), position.clamp(0, width - 1).unsqueeze(1)


def check_inputs(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    vocab_size: int,
    temperature: float | Tensor,
) -> None:
    """Rejects what would give wrong numbers silently.

    Raises:
        UserError: one line with the argument, its value and what is allowed.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"{name}: hidden is {list(hidden.shape)} and weight {list(weight.shape)}; allowed "
            "are [T, H] and [Vp, H]"
        )
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise UserError(
            f"{name}: hidden is {hidden.dtype} and weight {weight.dtype}; they must be of one float type"
        )
    rows = hidden.shape[0]
    if targets is not None:
        if targets.shape != (rows,) or targets.dtype != torch.int64:
            raise UserError(
                f"{name}: targets is {list(targets.shape)} {targets.dtype}; allowed is [{rows}] int64"
            )
        _check_range(name, targets, vocab_size)
    if isinstance(temperature, Tensor):
        if temperature.shape != (rows,):
            raise UserError(
                f"{name}: temperature is {list(temperature.shape)}; allowed are a float and [{rows}]"
            )
        _check_temperatures(name, temperature)
    elif not 0 < temperature < math.inf:
        raise UserError(f"{name}: temperature = {temperature}; it must be above 0 and finite")


def check_reference(
    name: str, reference_hidden: Tensor, reference_weight: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    """Rejects a reference whose rows or columns are not the actor's.

    Raises:
        UserError: one line with the shapes.
    """
    check_inputs(f"{name} (reference)", reference_hidden, reference_weight, None, 0, 1.0)
    if len(reference_hidden) != len(hidden) or len(reference_weight) != len(weight):
        raise UserError(
            f"{name}: the reference has {len(reference_hidden)} rows and {len(reference_weight)} columns, "
            f"the actor {len(hidden)} and {len(weight)}; they must be equal"
        )


def _check_temperatures(name: str, temperature: Tensor) -> None:
    good = (temperature > 0) & torch.isfinite(temperature)
    if temperature.device.type != "cpu":
        torch._assert_async(good.all())  # as in `_check_range`
    elif not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise UserError(
            f"{name}: temperature[{row}] = {float(temperature[row])}; it must be above 0 and finite"
        )


def _check_range(name: str, targets: Tensor, vocab_size: int) -> None:
    if targets.numel() == 0:
        return
    low, high = torch.aminmax(targets)
    if targets.device.type != "cpu":
        # Reading the values would stall the stream; the check runs on the device and stops it there.
        torch._assert_async((low >= 0) & (high < vocab_size))
    elif low < 0 or high >= vocab_size:
        raise UserError(f"{name}: targets span {int(low)} .. {int(high)}; allowed are 0 .. {vocab_size - 1}")
