"""Models that a server takes beside the suites' own: other families, tensor parallel, a pretrained one; what
it says where it knows no such model, or answers nowhere.

The servers are real ones; `make test-engines` runs this.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from bucket_files import load
from checkpoint_of_model import checkpoint_of
from engine_contract import (
    assert_logprobs_match,
    params,
    publish,
    server_names,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.errors import UserError
from megagrpo.types import Prompt

SMOLLM2 = Path("models/smollm2-135m")


@server_names
@pytest.mark.parametrize(("family", "tensor_parallel"), [("llama", 1), ("qwen2", 2), ("qwen3_moe", 1)])
def test_families_and_tensor_parallel_engines_agree_with_transformers(
    name, family, tensor_parallel, tiny_hf_folder, tiny_model, prompts, publish_through_a_group
):
    """Untied output layers, biases, experts; an engine of two ranks, which are members of a process group
    with trainer ranks too.
    """
    engine = ENGINES.get(name)(
        tiny_hf_folder(family), build_engine_config(name=name, server={"tensor_parallel": tensor_parallel})
    )
    try:
        for version, factor in ((1, 1.0), (2, 0.8)):
            model = tiny_model(family)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            engine.begin_update(version)
            load(engine, checkpoint_of(model).items())
            engine.commit_update(version)
            assert_logprobs_match(model, prompts, engine.generate(prompts, params(), range(4)))
        if tensor_parallel > 1:
            # SGLang pads these small layers on a CPU
            layouts = ("full", "sharded") if name == "vllm" else ("full",)
            publish_through_a_group(name, engine.address, tiny_hf_folder(family), tensor_parallel, layouts)
    finally:
        engine.close()


@server_names
def test_a_model_that_the_engine_does_not_know_is_one_line_at_the_start(name, tiny_hf_folder, tmp_path):
    shutil.copytree(tiny_hf_folder("qwen3"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(config | {"architectures": ["UnheardOfForCausalLM"]})
    )
    with pytest.raises(UserError, match=rf"engine.name: {name}: .*UnheardOfForCausalLM") as raised:
        ENGINES.get(name)(tmp_path / "model", build_engine_config(name=name), log_file=tmp_path / "log")
    assert "\n" not in str(raised.value) and str(tmp_path / "log") in str(raised.value)


@server_names
def test_an_address_where_nothing_answers_is_told(name, tiny_hf_folder):
    with pytest.raises(
        UserError, match=r"engine.server.addresses: http://127.0.0.1:9: no .* server answers there"
    ):
        ENGINES.get(name)(
            tiny_hf_folder("qwen3"),
            build_engine_config(name=name, server={"addresses": ("http://127.0.0.1:9",)}),
        )


@pytest.fixture(scope="module")
def smollm2():
    """(folder, model, tokenizer) of SmolLM2-135M as `make smollm2` leaves it."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        pytest.skip(f"{SMOLLM2} is not there: python examples/smollm2_arithmetic/prepare.py {SMOLLM2}")
    return (
        SMOLLM2,
        AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(SMOLLM2),
    )


@server_names
def test_logprobs_of_a_pretrained_model_equal_those_of_transformers(name, smollm2):
    """5e-5: 30 layers round more than two do; a stale or misplaced weight shifts log-probs by tenths."""
    folder, model, tokenizer = smollm2
    texts = ["The capital of France is", "7 + 5 = 12\n9 + 4 = 13\n8 + 6 =", "def add(a, b):"]
    prompts = [Prompt(number, text, tuple(tokenizer(text)["input_ids"])) for number, text in enumerate(texts)]
    engine = ENGINES.get(name)(
        folder, build_engine_config(name=name, server={"max_model_len": 512}), tokenizer
    )
    try:
        publish(engine, model, version=1)
        for temperature in (1.0, 0.7):
            groups = engine.generate(prompts, params(max_new_tokens=48, temperature=temperature), range(4))
            assert_logprobs_match(model, prompts, groups, tolerance=5e-5, temperature=temperature)
        groups = engine.generate(prompts, params(max_new_tokens=24, temperature=0.0), [0])
        for prompt, (completion,) in zip(prompts, groups, strict=True):
            ids = torch.tensor([prompt.token_ids])
            expected = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
            assert completion.token_ids.tolist() == expected.tolist()
    finally:
        engine.close()
