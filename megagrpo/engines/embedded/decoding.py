"""The decode loop: waiting completions are admitted as rows, every row grows by one token a step, finished
rows leave at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megagrpo.engines.base import EngineError
from megagrpo.engines.completion_rules import StopRule
from megagrpo.engines.embedded.kv_cache import DecodeStep, PrefillStep, RolloutCache, RowLayout
from megagrpo.types import FinishReason, Prompt, SamplingParams
from megagrpo.wire.counter_sampling import draw_uniforms, row_keys, sample_tokens

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, RolloutCache], torch.Tensor]
"""(token ids [T], position ids [T], indices of the wanted tokens or None for all, cache) -> logits
[wanted, V].
"""


@dataclass(frozen=True)
class RowRequest:
    """Completions of one prompt that are admitted together, behind one prefill."""

    prompt: Prompt
    completion_indices: tuple[int, ...]
    order: tuple[int, ...]  # places of the completions in the caller's answer


@dataclass(frozen=True)
class DecodedRow:
    """What was sampled for one completion."""

    order: int
    token_ids: np.ndarray  # int64 [L]
    logprobs: np.ndarray  # float32 [L]
    finish_reason: FinishReason


class Decoder:
    """Runs the requests of one `generate()`; live rows are always the first `self._count` of every row
    array and KV store.
    """

    def __init__(
        self,
        forward: Forward,
        sampling: SamplingParams,
        stop_rule: StopRule,
        max_rows: int,
        max_prefill_tokens: int,
    ):
        """`max_rows` completions are decoded at once; prompts are prefilled together up to
        `max_prefill_tokens`, a longer one alone.
        """
        self._forward = forward
        self._sampling = sampling
        self._stop_rule = stop_rule
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens

    def run(
        self,
        requests: list[RowRequest],
        device: torch.device | str,
        aborted: Callable[[], bool],
        on_row: Callable[[DecodedRow], None],
    ) -> None:
        """Decode all `requests`, each of at most `max_rows` completions, and hand every row over as it ends.

        Once `aborted()` is true, the rows end with what they have.
        """
        self._device = device
        self._cache = RolloutCache()
        self._waiting = deque(requests)
        self._on_row = on_row
        self._rows = _Rows(
            min(self._max_rows, sum(len(request.order) for request in requests)), self._sampling
        )
        self._prompt_lengths = np.zeros(0, dtype=np.int64)  # by prompt slot
        self._longest_prompt = max((len(request.prompt.token_ids) for request in requests), default=0)
        self._layout: RowLayout | None = None  # None: rows came or went since it was built
        while (self._waiting or self._rows.count) and not aborted():
            if admitted := self._admit():
                self._prefill(admitted)
            elif self._rows.count:
                self._decode()
        self._abort_rest()

    def _admit(self) -> list[RowRequest]:
        """Take from the queue what fits beside the live rows and into one prefill."""
        admitted: list[RowRequest] = []
        free, tokens = self._max_rows - self._rows.count, 0
        while self._waiting and len(self._waiting[0].order) <= free:
            tokens += len(self._waiting[0].prompt.token_ids)
            if admitted and tokens > self._max_prefill_tokens:
                break
            free -= len(self._waiting[0].order)
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, requests: list[RowRequest]) -> None:
        lengths = np.array([len(request.prompt.token_ids) for request in requests])
        ends = np.cumsum(lengths)
        first_slot = len(self._prompt_lengths)
        slots = list(range(first_slot, first_slot + len(requests)))
        self._cache.step = PrefillStep([0, *ends.tolist()], slots, (slots[-1] + 1, self._longest_prompt))
        token_ids = np.concatenate([request.prompt.token_ids for request in requests])
        positions = np.concatenate([np.arange(length) for length in lengths])
        logits = self._forward(
            self._tensor(token_ids), self._tensor(positions), self._tensor(ends - 1), self._cache
        )
        self._prompt_lengths = np.concatenate([self._prompt_lengths, lengths])

        sizes = [len(request.order) for request in requests]
        first_row = self._rows.count
        for request, slot in zip(requests, slots, strict=True):
            self._rows.add(request, slot)
        self._layout = None
        self._append_tokens(
            first_row, logits.repeat_interleave(torch.tensor(sizes, device=logits.device), dim=0)
        )

    def _decode(self) -> None:
        rows = self._rows
        live = slice(0, rows.count)
        if self._layout is None:
            self._layout = RowLayout.build(rows.prompt_slots[live], self._prompt_lengths, self._device)
        newest = rows.lengths[live] - 1
        self._cache.step = DecodeStep.build(self._layout, newest, len(rows.lengths))
        token_ids = rows.tokens[np.arange(rows.count), newest]
        positions = self._prompt_lengths[rows.prompt_slots[live]] + newest
        self._append_tokens(
            0, self._forward(self._tensor(token_ids), self._tensor(positions), None, self._cache)
        )

    def _append_tokens(self, first_row: int, logits: torch.Tensor) -> None:
        """Sample one token for each row from `first_row` on, logits [R - first_row, V]; rows that end
        leave.
        """
        rows = self._rows
        new = np.arange(first_row, rows.count)
        uniforms = torch.from_numpy(draw_uniforms(rows.keys[new], rows.lengths[new])).to(logits.device)
        sampled, logprobs = (
            result.cpu().numpy() for result in sample_tokens(logits, uniforms, self._sampling)
        )
        if not np.isfinite(logprobs).all():
            row = int(new[~np.isfinite(logprobs)][0])
            raise EngineError(
                f"prompt {rows.prompt_ids[row]}: the logits after token {rows.lengths[row]} "
                "of a completion are not finite"
            )
        rows.tokens[new, rows.lengths[new]] = sampled
        rows.logprobs[new, rows.lengths[new]] = logprobs
        rows.lengths[new] += 1
        stopped = self._stop_rule.ends(rows.tokens[new], rows.lengths[new])
        ended = stopped | (rows.lengths[new] >= self._sampling.max_new_tokens)
        for row, by_stop in sorted(zip(new[ended].tolist(), stopped[ended], strict=True), reverse=True):
            self._finish(row, "stop" if by_stop else "length")

    def _finish(self, row: int, reason: FinishReason) -> None:
        """Hand `row` over; the last row takes its place, and the last prompt that of a prompt without
        rows.
        """
        rows, slot = self._rows, int(self._rows.prompt_slots[row])
        self._on_row(rows.decoded(row, reason))
        last = rows.count - 1
        if row != last:
            self._cache.completions.move(last, row, int(rows.lengths[last]))
        rows.remove(row)
        self._layout = None
        if slot in rows.prompt_slots[: rows.count]:
            return
        last_slot = len(self._prompt_lengths) - 1
        if slot != last_slot:
            self._cache.prompts.move(last_slot, slot, int(self._prompt_lengths[last_slot]))
            self._prompt_lengths[slot] = self._prompt_lengths[last_slot]
            rows.prompt_slots[: rows.count][rows.prompt_slots[: rows.count] == last_slot] = slot
        self._prompt_lengths = self._prompt_lengths[:last_slot]

    def _abort_rest(self) -> None:
        while self._rows.count:
            self._finish(self._rows.count - 1, "abort")
        nothing = np.zeros(0)
        for request in self._waiting:
            for order in request.order:
                self._on_row(DecodedRow(order, nothing.astype(np.int64), nothing.astype(np.float32), "abort"))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class _Rows:
    """Arrays over rows; the first `count` entries of each are live."""

    def __init__(self, capacity: int, sampling: SamplingParams):
        self.count = 0
        self._sampling = sampling
        self.orders = np.zeros(capacity, dtype=np.int64)
        self.prompt_ids = np.zeros(capacity, dtype=np.int64)
        self.prompt_slots = np.zeros(capacity, dtype=np.int64)
        self.lengths = np.zeros(capacity, dtype=np.int64)  # tokens sampled so far
        self.keys = np.zeros(capacity, dtype=np.uint64)
        self.tokens = np.zeros((capacity, sampling.max_new_tokens), dtype=np.int64)
        self.logprobs = np.zeros((capacity, sampling.max_new_tokens), dtype=np.float32)

    def add(self, request: RowRequest, prompt_slot: int) -> None:
        size = len(request.order)
        new = slice(self.count, self.count + size)
        self.orders[new] = request.order
        self.prompt_ids[new] = request.prompt.id
        self.prompt_slots[new] = prompt_slot
        self.lengths[new] = 0
        self.keys[new] = row_keys(
            self._sampling.seed, self._sampling.step, [request.prompt.id] * size, request.completion_indices
        )
        self.count += size

    def remove(self, row: int) -> None:
        self.count -= 1
        for array in (
            self.orders,
            self.prompt_ids,
            self.prompt_slots,
            self.lengths,
            self.keys,
            self.tokens,
            self.logprobs,
        ):
            array[row] = array[self.count]

    def decoded(self, row: int, reason: FinishReason) -> DecodedRow:
        length = int(self.lengths[row])
        return DecodedRow(
            int(self.orders[row]),
            self.tokens[row, :length].copy(),
            self.logprobs[row, :length].copy(),
            reason,
        )
