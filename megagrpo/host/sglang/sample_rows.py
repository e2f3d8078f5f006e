"""Sampling by counters for a batch of requests that differ in how they sample; numpy and torch only."""

from types import SimpleNamespace

import numpy as np
import torch

from megagrpo.wire.counter_sampling import draw_uniforms, sample_tokens

_KEY, _PROMPT_TOKENS, _GREEDY = 0, 1, 2  # columns of `draws`


def sample_rows(
    logits: torch.Tensor,
    positions: torch.Tensor,
    draws: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens int32 [R], log-probs float32 [R]); rows that sample alike are drawn together.

    Args:
        logits: [R, V].
        positions: int64 [R], of the last input token in its sequence.
        draws: int64 [R, 3]: the key of the row's stream of uniforms (`row_keys`, as a signed integer), the
            tokens of its prompt, and whether it is greedy.
        temperatures, top_ks, top_ps: [R]; a greedy row's are not looked at. A top_k of the vocabulary or more
            keeps all of it.
    """
    columns = draws.cpu().numpy()
    # tokens that the completion has already
    drawn = positions.cpu().numpy().astype(np.int64) + 1 - columns[:, _PROMPT_TOKENS]
    uniforms = torch.from_numpy(draw_uniforms(columns[:, _KEY].astype(np.uint64), drawn)).to(logits.device)
    kinds = list(
        zip(
            temperatures.tolist(), top_ks.tolist(), top_ps.tolist(), columns[:, _GREEDY].tolist(), strict=True
        )
    )
    tokens = torch.empty(len(kinds), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(kinds), dtype=torch.float32, device=logits.device)
    for kind in dict.fromkeys(kinds):
        temperature, top_k, top_p, greedy = kind
        params = SimpleNamespace(temperature=0.0 if greedy else temperature, top_k=top_k, top_p=top_p)
        rows = torch.tensor([row for row, other in enumerate(kinds) if other == kind], device=logits.device)
        alike = logits if len(rows) == len(kinds) else logits[rows]  # the usual case: nothing is copied
        drawn_tokens, drawn_logprobs = sample_tokens(alike, uniforms[rows], params)
        tokens[rows], logprobs[rows] = drawn_tokens.to(torch.int32), drawn_logprobs
    return tokens, logprobs
