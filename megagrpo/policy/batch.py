"""Builds the tensors of a micro-batch from its plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megagrpo.models.packed import PackedTrees, Tree
from megagrpo.models.routing import RoutedPackedSeqParams, RoutedSequences, route_sequences
from megagrpo.parallel.token_shard import TokenShard
from megagrpo.policy.microbatches import MicroBatchPlan, PackingRules
from megagrpo.rollout.rollouts import SampleKey


@dataclass(frozen=True)
class TrainSample:
    """One completion as it is trained, on the ranks of the replica that trains it."""

    key: SampleKey
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # int64 [L]
    rollout_logprobs: np.ndarray  # float32 [L]
    untrained: tuple[tuple[int, int], ...] = ()  # (first token, end) of what the loss leaves out

    def trained_positions(self) -> np.ndarray:
        """Return the indices of the tokens that the loss counts, int64, ascending."""
        is_trained = np.ones(len(self.token_ids), dtype=bool)
        for first, end in self.untrained:
            is_trained[first:end] = False
        return is_trained.nonzero()[0]


@dataclass
class RowTerms:
    """What the last stage knows of a micro-batch's rows before the update. None: not needed, so not
    computed.
    """

    # [R]; None: the actor's own values of this very forward, so the ratio is exactly 1
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None  # [R]
    ref_hidden: torch.Tensor | None = None  # [R, H], for the exact KL
    keep: torch.Tensor | None = None  # bool [R]: rows that a correction leaves in the loss
    correction_weights: torch.Tensor | None = None  # [R]
    kl_to_go: torch.Tensor | None = None  # [R] KL taken from the reward at the row's token and all later ones


@dataclass(frozen=True)
class MicroBatch:
    """Packed input and its loss rows. T input tokens, alignment padding included; one row per completion
    token that is trained.

    A context parallel rank holds T of the micro-batch's tokens and the R rows that they predict; `keys` are
    the whole micro-batch's.
    """

    tokens: torch.Tensor  # int64 [1, T]
    packed: RoutedPackedSeqParams
    keys: tuple[SampleKey, ...]  # one for each of its B sequences
    row_index: torch.Tensor  # int64 [R]: the input position whose hidden state predicts the row's token
    targets: torch.Tensor  # int64 [R]
    sequence_ids: torch.Tensor  # int64 [R], 0 <= id < B
    positions: torch.Tensor  # int64 [R]: index of the row's token in its completion
    rollout_logprobs: torch.Tensor  # float32 [R]
    chunks: torch.Tensor  # int64 [R]: `TokenShard.chunks` of the row's input position
    terms: RowTerms = field(default_factory=RowTerms)  # filled before the update

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.keys)

    def per_row(self, values: Mapping[SampleKey, float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Spread one number per sequence over its rows: [R]."""
        by_sequence = torch.tensor(
            [values[key] for key in self.keys], dtype=dtype, device=self.sequence_ids.device
        )
        return by_sequence[self.sequence_ids]


class MicroBatchBuilder:
    """Turns plans into this context parallel rank's tensors, on its device."""

    def __init__(
        self,
        device: torch.device,
        rules: PackingRules,
        pad_token_id: int,
        use_te: bool,
        cp: int = 1,
        cp_rank: int = 0,
    ):
        self.device, self.rules, self.pad_token_id, self.use_te = device, rules, pad_token_id, use_te
        self.cp, self.cp_rank = cp, cp_rank

    def build(
        self, plan: MicroBatchPlan, sample_of: Callable[[int], TrainSample], sequences_per_update: int = 1
    ) -> MicroBatch:
        """Pack the planned trees; an empty plan gives a micro-batch of padding alone, which keeps the ranks
        in step.

        Args:
            plan: the trees, with the numbers of their samples.
            sample_of: returns the sample with a number.
            sequences_per_update: sequences of the mini-batch over all replicas, which the experts' balance
                loss is a mean over.
        """
        samples = [sample_of(index) for tree in plan for index in tree.samples]
        inputs: list[Sequence[int]] = []
        trees: list[Tree] = []
        stretches: list[int] = []  # tokens of each tree, padding behind it included
        rows: list[np.ndarray] = []
        positions = [sample.trained_positions() for sample in samples]
        offset = 0
        for tree_plan in plan:
            members = [sample_of(index) for index in tree_plan.samples]
            prompt = members[0].prompt_ids
            inputs.append(prompt)
            branch_start = offset + len(prompt)
            for sample in members:
                branch = len(sample.token_ids) - 1
                inputs.append(sample.token_ids[:-1])
                predicts = np.arange(branch_start - 1, branch_start + branch)  # each token's position, less 1
                predicts[0] = offset + len(prompt) - 1
                rows.append(predicts[positions[len(rows)]])
                branch_start += branch
            trees.append(Tree(len(prompt), tuple(len(sample.token_ids) - 1 for sample in members)))
            stretches.append(branch_start - offset + (offset - branch_start) % self.rules.sequence_alignment)
            offset += stretches[-1]
            inputs.append([self.pad_token_id] * (offset - branch_start))
        padding = max(-offset % self.rules.alignment, 0 if offset else self.rules.alignment)
        if padding:
            inputs.append([self.pad_token_id] * padding)
            trees.append(Tree(padding, ()))
            stretches.append(padding)
        shard = TokenShard(tuple(stretches) if self.use_te else (offset + padding,), self.cp, self.cp_rank)
        row_index = shard.local_positions()[_concatenate(rows)]
        local = row_index >= 0

        def pick(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype)[local].to(self.device)

        return MicroBatch(
            tokens=torch.as_tensor(np.concatenate(inputs), dtype=torch.int64)[
                None, shard.packed_positions()
            ].to(self.device),
            packed=self._pack(trees, shard, sequences_per_update),
            keys=tuple(sample.key for sample in samples),
            row_index=row_index[local].to(self.device),
            targets=pick(_trained([sample.token_ids for sample in samples], positions)),
            sequence_ids=pick(np.repeat(np.arange(len(samples)), list(map(len, positions)))),
            positions=pick(_concatenate(positions)),
            rollout_logprobs=pick(
                _trained([sample.rollout_logprobs for sample in samples], positions), torch.float32
            ),
            chunks=shard.chunks()[row_index[local]].to(self.device),
        )

    def _pack(self, trees: list[Tree], shard: TokenShard, sequences_per_update: int) -> RoutedPackedSeqParams:
        routed = route_sequences(
            [(tree.prompt, tree.branches) for tree in trees], shard, sequences_per_update, self.device
        )
        if self.use_te:
            return self._pack_thd(shard.stretches, routed)
        return PackedTrees(trees=tuple(trees), shard=shard, device=self.device, routed=routed)

    def _pack_thd(self, lengths: Sequence[int], routed: RoutedSequences) -> RoutedPackedSeqParams:
        """Describe the sequences to Transformer Engine, the padding behind each as its last tokens:
        nothing attends to it.
        """
        boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
        return RoutedPackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            routed=routed,
        )


def _trained(values: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values of the tokens at `positions` of each sample, one sample after the other."""
    return _concatenate([part[places] for part, places in zip(values, positions, strict=True)])


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) else np.empty(0, dtype=np.int64)
