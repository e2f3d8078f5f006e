"""Metrics that declare how they are reduced, so that no number is ever a mean of means.

A metric is kept as what can be added without loss (a sum and a count, a maximum, ...), merged over micro-batches and mini-batches,
all-reduced over ranks, and turned into a float once, at the end. All arithmetic is float64.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Reduction = Literal["mean", "sum", "max", "min"]

# [0] is the identity of its reduction: what a rank without data contributes.
_IDENTITY: dict[str, tuple[float, float]] = {"mean": (0.0, 0.0), "sum": (0.0, 0.0), "max": (-math.inf, 0.0), "min": (math.inf, 0.0)}


class MetricSums:
    """Named metrics, each with one reduction.

    mean: sum of values / count of values, over everything that was added. sum: total. max, min: extremes; a NaN counts as the worst
    value (+inf for max, -inf for min), so that it is never hidden by a comparison.

    Example:
        >>> metrics = MetricSums()
        >>> metrics.add_mean("loss", total=6.0, count=4)  # one micro-batch of 4 tokens
        >>> metrics.add_mean("loss", total=0.0, count=2)  # another of 2
        >>> metrics.add_max("logprob_gap", 1e-6)
        >>> metrics.compute()
        {'loss': 1.0, 'logprob_gap': 1e-06}
    """

    def __init__(self, declared: Mapping[str, Reduction] | None = None):
        """Start with the metrics in `declared`, each without data; further ones are declared by their first value."""
        self._reductions: dict[str, Reduction] = {}
        self._values: dict[str, float] = {}
        self._counts: dict[str, float] = {}  # number of values behind a mean; for the others the number of contributions
        for name, reduction in (declared or {}).items():
            self.declare(name, reduction)

    def declare(self, name: str, reduction: Reduction) -> None:
        """Make `name` known without data: what a rank that may get none does before `all_reduce`.

        Raises:
            ValueError: `name` is declared with another reduction.
        """
        known = self._reductions.setdefault(name, reduction)
        if known != reduction:
            raise ValueError(f"metric {name}: declared as {known}, now given as {reduction}")
        if name not in self._values:
            self._values[name], self._counts[name] = _IDENTITY[reduction]

    def add_mean(self, name: str, total: SupportsFloat, count: SupportsFloat) -> None:
        """Add the sum `total` of `count` values (tokens, sequences, ...) to a mean."""
        self.declare(name, "mean")
        self._values[name] += float(total)
        self._counts[name] += float(count)

    def add_sum(self, name: str, value: SupportsFloat) -> None:
        """Add `value` to a total."""
        self.declare(name, "sum")
        self._values[name] += float(value)
        self._counts[name] += 1.0

    def add_max(self, name: str, value: SupportsFloat) -> None:
        """Raise a maximum to `value`."""
        self.declare(name, "max")
        number = float(value)
        self._values[name] = max(self._values[name], math.inf if math.isnan(number) else number)
        self._counts[name] += 1.0

    def add_min(self, name: str, value: SupportsFloat) -> None:
        """Lower a minimum to `value`."""
        self.declare(name, "min")
        number = float(value)
        self._values[name] = min(self._values[name], -math.inf if math.isnan(number) else number)
        self._counts[name] += 1.0

    def merge(self, other: "MetricSums") -> None:
        """Add everything that `other` holds, as if it had been added here."""
        for name, reduction in other._reductions.items():
            self.declare(name, reduction)
            value = other._values[name]
            if reduction == "max":
                self._values[name] = max(self._values[name], value)
            elif reduction == "min":
                self._values[name] = min(self._values[name], value)
            else:
                self._values[name] += value
            self._counts[name] += other._counts[name]

    def all_reduce(self, group: "ProcessGroup | None" = None, device: Any = "cpu") -> None:
        """Reduce over the ranks of `group`, in place. Collective over `group`: ranks without data take part too.

        Three small collectives: the names' fingerprint, the sums, the extremes.

        Args:
            group: None is the default group. Each rank must hold its own share; a group over which values are replicated (tensor
                parallel) would count them several times.
            device: where the flat float64 tensors live ("cuda" for NCCL).

        Raises:
            RuntimeError: the ranks hold different metrics; raised on all of them, naming the differences.
        """
        import torch
        import torch.distributed as dist

        self._check_same_names(group, device)
        names = sorted(self._reductions)
        summed = [name for name in names if self._reductions[name] in ("mean", "sum")]
        extreme = [name for name in names if self._reductions[name] in ("max", "min")]
        signs = [1.0 if self._reductions[name] == "max" else -1.0 for name in extreme]
        sums = torch.tensor(
            [*(self._values[name] for name in summed), *(self._counts[name] for name in names)], dtype=torch.float64, device=device
        )
        extremes = torch.tensor(
            [sign * self._values[name] for sign, name in zip(signs, extreme, strict=True)], dtype=torch.float64, device=device
        )
        if names:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        if extreme:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        flat = sums.tolist()
        self._values.update(zip(summed, flat[: len(summed)], strict=True))
        self._counts.update(zip(names, flat[len(summed) :], strict=True))
        self._values.update({name: sign * value for name, sign, value in zip(extreme, signs, extremes.tolist(), strict=True)})

    def _check_same_names(self, group: "ProcessGroup | None", device: Any) -> None:
        """Compare a fingerprint of the names first: tensors of different lengths would hang or corrupt a collective."""
        import torch
        import torch.distributed as dist

        described = [f"{name} ({reduction})" for name, reduction in sorted(self._reductions.items())]
        digest = hashlib.sha256("\n".join(described).encode()).digest()
        mark = int.from_bytes(digest[:7], "big")  # 56 bits fit an int64, negated too
        ends = torch.tensor([mark, -mark], dtype=torch.int64, device=device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        highest, lowest = ends[0].item(), -ends[1].item()
        if highest == lowest:
            return
        held: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(held, described, group=group)
        everywhere = set.intersection(*map(set, held))
        lines = [
            f"rank {rank} of the group alone or with some: {', '.join(sorted(set(names) - everywhere))}" for rank, names in enumerate(held)
        ]
        raise RuntimeError(
            "metrics differ between ranks; declare them on all: " + "; ".join(line for line in lines if not line.endswith(": "))
        )

    def compute(self) -> dict[str, float]:
        """Return each metric's float, in the order of declaration; one without data is left out (a sum without data is 0)."""
        computed: dict[str, float] = {}
        for name, reduction in self._reductions.items():
            if reduction == "sum":
                computed[name] = self._values[name]
            elif self._counts[name] != 0:
                computed[name] = self._values[name] / self._counts[name] if reduction == "mean" else self._values[name]
        return computed

    def sums(self) -> dict[str, tuple[Reduction, float, float]]:
        """Return (reduction, value or sum, count) per name: what a later process needs to go on adding."""
        return {name: (reduction, self._values[name], self._counts[name]) for name, reduction in self._reductions.items()}
