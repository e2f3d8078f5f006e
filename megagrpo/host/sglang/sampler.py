"""Sampling by counters inside SGLang: the tokens and log-probs that the embedded engine would give.

SGLang 0.5.23 honours a request's sampling_seed in its deterministic mode only, which needs a Triton kernel
(so CUDA) and certain attention backends; and its log-probs are over the whole vocabulary even where top-k or
top-p removed tokens. A sampler can be
registered: this one draws with the functions of megagrpo/wire/counter_sampling.py.

A request's `sampling_seed` is the key of its completion's stream of uniforms (`row_keys`, as a signed 64-bit
integer). A greedy request has none. A sampled request without one gets a random key.
"""

import secrets
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from megagrpo.host.sglang.sample_rows import sample_rows


def install() -> None:
    """Make every scheduler of this server sample by counters."""
    # Under this name because SGLang insists on it for CPUs; a registered sampler comes before the one built
    # in.
    register_sampler_backend("pytorch", CounterSampler)
    build = SamplingBatchInfo.from_schedule_batch.__func__

    def build_with_keys(cls: type, batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info = build(cls, batch, vocab_size)
        # The rows of this field follow their requests when batches are filtered and merged, which is why it
        # carries all that is needed.
        info.sampling_seed = (
            torch.tensor([_columns(request) for request in batch.reqs], dtype=torch.int64)
            .reshape(-1, 3)
            .to(batch.device)
        )
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(build_with_keys)


def _columns(request: Any) -> tuple[int, int, int]:
    """The request's row of `draws` (counter_sampling.sample_rows).

    SGLang turns temperature 0 into top_k 1 at temperature 1; only the missing seed tells the two apart.
    """
    params = request.sampling_params
    greedy = params.top_k == 1 and params.sampling_seed is None
    key = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    return key, len(request.origin_input_ids), greedy


class CounterSampler(Sampler):
    """Draws each row's token from (its key, its place in the completion, its distribution) alone."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """See Sampler.forward; `positions` [R] are those of the last input tokens."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        info = sampling_info
        tokens, logprobs = sample_rows(
            logits, positions, info.sampling_seed, info.temperatures.flatten(), info.top_ks, info.top_ps
        )
        if return_logprob:
            # for other clients: ours asks for neither
            if any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs):
                scores = torch.log_softmax(logits.float() / sampling_info.temperatures, dim=-1)
                extras = self.output_logprob_processor.compute_logprobs(
                    scores, top_logprobs_nums, token_ids_logprobs, tokens
                )
                extras.write_output_to(logits_output)
            logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens
