"""What goes to an SGLang server and what comes back, without a server. Answers are written down from those
of SGLang 0.5.23.
"""

import base64
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.config.engine_sections import SglangServerConfig, build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.engines.completion_rules import StopRule
from megagrpo.engines.server import sglang_protocol
from megagrpo.engines.server.build_completion import build_completion
from megagrpo.engines.server.http_client import EngineClient
from megagrpo.engines.server.sglang_answers import read_routed_experts, read_samples
from megagrpo.engines.server.sglang_command import cores_by_rank, sglang_command
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.counter_sampling import row_keys

PROMPT = Prompt(id=12, text="1+2=", token_ids=(4, 39, 5, 41))


@pytest.fixture
def build(tiny_hf_folder, monkeypatch):
    """A function (family, **engine fields) -> the protocol of an engine whose server is only said to be
    there.
    """
    monkeypatch.setattr(EngineClient, "is_answering", lambda self, path: True)

    def build(family="qwen3", tokenizer=None, **fields):
        own = {name: fields.pop(name) for name in list(fields) if name not in SglangServerConfig.model_fields}
        server = {"addresses": ("http://127.0.0.1:9",), **fields}
        config = build_engine_config(name="sglang", server=server, **own)
        return ENGINES.get("sglang")(tiny_hf_folder(family), config, tokenizer).protocol

    return build


def command_of(model, port):
    return sglang_command(model).words("python", port)


def test_every_route_that_is_called_is_also_there_without_sglangs_http_server():
    """`engine.server.offline` serves what is written down in its module alone."""
    package = Path(sglang_protocol.__file__).parents[2]
    called, served = (
        set(re.findall(r'"(/[a-z_]+)"', (package / name).read_text()))
        for name in ("engines/server/sglang_protocol.py", "host/sglang/offline.py")
    )
    assert {"/generate", "/update_weights_from_tensor"} <= called <= served


def answer(**meta):
    fields = {
        "id": "abc.0.",
        "finish_reason": {"type": "length", "length": 3},
        "weight_version": "7",
        "weight_versions": [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 7, None], [-1.25, 9, None], [-2.0, 8, None]],
    }
    return {"output_ids": [7, 9, 8], "meta_info": fields | meta}


def test_each_completion_has_the_key_of_its_counters_as_its_seed(build):
    path, body = build().generate_call(
        "abc", PROMPT, SamplingParams(9, temperature=0.7, top_p=0.9, top_k=5, seed=3, step=4), range(2, 5)
    )
    assert path == "/generate" and body["return_logprob"] and "return_routed_experts" not in body
    assert body["input_ids"] == [list(PROMPT.token_ids)] * 3
    keys = row_keys(3, 4, [12] * 3, [2, 3, 4])
    assert [np.uint64(params["sampling_seed"] % 2**64) for params in body["sampling_params"]] == keys.tolist()
    for params in body["sampling_params"]:
        assert -(2**63) <= params["sampling_seed"] < 2**63  # what the server takes
        assert (params["max_new_tokens"], params["temperature"], params["top_p"], params["top_k"]) == (
            9,
            0.7,
            0.9,
            5,
        )


def test_a_greedy_request_has_no_seed_and_one_over_the_whole_vocabulary_no_top_k(build):
    _, body = build().generate_call("abc", PROMPT, SamplingParams(9, temperature=0.0), range(1))
    (params,) = body["sampling_params"]
    assert "sampling_seed" not in params and params["temperature"] == 0 and params["top_k"] == -1


def test_stops_are_those_of_the_model_and_of_the_request(build):
    _, body = build().generate_call(
        "abc", PROMPT, SamplingParams(9, stop=("\n",), stop_token_ids=(40,)), range(1)
    )
    (params,) = body["sampling_params"]
    # 2 is the tiny model's <eos>
    assert params["stop"] == ["\n"] and params["stop_token_ids"] == [2, 40] and params["no_stop_trim"]


def test_without_a_tokenizer_of_its_own_the_server_is_sent_no_stop_strings(build, character_tokenizer):
    protocol = build(tokenizer=character_tokenizer)  # made in memory
    _, body = protocol.generate_call("abc", PROMPT, SamplingParams(9, stop=("\n",)), range(1))
    assert "stop" not in body["sampling_params"][0] and "--skip-tokenizer-init" in command_of(
        protocol.model, 1
    )


def test_an_abort_names_every_completion_and_none_of_another_request(build):
    """The server ends all requests that begin with an id: no id may be the beginning of another one."""
    protocol = build()
    calls = protocol.abort_calls({"abc": 12, "abd": 1})
    ids = [call.body["rid"] for call in calls]
    assert set(ids) == {
        *protocol.generate_call("abc", PROMPT, SamplingParams(1), range(12))[1]["rid"],
        "abd.0.",
    }
    assert not [(a, b) for a in ids for b in ids if a != b and b.startswith(a)]


def test_the_server_is_told_the_context_the_rows_and_a_cache_that_they_can_fill(build):
    protocol = build(max_batch_completions=3, options={"schedule_policy": "lpm", "log_level": "info"})
    command = command_of(protocol.model, 8123)
    assert (
        command[:4] == ["python", "-P", "-m", "megagrpo.host.sglang.server"]
        and command[4] == "--end-with-parent"
    )
    options = dict(pairwise(command))
    assert (
        options["--port"] == "8123" and options["--host"] == "127.0.0.1" and options["--dtype"] == "float32"
    )
    assert options["--max-running-requests"] == "3"
    assert int(options["--context-length"]) > protocol.model.context_tokens == 128
    assert int(options["--max-total-tokens"]) == 3 * int(options["--context-length"])
    assert (
        options["--schedule-policy"] == "lpm"
        and options["--log-level"] == "info"
        and "warning" not in command
    )
    # 2 (keys, values) x 2 layers x 2 heads x 16 x 4 bytes = 512 bytes a token
    small = dict(pairwise(command_of(build(kv_cache_bytes=512 * 500).model, 1)))
    assert small["--max-total-tokens"] == "500"


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [([0, 1], 1, "0,1"), ([0, 1, 2, 3], 2, "0,1|2,3"), ([4, 6, 7], 2, "4|6"), ([0, 1], 4, "0|1|0|1")],
)
def test_every_engine_rank_on_a_cpu_has_cores(cores, ranks, expected):
    assert cores_by_rank(cores, ranks) == expected


def spans_of(sample):
    return [(span.version, span.start, span.end) for span in sample.spans]


def test_a_completion_comes_with_its_spans_of_weight_versions():
    (sample,) = read_samples([answer()])
    assert (
        sample.token_ids == [7, 9, 8]
        and sample.logprobs == [-0.5, -1.25, -2.0]
        and sample.finish_reason == "length"
    )
    assert spans_of(sample) == [(6, 0, 2), (7, 2, 3)] and sample.routed_experts is None


def test_a_request_that_was_ended_in_the_queue_is_an_empty_abort(character_tokenizer):
    fields = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_versions": None,
        "output_token_logprobs": [],
    }
    (sample,) = read_samples([answer(**fields) | {"output_ids": []}])
    assert (sample.token_ids, sample.logprobs, sample.finish_reason) == ([], [], "abort")
    rule = StopRule(character_tokenizer, {2}, SamplingParams(3))
    completion = build_completion(PROMPT, 0, sample, 7, rule, character_tokenizer)
    assert completion.weight_versions == ((0, 7),) and completion.finish_reason == "abort"


def test_spans_without_tokens_are_left_out(character_tokenizer):
    spans = [{"version": "5", "start": 0, "end": 0}, {"version": "7", "start": 0, "end": 3}]
    (sample,) = read_samples([answer(weight_versions=spans)])
    rule = StopRule(character_tokenizer, {2}, SamplingParams(3))
    assert build_completion(PROMPT, 0, sample, 7, rule, character_tokenizer).weight_versions == ((0, 7),)


def test_log_probs_of_other_tokens_are_an_error():
    logprobs = [[-0.5, 7, None], [-1.25, 8, None], [-2.0, 8, None]]
    with pytest.raises(EngineError, match="log-probs that came are of other tokens"):
        read_samples([answer(output_token_logprobs=logprobs)])


def test_routed_experts_are_cut_with_their_completion(character_tokenizer):
    # 4 prompt tokens, 2 of 3 sampled tokens; 2 layers, 3 experts each
    experts = np.arange(6 * 2 * 3, dtype=np.int32)
    meta = {"routed_experts": base64.b64encode(experts.tobytes()).decode()}
    assert read_routed_experts(meta["routed_experts"], (2, 3)).tolist() == experts.reshape(6, 2, 3).tolist()
    rule = StopRule(character_tokenizer, {2}, SamplingParams(3, stop_token_ids=(9,)))
    (sample,) = read_samples([answer(**meta)], (2, 3))
    completion = build_completion(PROMPT, 0, sample, 7, rule, character_tokenizer)
    assert (
        completion.token_ids.tolist() == [7, 9]
        and completion.finish_reason == "stop"
        and completion.weight_versions == ((0, 6),)
    )
    assert completion.routed_experts.tolist() == experts.reshape(6, 2, 3)[:5].tolist()


def test_routed_experts_are_asked_for_where_the_server_returns_them(build):
    protocol = build("qwen3_moe", options={"enable_return_routed_experts": True})
    assert protocol.generate_call("abc", PROMPT, SamplingParams(1), range(1))[1]["return_routed_experts"]
    assert "--enable-return-routed-experts" in command_of(protocol.model, 1)


def test_on_gpus_the_cache_is_the_servers_and_memory_can_be_given_back(build):
    command = command_of(replace(build().model, device=torch.device("cuda")), 1)
    assert (
        "--enable-memory-saver" in command
        and "--max-total-tokens" not in command
        and "torch_native" not in command
    )
