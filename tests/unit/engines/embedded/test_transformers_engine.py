"""Tests of what is special to the embedded engine: families, folders, batching and memory of the decode
loop.
"""

import json
import shutil
import threading

import numpy as np
import pytest
import torch

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines.base import EngineError
from megagrpo.engines.embedded.transformers_engine import TransformersEngine
from megagrpo.errors import UserError
from megagrpo.types import Prompt, SamplingParams

PROMPTS = ["12+3=", "hello there, you", "a", "xyz"]


@pytest.fixture
def prompts(character_tokenizer):
    return [Prompt(i, text, tuple(character_tokenizer(text)["input_ids"])) for i, text in enumerate(PROMPTS)]


def serving(folder, **config):
    return TransformersEngine(folder, build_engine_config(**config), load_weights=True)


def params(**fields):
    return SamplingParams(**({"max_new_tokens": 20, "seed": 3} | fields))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {}),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_teacher_forced_forward(
    tmp_path, tiny_model, character_tokenizer, prompts, family, overrides, temperature
):
    model = tiny_model(family, **overrides)
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path, build_engine_config(), character_tokenizer, load_weights=True)
    for prompt, group in zip(
        prompts, engine.generate(prompts, params(temperature=temperature), range(3)), strict=True
    ):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1] / temperature
            expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_load_under_the_names_of_the_checkpoint(
    tmp_path, tiny_model, character_tokenizer, prompts, family
):
    from safetensors.torch import load_file

    tiny_model(family, tie_word_embeddings=family == "llama").save_pretrained(tmp_path)
    from_folder = TransformersEngine(tmp_path, build_engine_config(), character_tokenizer, load_weights=True)
    loaded = TransformersEngine(tmp_path, build_engine_config(), character_tokenizer)
    loaded.begin_update(1)
    for bucket in load_file(tmp_path / "model.safetensors").items():
        loaded.load([bucket])
    loaded.commit_update(1)
    for expected, group in zip(
        from_folder.generate(prompts, params(), [0]), loaded.generate(prompts, params(), [0]), strict=True
    ):
        assert np.array_equal(expected[0].token_ids, group[0].token_ids)
        assert np.array_equal(expected[0].logprobs, group[0].logprobs)


def test_weights_from_the_folder_are_version_zero(tiny_hf_folder, prompts):
    engine = serving(tiny_hf_folder())
    assert engine.weight_version == 0
    with pytest.raises(EngineError, match="version 0 is not above version 0"):
        engine.begin_update(0)


def recorded_forwards(engine, monkeypatch):
    """Return a list that fills with (token ids, whether it is a prefill) of every forward of the engine."""
    calls, forward = [], engine._forward

    def recording(token_ids, positions, wanted, cache):
        calls.append((token_ids.tolist(), wanted is not None))
        return forward(token_ids, positions, wanted, cache)

    monkeypatch.setattr(engine, "_forward", recording)
    return calls


def test_every_prompt_is_prefilled_once_and_never_padded(tiny_hf_folder, prompts, monkeypatch):
    engine = serving(tiny_hf_folder(), max_batch_completions=8, max_prefill_tokens=18)
    calls = recorded_forwards(engine, monkeypatch)
    engine.generate(prompts, params(), range(4))
    prefills = [token_ids for token_ids, is_prefill in calls if is_prefill]
    assert [token for prefill in prefills for token in prefill] == [
        token for prompt in prompts for token in prompt.token_ids
    ]
    assert all(len(prefill) <= 18 for prefill in prefills)


def test_finished_rows_leave_and_waiting_ones_take_their_place(tiny_hf_folder, prompts, monkeypatch):
    engine = serving(tiny_hf_folder(), max_batch_completions=6)
    calls = recorded_forwards(engine, monkeypatch)
    groups = engine.generate(prompts, params(stop=("a", "1", "k", "z", "0")), range(3))
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    decoded = [len(token_ids) for token_ids, is_prefill in calls if not is_prefill]
    assert max(decoded) <= 6
    # the first token comes from the prefill, the last is never fed back
    assert sum(decoded) == sum(lengths) - len(lengths)
    assert len(set(lengths)) > 3


def test_more_completions_than_rows_are_served_in_parts(tiny_hf_folder, prompts):
    small, large = serving(tiny_hf_folder(), max_batch_completions=3), serving(tiny_hf_folder())
    expected = large.generate(prompts, params(), range(8))
    for got, group in zip(small.generate(prompts, params(), range(8)), expected, strict=True):
        assert [completion.token_ids.tolist() for completion in got] == [
            completion.token_ids.tolist() for completion in group
        ]


def test_logits_that_are_not_finite_name_the_prompt(tiny_hf_folder, prompts, monkeypatch):
    engine = serving(tiny_hf_folder())
    forward = engine._forward
    monkeypatch.setattr(
        engine, "_forward", lambda *inputs: forward(*inputs).index_fill(0, torch.tensor([1]), torch.nan)
    )
    with pytest.raises(
        EngineError, match="prompt 1: the logits after token 0 of a completion are not finite"
    ):
        engine.generate(prompts, params(), [0])


def test_end_tokens_are_the_union_of_what_the_folder_declares(tiny_hf_folder, tmp_path, prompts):
    folder = shutil.copytree(tiny_hf_folder(), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert serving(folder)._end_token_ids == {2, 5, 6}
    ends = {
        int(c.token_ids[-1])
        for g in serving(folder).generate(prompts, params(), range(8))
        for c in g
        if c.finish_reason == "stop"
    }
    assert ends and ends <= {2, 5, 6}


def broken(folder, tmp_path, name, change):
    copy = shutil.copytree(folder, tmp_path / "broken")
    change(copy / name)
    return copy


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shrink_one_tensor(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda path: path.unlink(), "no config.json"),
        ("config.json", lambda path: path.write_text("{"), "JSON"),
        ("model.safetensors", lambda path: path.unlink(), "model.safetensors"),
        ("model.safetensors", truncate, "SafetensorError"),
        ("model.safetensors", shrink_one_tensor, "1 tensors are missing or misshapen: model.norm.weight"),
    ],
)
def test_a_broken_folder_is_one_clear_line(tiny_hf_folder, tmp_path, name, change, message):
    folder = broken(tiny_hf_folder(), tmp_path, name, change)
    with pytest.raises(UserError, match=message) as caught:
        serving(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_sliding_window_attention_is_refused(tmp_path, tiny_model, character_tokenizer):
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    tiny_model("qwen2", **window).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layer_types: .*sliding_attention"):
        TransformersEngine(tmp_path, build_engine_config(), character_tokenizer)


def test_an_update_or_sleep_while_another_thread_generates_is_refused_and_nothing_is_mixed(
    tiny_hf_folder, prompts
):
    """The weights would be overwritten under the running completions, which claim one version."""
    engine = serving(tiny_hf_folder("qwen3"), max_batch_completions=2)
    whole = engine.generate(prompts, params(), range(2))
    is_generating, may_go_on, result = threading.Event(), threading.Event(), []

    def on_group(position, completions):
        is_generating.set()
        assert may_go_on.wait(60)

    thread = threading.Thread(
        target=lambda: result.append(engine.generate(prompts, params(), range(2), on_group))
    )
    thread.start()
    assert is_generating.wait(60)
    try:
        with pytest.raises(EngineError, match=r"weight version 1: an update can't begin: .* another thread"):
            engine.begin_update(1)
        with pytest.raises(EngineError, match=r"can't sleep: .* another thread"):
            engine.sleep()
    finally:
        may_go_on.set()
        thread.join(60)
    for group, expected in zip(result[0], whole, strict=True):
        for completion, same in zip(group, expected, strict=True):
            assert completion.token_ids.tolist() == same.token_ids.tolist()
            assert completion.weight_versions == ((0, 0),)
    engine.begin_update(1)  # nothing is generated any more
    engine.abort_update()
    assert engine.weight_version == 0
