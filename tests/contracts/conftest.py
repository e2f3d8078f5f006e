"""Fixtures of the engine contract: an engine of every registered kind, and the weights it is given."""

import sys
from pathlib import Path

import pytest
import torch
from engine_contract import EMBEDDED_NAMES, SERVER_NAMES

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.types import Prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

PROMPTS = ["1+2=", "hello there, you", "a", "xyz 1234"]


@pytest.fixture(scope="session")
def server_address(tiny_hf_folder):
    """A function (engine name) -> address of its server for the tiny Qwen3 with tied embeddings, started
    at the first call.
    """
    started = {}

    def address(name):
        if name not in started:
            started[name] = ENGINES.get(name)(
                tiny_hf_folder("qwen3", tie_word_embeddings=True), build_engine_config(name=name)
            )
        return started[name].address

    yield address
    for engine in started.values():
        engine.close()


@pytest.fixture(params=[*EMBEDDED_NAMES, *SERVER_NAMES])
def build_engine(request, tiny_hf_folder, server_address):
    """A function (config, **options) -> an engine for the tiny Qwen3, closed after the test."""
    built = []

    def build_engine(config=None, **options):
        fields = config.model_dump(exclude={"name"}, exclude_unset=True) if config else {}
        if request.param not in EMBEDDED_NAMES:
            fields["server"] = fields.get("server", {}) | {"addresses": [server_address(request.param)]}
        config = build_engine_config(request.param, **fields)
        built.append(
            ENGINES.get(request.param)(tiny_hf_folder("qwen3", tie_word_embeddings=True), config, **options)
        )
        return built[-1]

    yield build_engine
    for engine in built:
        engine.close()


@pytest.fixture
def publish_through_a_group():
    """A function (engine name, address, HF folder, ...): trainer ranks publish to the server through a
    process group; see the worker.
    """
    from torchrun_launch import run_torchrun

    def publish(name, address, folder, tensor_parallel=1, layouts=("full", "sharded")):
        worker = Path(__file__).with_name("group_publish_worker.py")
        assert f"GROUP OK {name}" in run_torchrun(
            2, [str(worker)], name, address, folder, tensor_parallel, *layouts
        )

    return publish


@pytest.fixture
def prompts(character_tokenizer):
    return [
        Prompt(id=10 + i, text=text, token_ids=tuple(character_tokenizer(text)["input_ids"]))
        for i, text in enumerate(PROMPTS)
    ]


@pytest.fixture
def model(tiny_model):
    # the harder case: an engine may compute the logits with a copy of the embedding
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture
def other_model(tiny_model):
    """A model of the same shape with other weights."""
    model = tiny_model(tie_word_embeddings=True)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.mul_(0.8)
    return model
