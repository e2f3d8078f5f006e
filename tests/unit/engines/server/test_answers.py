"""Answers that a server must not give: each is refused by name, with server, prompt and completion, and the
engine serves on. The servers are fakes, since real ones can't be made to err like this.
"""

import sys
from pathlib import Path

import pytest

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.errors import UserError
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry

sys.path.insert(0, str(Path(__file__).parent))

from fake_servers import GOOD, fake_server

PROMPT = Prompt(id=12, text="1+2=", token_ids=(4, 39, 5, 41))
SAMPLING = SamplingParams(max_new_tokens=4)
DEEP = b"[" * 100_000


@pytest.fixture(params=["vllm", "sglang"])
def server(request):
    with fake_server(request.param) as server:
        yield server


def connect(server, folder, address=None):
    """A follower's engine, to which versions 6 and 7 were published."""
    config = build_engine_config(name=server.kind, server={"addresses": (address or server.address,)})
    engine = ENGINES.get(server.kind)(folder, config, is_owner=False)
    entries = tuple(
        TensorEntry(name, "float32", tuple(shape), 0, 0, "0")
        for name, shape in engine.protocol.model.tensor_shapes.items()
    )
    for version in (6, 7):
        engine.begin_update(version)
        engine.receive(BucketManifest(version, "none", {}, "full", entries))
        engine.commit_update(version)
    return engine


@pytest.fixture
def engine(server, tiny_hf_folder):
    engine = connect(server, tiny_hf_folder("qwen3"))
    yield engine
    engine.close()


def changed(**fields):
    """Spoil the last completion."""

    def spoil(completions):
        completions[-1].update(fields)

    return spoil


def answering(data):
    return lambda completions: data


def test_a_good_answer_is_read_as_it_is(engine):
    ((first, second),) = engine.generate([PROMPT], SAMPLING, [2, 3])
    for completion, index in ((first, 2), (second, 3)):
        assert (completion.prompt_id, completion.index) == (12, index)
        assert completion.token_ids.tolist() == GOOD["token_ids"]
        assert completion.logprobs.tolist() == GOOD["logprobs"]
        assert completion.weight_versions == ((0, 6), (2, 7))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (changed(token_ids=[7] * 5, logprobs=[-1.0] * 5), "5 tokens, at most 4 were asked for"),
        (changed(logprobs=[-0.5, -1.25]), "3 tokens and 2 log-probs"),
        (changed(logprobs=[]), "3 tokens and 0 log-probs"),
        (changed(spans=[("8", 0, 3)]), "weight version 8 is none yet, the newest one is 7"),
        (changed(spans=[("7", 0, 2), ("6", 2, 3)]), "weight version 6 comes after version 7"),
        (changed(spans=None), "the weight versions of 0 of 3 tokens came"),
        (changed(spans=[("6", 0, 2)]), "the weight versions of 2 of 3 tokens came"),
        (changed(spans=[("6", 0, 2), ("7", 1, 3)]), "span 1 to 3 of weight version 7 .* at token 2"),
        (changed(spans=[("6", 0, 1), ("7", 2, 3)]), "span 2 to 3 of weight version 7 .* at token 1"),
        (changed(finish_reason="tired"), "finish reason 'tired' is none of stop, length, abort"),
        (changed(token_ids=[7, 49, 8]), "token 1 has id 49, the vocabulary is 0 to 48"),
        (changed(logprobs=[-0.5, 0.5, -2.0]), "the log-prob of token 1 is 0.5"),
        (changed(logprobs=[-0.5, float("nan"), -2.0]), "the log-prob of token 1 is nan"),
        (changed(logprobs=[-0.5, float("-inf"), -2.0]), "the log-prob of token 1 is -inf"),
        (changed(token_ids=[], logprobs=[], spans=None, finish_reason="stop"), "no tokens, .* by 'stop'"),
    ],
)
def test_a_wrong_completion_is_named_with_server_prompt_and_index(server, engine, spoil, message):
    server.spoil = spoil
    with pytest.raises(
        EngineError, match=rf"{server.address}: prompt 12: completion 3: .*{message}"
    ) as raised:
        engine.generate([PROMPT], SAMPLING, [2, 3])
    assert "\n" not in str(raised.value)
    assert engine.health().ready
    server.spoil = answering(None)
    engine.generate([PROMPT], SAMPLING, [2, 3])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (answering(b"null"), "the answer = None"),
        (answering(b"17"), "the answer = 17"),
        (answering(b""), "the answer = None"),
        (answering(b"{}"), r"choices = \{\}: Field required|the answer = \{\}"),
        (changed(token_ids=[7, -1, 8]), r"(token|output)_ids\.1 = -1"),
        (changed(token_ids=["7", 9, 8]), r"(token|output)_ids\.0 = '7'"),
        (changed(logprobs=[-0.5, None, -2.0]), "= None: Input should be a valid number"),
        (changed(spans=[("newest", 0, 3)]), "weight_versions.0.version = 'newest'"),
        (changed(finish_reason=None), "finish_reason.* = None"),
        (lambda completions: completions.pop() and None, "1 completions came, 2 were asked for"),
        (answering(b"<html>busy</html>"), "the answer is not JSON"),
        (answering(DEEP), "the answer is not JSON: recursion limit"),
        (answering(b'["' + b"x" * 3_000_000 + b'"]'), "the answer is larger than"),
    ],
)
def test_an_answer_that_is_none_is_named_with_server_and_prompt(server, engine, spoil, message):
    server.spoil = spoil
    with pytest.raises(EngineError, match=message) as raised:
        engine.generate([PROMPT], SAMPLING, [2, 3])
    text = str(raised.value)
    assert text.startswith(server.address) and "prompt 12: completion 2 to 3" in text
    assert "\n" not in text and len(text) < 1000
    assert engine.health().ready


def test_a_password_in_an_address_is_sent_and_never_shown(server, tiny_hf_folder):
    address = server.address.replace("//", "//me:secret@")
    engine = connect(server, tiny_hf_folder("qwen3"), address)
    engine.generate([PROMPT], SAMPLING, [0])
    assert server.headers[-1]["Authorization"] == "Basic bWU6c2VjcmV0"  # me:secret in base64
    assert engine.address == address  # for those who are to reach it too
    server.spoil = changed(token_ids=[])
    for refused in (lambda: engine.generate([PROMPT], SAMPLING, [0]), lambda: engine.server.call("/pause")):
        server.spoil = answering(b"no")
        with pytest.raises(EngineError) as raised:
            refused()
        assert "secret" not in str(raised.value) and server.address in str(raised.value)
    with pytest.raises(UserError) as raised:
        ENGINES.get(server.kind)(
            tiny_hf_folder("qwen3"),
            build_engine_config(name=server.kind, server={"addresses": ("http://me:secret@127.0.0.1:9",)}),
        )
    assert "secret" not in str(raised.value) and "http://127.0.0.1:9" in str(raised.value)
