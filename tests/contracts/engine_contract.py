"""What the suites of the engine contract share.

The reference for log-probs is a float32 transformers forward over prompt + completion (teacher forcing): 2e-5
is some ten times the rounding of two such forwards of a tiny model, and a hundredth of what one wrong
position or a stale weight shifts.
"""

import numpy as np
import pytest
import torch
from bucket_files import load
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from megagrpo.engines import ENGINES
from megagrpo.types import SamplingParams

TOLERANCE = 2e-5

# A server costs half a minute to start: those engines are marked, and all tests share one server, each with a
# client of its own.
SERVER_MARKS = (pytest.mark.engines, pytest.mark.timeout(900))
EMBEDDED_NAMES = [name for name in ENGINES.names() if ENGINES.get(name).is_embedded]
SERVER_NAMES = [
    pytest.param(name, marks=SERVER_MARKS) for name in ENGINES.names() if name not in EMBEDDED_NAMES
]
servers = pytest.mark.parametrize("build_engine", SERVER_NAMES, indirect=True)
server_names = pytest.mark.parametrize("name", SERVER_NAMES)


def weights(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def publish(engine, model, version):
    engine.begin_update(version)
    tensors = weights(model)
    load(engine, tensors[:3])
    load(engine, iter(tensors[3:]))
    engine.commit_update(version)


def params(**fields):
    return SamplingParams(**({"max_new_tokens": 12, "seed": 1, "step": 3} | fields))


def teacher_forced(model, prompt, completion, temperature=1.0, top_k=0, top_p=1.0):
    """Return (log-probs [L], logits / temperature [L, V]) of the completion's tokens."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(prompt.token_ids) - 1 : -1] / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.log_softmax(-1).gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0], scores


def assert_logprobs_match(model, prompts, groups, tolerance=TOLERANCE, **sampling):
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected, _ = teacher_forced(model, prompt, completion, **sampling)
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=tolerance, rtol=0)


def tokens(groups):
    return [[completion.token_ids.tolist() for completion in group] for group in groups]
