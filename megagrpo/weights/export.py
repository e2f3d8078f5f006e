"""Streams the actor's weights as full HF tensors, bucket by bucket, to every rank.

plan (once)     which stage owns which HF tensors, in which buckets: all-gathered metadata, the same on all ranks
gather          the owner's tensor parallel ranks all-gather their slices of one bucket in one collective
broadcast       the full bucket goes down the pipeline group in one collective

Each data parallel replica does this for itself, so no bytes cross replicas. Two buckets at most are alive on a rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megagrpo.models.build import StageModel

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ExportEntry:
    """One HF tensor of an export."""

    name: str
    shape: tuple[int, ...]  # of one tensor parallel rank's slice, vocabulary padding included
    split_dimension: int | None  # None: every tensor parallel rank holds all of it
    rows: int | None  # true vocabulary size, where the padding must not leave

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
    entries: tuple[ExportEntry, ...]

    @property
    def numel(self) -> int:
        """Elements of one rank's slices."""
        return sum(entry.numel for entry in self.entries)


@dataclass
class ExportStats:
    """Bytes of one export on this rank."""

    gathered_bytes: int = 0  # received from tensor parallel peers
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
        local = []
        for name, rule, layer, parameter in self.model.named_rules():
            if name == "output_layer.weight" and self.model.hf.tie_word_embeddings:
                continue  # the first stage's embedding is the same tensor
            rows = self.model.dims.vocab_size if rule.kind == "vocab" else None
            for hf_name in rule.hf_names(layer):
                local.append((hf_name, rule.split_dimension, rows, parameter.element_size()))
        slices = self.model.hf_slices()
        entries = [(ExportEntry(name, tuple(slices[name].shape), dim, rows), size) for name, dim, rows, size in local]
        stages: list = [None] * self.model.groups.pp.size()
        dist.all_gather_object(stages, entries, group=self.model.groups.pp)
        buckets = []
        for stage, stage_entries in enumerate(stages):
            pending: list[ExportEntry] = []
            pending_bytes = 0
            for entry, element_size in stage_entries:
                full_bytes = entry.numel * element_size * self.model.tp
                if pending and pending_bytes + full_bytes > bucket_bytes:
                    buckets.append(ExportBucket(stage, tuple(pending)))
                    pending, pending_bytes = [], 0
                pending.append(entry)
                pending_bytes += full_bytes
            buckets.append(ExportBucket(stage, tuple(pending)))
        return buckets

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, full tensor) of every parameter. Collective over the tp and pp groups: consume it whole on all ranks.

        A yielded tensor is valid until the next one is taken: copy what must last.
        """
        self.stats = ExportStats()
        slices = self.model.hf_slices()
        parameter = next(self.model.chunks[0].parameters())
        groups = self.model.groups
        for bucket in self.buckets:
            flat = torch.empty(self.model.tp, bucket.numel, dtype=parameter.dtype, device=parameter.device)
            if groups.pp_rank == bucket.stage:
                torch.cat([slices[entry.name].reshape(-1) for entry in bucket.entries], out=flat[groups.tp_rank])
                if self.model.tp > 1:
                    dist.all_gather_into_tensor(flat.view(-1), flat[groups.tp_rank].clone(), group=groups.tp)
                    self.stats.gathered_bytes += (self.model.tp - 1) * bucket.numel * flat.element_size()
            if groups.pp.size() > 1:
                dist.broadcast(flat, dist.get_global_rank(groups.pp, bucket.stage), group=groups.pp)
                if groups.pp_rank != bucket.stage:
                    self.stats.broadcast_bytes += flat.numel() * flat.element_size()
            offset = 0
            for entry in bucket.entries:
                parts = [row[offset : offset + entry.numel].view(entry.shape) for row in flat]
                full = entry.assemble(parts)
                self.stats.exported_bytes += full.numel() * full.element_size()
                yield entry.name, full
                offset += entry.numel
