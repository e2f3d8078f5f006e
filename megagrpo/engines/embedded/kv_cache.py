"""Keys and values of a decode batch: every prompt stored once, every completion's own tokens apart, and
attention over both.

Legend: P live prompts, R live completions (rows), M most rows of one prompt, Hq query heads, Hkv key/value
heads, g = Hq / Hkv, D head size, Lp longest live prompt, Lt longest live completion.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

# storage grows by whole blocks: a copy every 64 tokens, where a concatenation copies at every token
_BLOCK_TOKENS = 64


class KVStore:
    """Keys and values [slots, Hkv, tokens, D] for each layer; the first `count` slots are in use.

    Storage starts as zeros and only ever holds finite numbers: masked positions have probability 0, and 0 *
    NaN would be NaN.
    """

    def __init__(self):
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(
        self, layer: int, like: torch.Tensor, slots: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's (keys, values) with room for `slots` sequences of `tokens`; `like` [Hkv, any, D]
        gives their form.

        Layers grow one by one, so that at most one is ever held twice.
        """
        held = self._layers.get(layer)
        if held is not None and held[0].shape[0] >= slots and held[0].shape[2] >= tokens:
            return held
        blocks = -(-tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS
        if held is not None:
            slots, blocks = max(slots, held[0].shape[0]), max(blocks, held[0].shape[2])
        grown = []
        for part in range(2):
            storage = like.new_zeros(slots, like.shape[0], blocks, like.shape[2])
            if held is not None:
                storage[: held[part].shape[0], :, : held[part].shape[2]] = held[part]
            grown.append(storage)
        self._layers[layer] = (grown[0], grown[1])
        return self._layers[layer]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of slot `source` over slot `target`."""
        for keys, values in self._layers.values():
            keys[target, :, :tokens] = keys[source, :, :tokens]
            values[target, :, :tokens] = values[source, :, :tokens]


@dataclass(frozen=True)
class PrefillStep:
    """One forward over packed prompts: prompt i takes tokens `bounds[i]` to `bounds[i + 1]` and is stored
    in `slots[i]`.
    """

    bounds: list[int]
    slots: list[int]
    capacity: tuple[int, int]  # (slots, tokens) to hold ready


@dataclass(frozen=True)
class RowLayout:
    """Which prompt each row belongs to: changes only when rows come or go.

    The queries of a prompt's rows are laid side by side in a grid [P, M], so that its keys are read once for
    all of them.
    """

    prompts: int  # P
    width: int  # M
    longest_prompt: int  # Lp
    cells: torch.Tensor  # int64 [R]: a row's cell in the grid, prompt slot * M + rank among the prompt's rows
    prompt_mask: torch.Tensor  # bool [R, Lp], True where the prompt has no token
    full: bool  # row i is cell i, for every cell: the grid is a view of the rows

    @classmethod
    def build(
        cls, prompt_slots: np.ndarray, prompt_lengths: np.ndarray, device: torch.device | str
    ) -> "RowLayout":
        """Lay out rows whose prompts are in `prompt_slots` (int64 [R]); prompt slot i holds
        `prompt_lengths[i]` tokens (int64 [P]).
        """
        counts = np.bincount(prompt_slots, minlength=len(prompt_lengths))
        order = np.argsort(prompt_slots, kind="stable")
        ranks = np.empty_like(prompt_slots)
        ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        width, longest = int(counts.max()), int(prompt_lengths.max())
        mask = np.arange(longest)[None, :] >= prompt_lengths[prompt_slots][:, None]
        cells = torch.from_numpy(prompt_slots * width + ranks).to(device)
        full = len(prompt_slots) == len(prompt_lengths) * width and bool((np.diff(prompt_slots) >= 0).all())
        return cls(len(prompt_lengths), width, longest, cells, torch.from_numpy(mask).to(device), full)

    def to_grid(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, Hkv, g, X] -> [P, Hkv, M * g, X]; cells without a row are 0."""
        _, heads, group, width = rows.shape
        grid = rows
        if not self.full:
            grid = rows.new_zeros(self.prompts * self.width, heads, group, width)
            grid[self.cells] = rows
        return (
            grid.view(self.prompts, self.width, heads, group, width)
            .transpose(1, 2)
            .reshape(self.prompts, heads, -1, width)
        )

    def to_rows(self, grid: torch.Tensor) -> torch.Tensor:
        """[P, Hkv, M * g, X] -> [R, Hkv, g, X]."""
        prompts, heads, _, width = grid.shape
        cells = grid.view(prompts, heads, self.width, -1, width).transpose(1, 2)
        rows = cells.reshape(prompts * self.width, heads, -1, width)
        return rows if self.full else rows[self.cells]


@dataclass(frozen=True)
class DecodeStep:
    """One forward over the newest token of each of R rows."""

    layout: RowLayout
    rows: torch.Tensor  # int64 [R], 0 to R - 1
    positions: torch.Tensor  # int64 [R], of the newest token within its completion
    longest: int  # Lt, the newest tokens included
    capacity: int  # slots to hold ready for completions
    mask: torch.Tensor  # [R, 1, 1, Lp + Lt]: 0 or -inf
    common_position: int | None  # where all rows are equally long

    def write(self, storage: torch.Tensor, newest: torch.Tensor) -> None:
        """Store the newest tokens [Hkv, R, D] in `storage` [slots, Hkv, tokens, D]; one strided copy where
        rows are equally long.
        """
        if self.common_position is not None:
            storage[: len(self.rows), :, self.common_position] = newest.transpose(0, 1)
        else:
            storage[self.rows, :, self.positions] = newest.transpose(0, 1)

    @classmethod
    def build(cls, layout: RowLayout, positions: np.ndarray, capacity: int) -> "DecodeStep":
        """Describe a step whose newest tokens are at `positions` (int64 [R], 0 = the completion's first)."""
        device, longest = layout.cells.device, int(positions.max()) + 1
        newest = torch.from_numpy(positions).to(device)
        unwritten = torch.arange(longest, device=device)[None, :] > newest[:, None]
        hidden = torch.cat([layout.prompt_mask, unwritten], dim=1)
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        rows = torch.arange(len(positions), device=device)
        common = longest - 1 if bool((positions == longest - 1).all()) else None
        return cls(layout, rows, newest, longest, capacity, mask[:, None, None, :], common)


class RolloutCache:
    """What the attention of one `generate()` remembers; `step` says what the running forward computes."""

    def __init__(self):
        self.prompts = KVStore()
        self.completions = KVStore()
        self.step: PrefillStep | DecodeStep | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store `key` and `value` [Hkv, T, D] and return the attention of `query` [Hq, T, D] as [T, Hq,
        D].
        """
        attend = self._attend_prefill if isinstance(self.step, PrefillStep) else self._attend_decode
        return attend(layer, query, key, value, scale)

    def _attend_prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        step = self.step
        keys, values = self.prompts.reserve(layer, key, *step.capacity)
        output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for slot, (start, end) in zip(step.slots, pairwise(step.bounds), strict=True):
            keys[slot, :, : end - start] = key[:, start:end]
            values[slot, :, : end - start] = value[:, start:end]
            q, k, v = (states[None, :, start:end] for states in (query, key, value))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            output[start:end] = attended[0].transpose(0, 1)
        return output

    def _attend_decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        step, layout = self.step, self.step.layout
        rows, kv_heads = len(step.rows), key.shape[0]
        keys, values = self.completions.reserve(layer, key, step.capacity, step.longest)
        step.write(keys, key)
        step.write(values, value)
        prompt_keys, prompt_values = (
            part[: layout.prompts, :, : layout.longest_prompt]
            for part in self.prompts.reserve(layer, key, 0, 0)
        )
        keys, values = keys[:rows, :, : step.longest], values[:rows, :, : step.longest]

        query = query.view(kv_heads, -1, rows, query.shape[-1]).permute(2, 0, 1, 3)  # [R, Hkv, g, D]
        prompt_scores = layout.to_rows(layout.to_grid(query) @ prompt_keys.transpose(-1, -2))
        scores = torch.cat([prompt_scores, query @ keys.transpose(-1, -2)], dim=-1)
        weights = torch.softmax(scores.float().mul_(scale).add_(step.mask), dim=-1).to(value.dtype)
        prompt_weights, own_weights = weights.split([layout.longest_prompt, step.longest], dim=-1)
        output = layout.to_rows(layout.to_grid(prompt_weights) @ prompt_values) + own_weights @ values
        return output.reshape(rows, -1, output.shape[-1])
