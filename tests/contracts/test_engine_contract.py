"""What every rollout engine must do when it generates. An engine whose package is not installed is
skipped.
"""

import threading
import time

import numpy as np
import pytest
import torch
from engine_contract import assert_logprobs_match, params, publish, teacher_forced, tokens

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines.base import EngineError
from megagrpo.errors import UserError
from megagrpo.types import Prompt


def test_nothing_is_generated_before_the_first_commit(build_engine, prompts):
    engine = build_engine()
    assert engine.weight_version is None and not engine.health().ready
    with pytest.raises(EngineError, match="no weights were committed"):
        engine.generate(prompts, params(), range(2))


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.3}, {"top_k": 9, "top_p": 0.6}],
)
def test_logprobs_are_at_the_sampling_temperature_over_the_whole_vocabulary(
    build_engine, prompts, sampling, model, request
):
    """But for vLLM's, which are over what top-k and top-p kept."""
    engine = build_engine()
    publish(engine, model, version=1)
    groups = engine.generate(prompts, params(**sampling), range(4))
    is_vllm = request.node.callspec.params.get("build_engine") == "vllm"
    whole = {name: value for name, value in sampling.items() if name == "temperature"}
    assert_logprobs_match(model, prompts, groups, **(sampling if is_vllm else whole))
    for prompt, group in zip(prompts, groups, strict=True):  # and each token is one that was kept
        for completion in group:
            expected, _ = teacher_forced(model, prompt, completion, **sampling)
            assert torch.isfinite(expected).all()
    assert len({tuple(completion.token_ids) for completion in groups[0]}) > 1  # sampled, not greedy


def test_completions_carry_what_the_trainer_needs(build_engine, prompts, character_tokenizer, model):
    engine = build_engine()
    publish(engine, model, version=7)
    groups = engine.generate(prompts, params(), [2, 5])
    assert [[(c.prompt_id, c.index) for c in group] for group in groups] == [
        [(p.id, 2), (p.id, 5)] for p in prompts
    ]
    for completion in (completion for group in groups for completion in group):
        assert completion.token_ids.dtype == np.int64 and completion.logprobs.dtype == np.float32
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 12
        assert completion.weight_versions == ((0, 7),)
        assert completion.text == character_tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 2)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 12


def test_no_prompts_give_no_completions(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    assert engine.generate([], params(), range(2)) == []
    assert engine.generate(prompts[:2], params(), []) == [[], []]


def test_a_completion_does_not_depend_on_what_is_generated_beside_it(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    together = tokens(engine.generate(prompts, params(), range(4)))
    reordered = tokens(engine.generate(prompts[::-1], params(), [3, 1]))
    assert reordered == [[group[3], group[1]] for group in together[::-1]]
    assert tokens(engine.generate(prompts[2:3], params(), [2])) == [[together[2][2]]]
    small = build_engine(config=build_engine_config(max_batch_completions=3, max_prefill_tokens=6))
    publish(small, model, version=1)
    assert tokens(small.generate(prompts, params(), range(4))) == together


@pytest.mark.parametrize("changed", [{"seed": 2}, {"step": 4}])
def test_seed_and_step_change_the_samples(build_engine, prompts, changed, model):
    engine = build_engine()
    publish(engine, model, version=1)
    assert tokens(engine.generate(prompts, params(), range(2))) != tokens(
        engine.generate(prompts, params(**changed), range(2))
    )


def test_greedy_completions_equal_transformers_generate(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    groups = engine.generate(prompts, params(temperature=0.0), [0])
    assert_logprobs_match(model, prompts, groups)
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        expected = model.generate(torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=12)[
            0, len(prompt.token_ids) :
        ]
        assert completion.token_ids.tolist() == expected.tolist()


def test_stop_strings_and_stop_tokens_end_a_completion_with_the_token_that_completes_them(
    build_engine, prompts, model
):
    engine = build_engine()
    publish(engine, model, version=1)
    free = engine.generate(prompts, params(max_new_tokens=30), range(4))
    longest = max(
        (completion for group in free for completion in group), key=lambda completion: len(completion.text)
    )
    pair, single = longest.text[3:5], int(longest.token_ids[6])
    for group, stopped in zip(
        free, engine.generate(prompts, params(max_new_tokens=30, stop=(pair,)), range(4)), strict=True
    ):
        for whole, cut in zip(group, stopped, strict=True):
            at = whole.text.find(pair)
            length = at + 2 if at >= 0 else len(whole.token_ids)  # one character per token
            assert cut.token_ids.tolist() == whole.token_ids[:length].tolist()
            assert cut.finish_reason == ("stop" if at >= 0 else whole.finish_reason)
    for group, stopped in zip(
        free,
        engine.generate(prompts, params(max_new_tokens=30, stop_token_ids=(single,)), range(4)),
        strict=True,
    ):
        for whole, cut in zip(group, stopped, strict=True):
            found = np.flatnonzero(whole.token_ids == single)
            length = found[0] + 1 if len(found) else len(whole.token_ids)
            assert cut.token_ids.tolist() == whole.token_ids[:length].tolist()


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "prompt 3: has no tokens"),
        ((5, 49), "prompt 3: token ids must lie in 0 to 48"),
        ((5,) * 117, r"prompt 3: 117 tokens \+ 12 .* 128"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(build_engine, token_ids, message, model):
    engine = build_engine()
    publish(engine, model, version=1)
    with pytest.raises(UserError, match=message):
        engine.generate([Prompt(3, "", token_ids)], params(), range(2))
    # 116 + 12 just fits the context of 128
    full = engine.generate([Prompt(3, "", (5,) * 116)], params(), [0])[0][0]
    assert len(full.token_ids) >= 1


def test_an_abort_returns_what_there_is(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    whole = tokens(engine.generate(prompts, params(max_new_tokens=100), range(64)))
    result = []
    thread = threading.Thread(
        target=lambda: result.append(engine.generate(prompts, params(max_new_tokens=100), range(64)))
    )
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        engine.abort()
    reasons = [completion.finish_reason for group in result[0] for completion in group]
    assert "abort" in reasons and len(reasons) == 256
    for group, complete in zip(tokens(result[0]), whole, strict=True):
        assert all(cut == full[: len(cut)] for cut, full in zip(group, complete, strict=True))
    # and the next call is whole again
    assert tokens(engine.generate(prompts, params(max_new_tokens=100), range(64))) == whole


def test_every_group_is_handed_over_once_as_it_is_returned(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    handed: dict[int, list] = {}

    def on_group(position, completions):
        assert position not in handed
        handed[position] = completions

    groups = engine.generate(prompts, params(), [3, 0], on_group)
    assert [handed[position] for position in range(len(prompts))] == groups


def test_a_finished_group_is_handed_over_while_others_run(build_engine, prompts, model):
    """The first group that ends aborts the rest: there is nothing left to abort where groups come only
    when all have ended.
    """
    engine = build_engine(config=build_engine_config(max_batch_completions=2))
    publish(engine, model, version=1)
    handed = []

    def on_group(position, completions):
        handed.append(position)
        engine.abort()

    groups = engine.generate(prompts, params(max_new_tokens=40), range(2), on_group)
    reasons = [{completion.finish_reason for completion in groups[position]} for position in handed]
    assert "abort" not in reasons[0] and any("abort" in later for later in reasons[1:])
    assert sorted(handed) == list(range(len(prompts)))


def test_a_closed_engine_refuses_everything_but_health_and_close(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    engine.close()
    engine.close()
    assert engine.health().state == "closed" and not engine.health().ready
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompts, params(), range(2))
    with pytest.raises(EngineError, match="closed"):
        engine.begin_update(2)
