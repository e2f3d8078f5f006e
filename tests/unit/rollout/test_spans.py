"""Completions of several spans: what readers see of them, what ranks tell each other, what a checkpoint and a
scorer get.
"""

import numpy as np
import pytest

from megagrpo.parallel.plain_data import decode, encode
from megagrpo.rewards.messages import Request, decode_request, encode_request
from megagrpo.rollout import in_flight
from megagrpo.rollout.in_flight import ScoredCompletions, describe_share, pack_share, read_shares
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import Completion, Prompt, Reward, Span

CALL = Span(np.array([10, 11]), np.array([-0.5, -0.25], np.float32), weight_version=3)
ANSWER = Span(np.array([20, 21, 22]), None, weight_version=4, is_trained=False)
CONCLUSION = Span(np.array([12]), np.array([-1.5], np.float32), weight_version=5)
WITH_TOOL = Completion(7, 1, (CALL, ANSWER, CONCLUSION), "stop", "call answer conclusion")


def same(one: Completion, other: Completion) -> bool:
    return (one.prompt_id, one.index, one.finish_reason, one.text) == (
        other.prompt_id,
        other.index,
        other.finish_reason,
        other.text,
    ) and all(
        (a.weight_version, a.is_trained, a.token_ids.tolist())
        == (b.weight_version, b.is_trained, b.token_ids.tolist())
        and (a.logprobs is None) == (b.logprobs is None)
        and (a.logprobs is None or a.logprobs.tobytes() == b.logprobs.tobytes())
        for a, b in zip(one.spans, other.spans, strict=True)
    )


def record_of(*completions: Completion, finish_reason: str = "stop"):
    shared = {(0, place): completion for place, completion in enumerate(completions)}
    share = ScoredCompletions(shared, {key: Reward(1.0) for key in shared})
    told = decode(encode(describe_share(share, rank=0)))
    return {record.key: record for record in told.records}


def test_readers_see_the_spans_joined():
    assert WITH_TOOL.token_ids.tolist() == [10, 11, 20, 21, 22, 12]
    assert WITH_TOOL.logprobs.tolist() == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.5]
    assert WITH_TOOL.logprobs.dtype == np.float32
    assert WITH_TOOL.weight_versions == ((0, 3), (2, 4), (5, 5))
    assert WITH_TOOL.untrained == ((2, 5),)


def test_a_sampled_completion_has_a_span_for_each_weight_version():
    tokens, logprobs = np.arange(5), np.full(5, -0.5, np.float32)
    completion = Completion.sampled(0, 0, tokens, logprobs, "stop", ((0, 6), (2, 7)), "")
    assert [(span.token_ids.tolist(), span.weight_version) for span in completion.spans] == [
        ([0, 1], 6),
        ([2, 3, 4], 7),
    ]
    assert completion.weight_versions == ((0, 6), (2, 7)) and completion.untrained == ()


@pytest.mark.parametrize(
    ("logprobs", "is_trained", "message"),
    [
        (None, True, "a span without log-probs can't be trained"),
        (np.zeros(2, np.float32), True, "a span of 3 tokens has 2 log-probs"),
        (np.zeros(2, np.float32), False, "a span of 3 tokens has 2 log-probs"),
    ],
)
def test_a_span_that_cannot_be_is_refused(logprobs, is_trained, message):
    with pytest.raises(ValueError, match=message):
        Span(np.arange(3), logprobs, 0, is_trained)


def test_ranks_learn_what_of_a_completion_is_trained_and_how_old_that_is():
    """The answer of the tool came under version 4, the oldest tokens that train under 3."""
    old_answer = Completion(7, 0, (Span(np.array([9]), None, 1, is_trained=False), CALL), "stop", "")
    records = record_of(WITH_TOOL, old_answer)
    assert (records[0, 0].length, records[0, 0].trained_tokens) == (6, 3)
    assert records[0, 0].untrained == ((2, 5),)
    assert [records[0, place].weight_version for place in (0, 1)] == [3, 3]


def test_a_completion_without_a_trained_token_is_not_valid():
    nothing = Completion(7, 1, (ANSWER,), "stop", "")
    records = record_of(WITH_TOOL, nothing)
    rollouts = StepRollouts([Prompt(7, "", (1,))], records, {}, completions_per_prompt=2)
    assert rollouts.valid.tolist() == [[True, False]]
    assert rollouts.field_matrix("trained_tokens").tolist() == [[3.0, 0.0]]
    assert rollouts.field_matrix("length").tolist() == [[6.0, 3.0]]


def test_a_checkpoint_keeps_the_spans(tmp_path):
    unscored = Span(np.array([4]), np.array([-2.0], np.float32), 5, is_trained=False)
    empty = Completion.sampled(8, 0, np.zeros(0, int), np.zeros(0, np.float32), "abort", ((0, 2),), "")
    completions = {
        (0, 0): WITH_TOOL,
        (0, 1): Completion(7, 2, (unscored, CALL), "length", ""),
        (1, 0): empty,
    }
    rewards = {key: Reward(float(number)) for number, key in enumerate(completions)}
    path = tmp_path / in_flight.file_name(0)
    path.parent.mkdir()
    path.write_bytes(pack_share(ScoredCompletions(completions, rewards)))
    read = read_shares(tmp_path, num_files=1, rank=0, world_size=1)
    assert read.rewards == rewards
    assert all(same(read.completions[key], completions[key]) for key in completions)


def test_a_scorer_gets_the_spans():
    prompt = Prompt(7, "question", (1, 2))
    request = decode_request(encode_request(Request(0, [prompt], [WITH_TOOL])))
    assert same(request.completions[0], WITH_TOOL)
