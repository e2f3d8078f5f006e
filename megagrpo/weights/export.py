"""Streams the actor's weights as full HF tensors, bucket by bucket, to every rank.

plan (once)     which stage owns which HF tensors, in which buckets: all-gathered metadata, the same on all
                ranks
gather          the owner's tensor parallel ranks all-gather their slices of one bucket in one collective;
                experts are gathered over the expert parallel ranks in the same way, the k-th expert of each
                rank together
broadcast       the full bucket goes down the pipeline group in one collective

A rank that holds all of a tensor that no other stage needs hands out its own weights: no bucket is made. Each
data parallel replica does this for itself, so no bytes cross replicas. Two buckets at most are alive on a
rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megagrpo.models.slices import HFSlices
from megagrpo.models.stage import StageModel, StageParameter
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.parallel.plain_data import exchangeable

BUCKET_BYTES = 64 * 2**20


@exchangeable
@dataclass(frozen=True)
class ExportEntry:
    """One HF tensor of an export; for experts, one of each expert parallel rank."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # one tensor parallel rank's slice, vocabulary padding included
    split_dimension: int | None  # None: every tensor parallel rank holds all of it
    rows: int | None  # true vocabulary size, where the padding must not leave
    dtype: str  # a torch dtype without its prefix

    @property
    def numel(self) -> int:
        """Elements of one slice."""
        return int(torch.Size(self.shape).numel())

    def assemble(self, slices: list[torch.Tensor]) -> torch.Tensor:
        """Return the full HF tensor from the slices of all tensor parallel ranks."""
        if self.split_dimension is None:
            return slices[0]
        full = torch.cat(slices, dim=self.split_dimension) if len(slices) > 1 else slices[0]
        return full[: self.rows] if self.rows is not None else full


@dataclass(frozen=True)
class ExportBucket:
    """HF tensors that travel together."""

    stage: int
    is_expert: bool
    dtype: torch.dtype
    entries: tuple[ExportEntry, ...]

    @property
    def numel(self) -> int:
        """Elements of one rank's slices."""
        return sum(entry.numel for entry in self.entries)


def _bucket(stage: int, is_expert: bool, entries: list[ExportEntry]) -> ExportBucket:
    return ExportBucket(stage, is_expert, getattr(torch, entries[0].dtype), tuple(entries))


@dataclass
class ExportStats:
    """Bytes of one export on this rank."""

    gathered_bytes: int = 0  # received from tensor and expert parallel peers
    broadcast_bytes: int = 0  # received from another pipeline stage
    exported_bytes: int = 0  # full HF tensors handed out


class WeightExporter:
    """Exports a model's weights any number of times; the plan is made once."""

    def __init__(self, model: StageModel, bucket_bytes: int = BUCKET_BYTES):
        self.model = model
        self.buckets = self._plan(bucket_bytes)
        self.stats = ExportStats()

    def _plan(self, bucket_bytes: int) -> list[ExportBucket]:
        """Collective over the pipeline group."""
        local: dict[bool, list[tuple[ExportEntry, int]]] = {False: [], True: []}
        slices = HFSlices(self.model)
        for row in self.model.named_rules():
            rule = row.rule
            if rule.is_tied_copy:
                continue
            rows = self.model.dims.vocab_size if rule.kind == "vocab" else None
            itemsize = row.parameter.element_size() * self._gather_size(rule.is_expert)
            for names, own in zip(self._names_of_all_owners(row), row.hf_names, strict=True):
                dtype = str(row.parameter.dtype).removeprefix("torch.")
                entry = ExportEntry(names, tuple(slices[own].shape), rule.split_dimension, rows, dtype)
                local[rule.is_expert].append((entry, entry.numel * itemsize))
            slices.forget()
        buckets = []
        for stage, by_kind in enumerate(all_gather_metadata(local, self.model.groups.pp)):
            for is_expert, entries in by_kind.items():
                pending: list[ExportEntry] = []
                pending_bytes = 0
                for entry, full_bytes in entries:
                    is_full = pending_bytes + full_bytes > bucket_bytes
                    if pending and (is_full or pending[0].dtype != entry.dtype):
                        buckets.append(_bucket(stage, is_expert, pending))
                        pending, pending_bytes = [], 0
                    pending.append(entry)
                    pending_bytes += full_bytes
                if pending:
                    buckets.append(_bucket(stage, is_expert, pending))
        return buckets

    def _names_of_all_owners(self, row: StageParameter) -> list[tuple[str, ...]]:
        """Return the names of each HF tensor of a parameter on all ranks that own it: one name, or one for
        each expert parallel rank.
        """
        per_rank = self.model.experts_per_rank
        experts: Iterable[int | None] = [None]
        if row.expert is not None:
            experts = range(row.expert % per_rank, row.rule.num_experts, per_rank)
        return list(zip(*(row.rule.hf_names(row.layer, expert) for expert in experts), strict=True))

    def _gather_size(self, is_expert: bool) -> int:
        return self.model.groups.experts.size() if is_expert else self.model.tp

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, full tensor) of every parameter. Collective over the tp, ep, etp and pp groups:
        consume it whole on all ranks.

        A yielded tensor is valid until the next one is taken: copy what must last.
        """
        self.stats = ExportStats()
        slices = HFSlices(self.model)
        for bucket in self.buckets:
            for name, full in self._tensors_of(bucket, slices):
                self.stats.exported_bytes += full.numel() * full.element_size()
                yield name, full
            slices.forget()

    def _tensors_of(self, bucket: ExportBucket, slices: HFSlices) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one bucket: this rank's own weights where it holds them whole, else parts
        of the gathered bucket.
        """
        groups = self.model.groups
        group = groups.experts if bucket.is_expert else groups.tp
        if group.size() == groups.pp.size() == 1:
            for entry in bucket.entries:
                (name,) = entry.names
                yield name, entry.assemble([slices[name]])
            return
        owner = groups.ep_rank if bucket.is_expert else 0
        device = next(self.model.chunks[0].parameters()).device
        flat = torch.empty(group.size(), bucket.numel, dtype=bucket.dtype, device=device)
        if groups.pp_rank == bucket.stage:
            torch.cat(
                [slices[entry.names[owner]].reshape(-1) for entry in bucket.entries], out=flat[group.rank()]
            )
            if group.size() > 1:
                dist.all_gather_into_tensor(flat.view(-1), flat[group.rank()].clone(), group=group)
                self.stats.gathered_bytes += (group.size() - 1) * bucket.numel * flat.element_size()
        if groups.pp.size() > 1:
            dist.broadcast(flat, dist.get_global_rank(groups.pp, bucket.stage), group=groups.pp)
            if groups.pp_rank != bucket.stage:
                self.stats.broadcast_bytes += flat.numel() * flat.element_size()
        offset = 0
        for entry in bucket.entries:
            parts = [row[offset : offset + entry.numel].view(entry.shape) for row in flat]
            shards = len(parts) // len(entry.names)
            for number, name in enumerate(entry.names):
                yield name, entry.assemble(parts[number * shards : (number + 1) * shards])
            offset += entry.numel
