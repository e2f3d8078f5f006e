"""A server that is there already, asked for completions of the weights that it holds."""

import sys
from pathlib import Path

import pytest

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.types import Prompt, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))

from fake_servers import GOOD, fake_server

PROMPT = Prompt(id=12, text="1+2=", token_ids=(4, 39, 5, 41))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("is_owner", [True, False])
def test_a_given_server_generates_with_what_it_holds_whatever_version_it_calls_that(
    kind, is_owner, tiny_hf_folder
):
    """It answers with versions 6 and 7, of which this engine has published none."""
    with fake_server(kind) as server:
        config = build_engine_config(name=kind, server={"addresses": (server.address,)})
        engine = ENGINES.get(kind)(tiny_hf_folder("qwen3"), config, load_weights=True, is_owner=is_owner)
        ((completion,),) = engine.generate([PROMPT], SamplingParams(max_new_tokens=4), [0])
        assert completion.token_ids.tolist() == GOOD["token_ids"]
        assert completion.weight_versions == ((0, 6), (2, 7))
        engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_that_nobody_published_are_version_0(kind, tiny_hf_folder):
    """vLLM 0.32 and SGLang 0.5.23 label them `default`."""
    with fake_server(kind) as server:
        server.spoil = lambda completions: completions[0].update(spans=[("default", 0, 3)])
        config = build_engine_config(name=kind, server={"addresses": (server.address,)})
        engine = ENGINES.get(kind)(tiny_hf_folder("qwen3"), config, load_weights=True)
        ((completion,),) = engine.generate([PROMPT], SamplingParams(max_new_tokens=4), [0])
        assert completion.weight_versions == ((0, 0),)
        engine.close()


def test_without_load_weights_a_given_server_is_published_to_first(tiny_hf_folder):
    with fake_server("vllm") as server:
        config = build_engine_config(name="vllm", server={"addresses": (server.address,)})
        engine = ENGINES.get("vllm")(tiny_hf_folder("qwen3"), config)
        with pytest.raises(EngineError, match="no weights were committed yet"):
            engine.generate([PROMPT], SamplingParams(max_new_tokens=4), [0])
        engine.close()
