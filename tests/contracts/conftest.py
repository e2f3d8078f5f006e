"""Fixtures of the engine contract: an engine of every registered kind, and the weights it is given."""

import importlib.util

import pytest
import torch

from megagrpo.config.schema import EngineConfig
from megagrpo.rollout.engines import ENGINES
from megagrpo.types import Prompt

ENGINE_PACKAGES = {"transformers": "transformers"}
PROMPTS = ["1+2=", "hello there, you", "a", "xyz 1234"]


@pytest.fixture(params=ENGINES.names())
def build_engine(request, tiny_hf_folder):
    """A function (family, config, **options) -> an engine, closed after the test."""
    if importlib.util.find_spec(ENGINE_PACKAGES[request.param]) is None:
        pytest.skip(f"{ENGINE_PACKAGES[request.param]} is not installed")
    built = []

    def build_engine(family="qwen3", config=None, **options):
        built.append(ENGINES.get(request.param)(tiny_hf_folder(family), config or EngineConfig(), **options))
        return built[-1]

    yield build_engine
    for engine in built:
        engine.close()


@pytest.fixture
def prompts(character_tokenizer):
    return [Prompt(id=10 + i, text=text, token_ids=tuple(character_tokenizer(text)["input_ids"])) for i, text in enumerate(PROMPTS)]


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
