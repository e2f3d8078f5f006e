"""Builds the tensors of a micro-batch from its plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megagrpo.models.packed import PackedTrees, Tree
from megagrpo.policy.microbatches import MicroBatchPlan
from megagrpo.rollout.rollouts import SampleKey


@dataclass(frozen=True)
class TrainSample:
    """One completion as it is trained, on the ranks of the replica that trains it."""

    key: SampleKey
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # int64 [L]
    rollout_logprobs: np.ndarray  # float32 [L]


@dataclass(frozen=True)
class MicroBatch:
    """Packed input and its loss rows. R rows: one per completion token; T input tokens, alignment padding included."""

    tokens: torch.Tensor  # int64 [1, T]
    packed: PackedSeqParams
    keys: tuple[SampleKey, ...]  # of its B sequences
    row_index: torch.Tensor  # int64 [R]: the input position whose hidden state predicts the row's token
    targets: torch.Tensor  # int64 [R]
    sequence_ids: torch.Tensor  # int64 [R], 0 <= id < B
    rollout_logprobs: torch.Tensor  # float32 [R]

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.keys)

    @property
    def positions(self) -> torch.Tensor:
        """Index of each row's token in its completion, int64 [R]."""
        starts = torch.searchsorted(self.sequence_ids, torch.arange(self.num_sequences, device=self.sequence_ids.device))
        return torch.arange(len(self.sequence_ids), device=self.sequence_ids.device) - starts[self.sequence_ids]

    def per_row(self, values: Mapping[SampleKey, float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Spread one number per sequence over its rows: [R]."""
        by_sequence = torch.tensor([values[key] for key in self.keys], dtype=dtype, device=self.sequence_ids.device)
        return by_sequence[self.sequence_ids]


class MicroBatchBuilder:
    """Turns plans into tensors on the rank's device."""

    def __init__(self, device: torch.device, alignment: int, pad_token_id: int, use_te: bool):
        self.device, self.alignment, self.pad_token_id, self.use_te = device, alignment, pad_token_id, use_te

    def build(self, plan: MicroBatchPlan, sample_of: Callable[[int], TrainSample]) -> MicroBatch:
        """Pack the planned trees; an empty plan gives a micro-batch of padding alone, which keeps the ranks in step."""
        samples = [sample_of(index) for tree in plan for index in tree.samples]
        inputs: list[Sequence[int]] = []
        trees: list[Tree] = []
        rows: list[np.ndarray] = []
        offset = 0
        for tree_plan in plan:
            members = [sample_of(index) for index in tree_plan.samples]
            prompt = members[0].prompt_ids
            inputs.append(prompt)
            branch_start = offset + len(prompt)
            for sample in members:
                branch = len(sample.token_ids) - 1
                inputs.append(sample.token_ids[:-1])
                rows.append(np.concatenate([[offset + len(prompt) - 1], np.arange(branch_start, branch_start + branch)]))
                branch_start += branch
            trees.append(Tree(len(prompt), tuple(len(sample.token_ids) - 1 for sample in members)))
            offset = branch_start
        padding = max(-offset % self.alignment, 0 if offset else self.alignment)
        if padding:
            inputs.append([self.pad_token_id] * padding)
            trees.append(Tree(padding, ()))
        lengths = [len(sample.token_ids) for sample in samples]
        return MicroBatch(
            tokens=self._int(np.concatenate(inputs))[None],
            packed=self._packed(trees),
            keys=tuple(sample.key for sample in samples),
            row_index=self._int(_concatenate(rows)),
            targets=self._int(_concatenate([sample.token_ids for sample in samples])),
            sequence_ids=self._int(np.repeat(np.arange(len(samples)), lengths)),
            rollout_logprobs=self._float(_concatenate([sample.rollout_logprobs for sample in samples])),
        )

    def _int(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.device)

    def _float(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.float32), device=self.device)

    def _packed(self, trees: list[Tree]) -> PackedSeqParams:
        if not self.use_te:
            return PackedTrees(trees=tuple(trees), device=self.device)
        lengths = [tree.tokens for tree in trees]
        boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
        )


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) else np.empty(0)
