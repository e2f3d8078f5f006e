"""A server's batch of unlike requests draws, row by row, what the embedded engine's sampling draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megagrpo.host.sglang.sample_rows import sample_rows
from megagrpo.types import SamplingParams
from megagrpo.wire import counter_sampling as sampling

VOCABULARY = 61
WHOLE = 1 << 30  # how SGLang writes "no top-k"
KINDS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.7),
    SamplingParams(1, top_k=5),
    SamplingParams(1, top_k=1),
    SamplingParams(1, temperature=1.3, top_p=0.6),
    SamplingParams(1, temperature=0.0),
]


def test_every_row_of_a_mixed_batch_is_drawn_as_if_it_were_alone():
    generator = torch.Generator().manual_seed(3)
    kinds = [KINDS[place % len(KINDS)] for place in range(48)]
    logits = torch.randn(len(kinds), VOCABULARY, generator=generator) * 3
    prompt_tokens = torch.randint(1, 9, (len(kinds),), generator=generator)
    place = torch.randint(0, 5, (len(kinds),), generator=generator)
    keys = sampling.row_keys(7, 2, range(len(kinds)), [4] * len(kinds))
    assert (keys >> np.uint64(63)).any()  # some are negative as signed integers

    draws = torch.stack(
        [
            torch.from_numpy(keys.view(np.int64)),
            prompt_tokens,
            torch.tensor([k.temperature == 0 for k in kinds]),
        ],
        dim=1,
    )
    settings = (
        # SGLang's form of a greedy request: top_k 1 at temperature 1
        torch.tensor([kind.temperature or 1.0 for kind in kinds]),
        torch.tensor([1 if kind.temperature == 0 else kind.top_k or WHOLE for kind in kinds]),
        torch.tensor([kind.top_p for kind in kinds]),
    )
    tokens, logprobs = sample_rows(logits, prompt_tokens + place - 1, draws, *settings)
    for row, kind in enumerate(kinds):
        uniforms = torch.from_numpy(sampling.draw_uniforms(keys[row : row + 1], place[row : row + 1].numpy()))
        expected = sampling.sample_tokens(logits[row : row + 1], uniforms, replace(kind, max_new_tokens=1))
        assert tokens[row] == expected[0][0]
        # temperatures pass as float32
        np.testing.assert_allclose(logprobs[row], expected[1][0], atol=1e-6, rtol=0)


def test_only_the_greedy_row_of_two_with_top_k_1_has_a_log_prob_at_temperature_1():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(2, 1)
    draws = torch.tensor([[5, 3, 0], [5, 3, 1]])
    halves = torch.full((2,), 0.5)
    tokens, logprobs = sample_rows(
        logits, torch.tensor([2, 2]), draws, halves, torch.ones(2, dtype=torch.int32), torch.ones(2)
    )
    assert tokens.tolist() == [2, 2]
    whole = [
        scaled[2] - np.log(np.exp(scaled).sum()) for scaled in (np.array([0, 2, 4]), np.array([0, 1, 2]))
    ]
    np.testing.assert_allclose(logprobs, whole, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_a_uniform_batch_is_not_copied(count, monkeypatch):
    seen = []
    monkeypatch.setattr(sampling, "filter_scores", lambda scores, *_: seen.append(scores) or scores)
    logits = torch.randn(count, VOCABULARY)
    whole = torch.full((count,), WHOLE)
    sample_rows(
        logits,
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, 3, dtype=torch.int64),
        torch.ones(count),
        whole,
        torch.ones(count),
    )
    assert seen[0].data_ptr() == logits.data_ptr()
