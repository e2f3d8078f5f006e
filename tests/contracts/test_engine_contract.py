"""What every rollout engine must do, whichever it is. An engine whose package is not installed is skipped.

The reference for log-probs is a float32 transformers forward over prompt + completion (teacher forcing): 2e-5 is some ten times the
rounding of two such forwards of a tiny model, and a hundredth of what one wrong position or a stale weight shifts.
"""

import importlib.util
import threading
import time

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from megagrpo.config.schema import EngineConfig
from megagrpo.errors import UserError
from megagrpo.rollout.engines import ENGINES
from megagrpo.rollout.engines.base import EngineError
from megagrpo.types import Prompt, SamplingParams

TOLERANCE = 2e-5
PACKAGES = {"transformers": "transformers"}
PROMPTS = ["1+2=", "hello there, you", "a", "xyz 1234"]


@pytest.fixture(params=ENGINES.names())
def build(request, tiny_hf_folder):
    """A function (family, config, **options) -> an engine, closed after the test."""
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{PACKAGES[request.param]} is not installed")
    built = []

    def build(family="qwen3", config=None, **options):
        built.append(ENGINES.get(request.param)(tiny_hf_folder(family), config or EngineConfig(), **options))
        return built[-1]

    yield build
    for engine in built:
        engine.close()


@pytest.fixture
def prompts(character_tokenizer):
    return [Prompt(id=10 + i, text=text, token_ids=tuple(character_tokenizer(text)["input_ids"])) for i, text in enumerate(PROMPTS)]


def weights(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def publish(engine, model, version):
    engine.begin_update(version)
    tensors = weights(model)
    engine.load(tensors[:3])
    engine.load(iter(tensors[3:]))
    engine.commit_update(version)


@pytest.fixture
def model(tiny_model):
    return tiny_model()


@pytest.fixture
def other_model(tiny_model):
    """A model of the same shape with other weights."""
    model = tiny_model()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.mul_(0.8)
    return model


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


def assert_logprobs_match(model, prompts, groups, **sampling):
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected, _ = teacher_forced(model, prompt, completion, **sampling)
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)


def tokens(groups):
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


def test_nothing_is_generated_before_the_first_commit(build, prompts):
    engine = build()
    assert engine.weight_version is None and not engine.health().ready
    with pytest.raises(EngineError, match="no weights were committed"):
        engine.generate(prompts, params(), range(2))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.3}, {"top_k": 9, "top_p": 0.6}]
)
def test_logprobs_are_those_of_the_sampling_distribution(build, prompts, sampling, model):
    engine = build()
    publish(engine, model, version=1)
    groups = engine.generate(prompts, params(**sampling), range(4))
    assert_logprobs_match(model, prompts, groups, **sampling)
    assert len({tuple(completion.token_ids) for completion in groups[0]}) > 1  # sampled, not greedy


def test_completions_carry_what_the_trainer_needs(build, prompts, character_tokenizer, model):
    engine = build()
    publish(engine, model, version=7)
    groups = engine.generate(prompts, params(), [2, 5])
    assert [[(c.prompt_id, c.index) for c in group] for group in groups] == [[(p.id, 2), (p.id, 5)] for p in prompts]
    for completion in (completion for group in groups for completion in group):
        assert completion.token_ids.dtype == np.int64 and completion.logprobs.dtype == np.float32
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 12
        assert completion.weight_versions == ((0, 7),)
        assert completion.text == character_tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 2)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 12


def test_no_prompts_give_no_completions(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    assert engine.generate([], params(), range(2)) == []
    assert engine.generate(prompts[:2], params(), []) == [[], []]


def test_a_completion_does_not_depend_on_what_is_generated_beside_it(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    together = tokens(engine.generate(prompts, params(), range(4)))
    reordered = tokens(engine.generate(prompts[::-1], params(), [3, 1]))
    assert reordered == [[group[3], group[1]] for group in together[::-1]]
    assert tokens(engine.generate(prompts[2:3], params(), [2])) == [[together[2][2]]]
    small = build(config=EngineConfig(max_batch_completions=3, max_prefill_tokens=6))
    publish(small, model, version=1)
    assert tokens(small.generate(prompts, params(), range(4))) == together


@pytest.mark.parametrize("changed", [{"seed": 2}, {"step": 4}])
def test_seed_and_step_change_the_samples(build, prompts, changed, model):
    engine = build()
    publish(engine, model, version=1)
    assert tokens(engine.generate(prompts, params(), range(2))) != tokens(engine.generate(prompts, params(**changed), range(2)))


def test_greedy_completions_equal_transformers_generate(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    groups = engine.generate(prompts, params(temperature=0.0), [0])
    assert_logprobs_match(model, prompts, groups)
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        expected = model.generate(torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=12)[0, len(prompt.token_ids) :]
        assert completion.token_ids.tolist() == expected.tolist()


def test_stop_strings_and_stop_tokens_end_a_completion_with_the_token_that_completes_them(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    free = engine.generate(prompts, params(max_new_tokens=30), range(4))
    longest = max((completion for group in free for completion in group), key=lambda completion: len(completion.text))
    pair, single = longest.text[3:5], int(longest.token_ids[6])
    for group, stopped in zip(free, engine.generate(prompts, params(max_new_tokens=30, stop=(pair,)), range(4)), strict=True):
        for whole, cut in zip(group, stopped, strict=True):
            at = whole.text.find(pair)
            length = at + 2 if at >= 0 else len(whole.token_ids)  # one character per token
            assert cut.token_ids.tolist() == whole.token_ids[:length].tolist()
            assert cut.finish_reason == ("stop" if at >= 0 else whole.finish_reason)
    for group, stopped in zip(free, engine.generate(prompts, params(max_new_tokens=30, stop_token_ids=(single,)), range(4)), strict=True):
        for whole, cut in zip(group, stopped, strict=True):
            found = np.flatnonzero(whole.token_ids == single)
            length = found[0] + 1 if len(found) else len(whole.token_ids)
            assert cut.token_ids.tolist() == whole.token_ids[:length].tolist()


def test_a_commit_replaces_every_weight_and_drops_what_was_cached(build, prompts, model, other_model):
    engine = build()
    publish(engine, model, version=1)
    engine.generate(prompts, params(), range(2))
    publish(engine, other_model, version=2)
    assert engine.weight_version == 2
    groups = engine.generate(prompts, params(), range(2))
    assert_logprobs_match(other_model, prompts, groups)
    assert groups[0][0].weight_versions == ((0, 2),)


def assert_serves_only_the_old_version_or_nothing(engine, prompts, old_model, old_version):
    try:
        groups = engine.generate(prompts, params(), range(2))
    except EngineError:
        return
    assert groups[0][0].weight_versions == ((0, old_version),)
    assert_logprobs_match(old_model, prompts, groups)


def test_an_open_or_aborted_update_never_serves_a_mixture(build, prompts, model, other_model):
    engine = build()
    publish(engine, model, version=1)
    engine.begin_update(2)
    engine.load(weights(other_model)[:4])
    assert_serves_only_the_old_version_or_nothing(engine, prompts, model, 1)
    engine.abort_update()
    assert engine.weight_version in (1, None)
    assert engine.health().ready == (engine.weight_version == 1)
    assert_serves_only_the_old_version_or_nothing(engine, prompts, model, 1)
    publish(engine, other_model, version=2)  # the same version may be tried again
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))


def test_an_update_aborted_before_any_tensor_keeps_the_old_version(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    engine.begin_update(2)
    engine.abort_update()
    assert engine.weight_version == 1
    assert_logprobs_match(model, prompts, engine.generate(prompts, params(), range(2)))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": tensors[NAME]}), "layers.9.mlp.up_proj.*no such"),
        (lambda tensors: tensors.pop(NAME), rf"missing: {NAME}"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].T}), rf"{NAME}.*shape \(32, 48\), the model's is \(48, 32\)"),
        (lambda tensors: tensors[NAME].view(-1)[5:6].fill_(torch.nan), rf"{NAME}.*not finite"),
        (lambda tensors: tensors[NAME].view(-1)[5:6].fill_(-torch.inf), rf"{NAME}.*not finite"),
    ],
)
def test_a_wrong_tensor_is_named_and_its_update_never_serves(build, prompts, spoil, message, model, other_model):
    engine = build()
    publish(engine, model, version=1)
    tensors = {name: tensor.clone() for name, tensor in weights(other_model)}
    spoil(tensors)
    engine.begin_update(2)
    with pytest.raises(EngineError, match=message):
        engine.load(tensors.items())
        engine.commit_update(2)
    engine.abort_update()
    assert_serves_only_the_old_version_or_nothing(engine, prompts, model, 1)
    publish(engine, other_model, version=3)
    assert engine.health().ready and engine.weight_version == 3


def test_a_tensor_that_comes_twice_is_an_error(build, model):
    engine = build()
    engine.begin_update(1)
    engine.load(weights(model)[:2])
    with pytest.raises(EngineError, match="twice"):
        engine.load(weights(model)[1:])


def test_versions_only_grow_and_transactions_do_not_nest(build, model):
    engine = build()
    with pytest.raises(EngineError, match="no weight update is open"):
        engine.load([])
    publish(engine, model, version=5)
    for version in (5, 4):
        with pytest.raises(EngineError, match=f"version {version} is not above version 5"):
            engine.begin_update(version)
    with pytest.raises(EngineError, match="no update"):
        engine.commit_update(6)
    engine.begin_update(6)
    with pytest.raises(EngineError, match="still open"):
        engine.begin_update(7)
    engine.load(weights(model))
    with pytest.raises(EngineError, match="one to 6"):
        engine.commit_update(7)
    engine.commit_update(6)
    assert engine.weight_version == 6


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "prompt 3: has no tokens"),
        ((5, 49), "prompt 3: token ids must lie in 0 to 48"),
        ((5,) * 117, r"prompt 3: 117 tokens \+ 12 .* 128"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(build, token_ids, message, model):
    engine = build()
    publish(engine, model, version=1)
    with pytest.raises(UserError, match=message):
        engine.generate([Prompt(3, "", token_ids)], params(), range(2))
    full = engine.generate([Prompt(3, "", (5,) * 116)], params(), [0])[0][0]  # 116 + 12 just fits the context of 128
    assert len(full.token_ids) >= 1


def test_weights_survive_sleep(build, prompts, model, other_model):
    engine = build()
    publish(engine, model, version=1)
    before = tokens(engine.generate(prompts, params(), range(2)))
    engine.sleep()
    assert not engine.health().ready
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(prompts, params(), range(2))
    with pytest.raises(EngineError, match="asleep"):
        engine.begin_update(2)
    engine.wake()
    assert tokens(engine.generate(prompts, params(), range(2))) == before
    publish(engine, other_model, version=2)
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))


def test_an_abort_returns_what_there_is(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    whole = tokens(engine.generate(prompts, params(max_new_tokens=100), range(64)))
    result = []
    thread = threading.Thread(target=lambda: result.append(engine.generate(prompts, params(max_new_tokens=100), range(64))))
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        engine.abort()
    reasons = [completion.finish_reason for group in result[0] for completion in group]
    assert "abort" in reasons and len(reasons) == 256
    for group, complete in zip(tokens(result[0]), whole, strict=True):
        assert all(cut == full[: len(cut)] for cut, full in zip(group, complete, strict=True))
    assert tokens(engine.generate(prompts, params(max_new_tokens=100), range(64))) == whole  # and the next call is whole again


def test_a_closed_engine_refuses_everything_but_health_and_close(build, prompts, model):
    engine = build()
    publish(engine, model, version=1)
    engine.close()
    engine.close()
    assert engine.health().state == "closed" and not engine.health().ready
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompts, params(), range(2))
    with pytest.raises(EngineError, match="closed"):
        engine.begin_update(2)
