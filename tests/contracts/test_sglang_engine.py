"""What an SGLang server of ours does beyond the contract, on a mixture of experts, on one server for all
tests.

Log-probs are held to 2e-5 of teacher-forced float32 transformers, as in the contract.
"""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from bucket_files import bucket_file, load
from checkpoint_of_model import checkpoint_of
from engine_contract import TOLERANCE, params, tokens

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.types import Prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
FAMILY, ROWS = "qwen3_moe", 16
# SGLang pads the experts of a CPU to multiples of 32; a padded one has no sharded form of ours
SHAPE = {"moe_intermediate_size": 32}
SERVER = {"request_timeout_seconds": 60, "options": {"enable_return_routed_experts": True}}


def config_of(**server):
    return build_engine_config("sglang", max_batch_completions=ROWS, server=SERVER | server)


@pytest.fixture(scope="module")
def server(tiny_hf_folder, tmp_path_factory):
    """The engine that owns the server."""
    engine = ENGINES.get("sglang")(
        tiny_hf_folder(FAMILY, **SHAPE),
        config_of(),
        log_file=tmp_path_factory.mktemp("sglang") / "server.log",
    )
    yield engine
    engine.close()


@pytest.fixture
def connect(server, tiny_hf_folder):
    """A function -> another client of the server, which holds no version yet."""
    clients = []

    def connect(**fields):
        config = config_of(addresses=(server.address,), **fields)
        clients.append(ENGINES.get("sglang")(tiny_hf_folder(FAMILY, **SHAPE), config))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def models(tiny_model):
    """Two models of one shape."""
    first, second = tiny_model(FAMILY, **SHAPE), tiny_model(FAMILY, **SHAPE)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(0.8)
    return first, second


def publish(engine, model, version):
    engine.begin_update(version)
    load(engine, checkpoint_of(model).items())
    engine.commit_update(version)


def teacher_forced(model, prompt, completion):
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0].numpy()


def assert_sampled_by(model, prompts, groups):
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            np.testing.assert_allclose(
                completion.logprobs, teacher_forced(model, prompt, completion), atol=TOLERANCE, rtol=0
            )


def test_it_draws_the_very_tokens_of_the_embedded_engine(connect, models, prompts, tiny_hf_folder):
    engine = connect()
    publish(engine, models[0], 1)
    embedded = ENGINES.get("transformers")(
        tiny_hf_folder(FAMILY, **SHAPE), build_engine_config(), load_weights=True
    )
    for fields in (
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 4, "stop": ("1", "ab")},
        {"temperature": 0.0},
    ):
        sampling = params(max_new_tokens=40, **fields)
        assert tokens(engine.generate(prompts, sampling, range(6))) == tokens(
            embedded.generate(prompts, sampling, range(6))
        )


def test_prompts_that_are_computed_beforehand_give_the_same(connect, models, prompts):
    engine = connect()
    publish(engine, models[0], 1)
    long = [replace(prompt, token_ids=tuple(np.resize(prompt.token_ids, 60).tolist())) for prompt in prompts]
    groups = engine.generate(long, params(), range(5))
    assert_sampled_by(models[0], long, groups)
    assert tokens(engine.generate(long[1:2], params(), [3])) == [[tokens(groups)[1][3]]]


def test_routed_experts_are_those_of_the_models_routers(connect, models, prompts):
    engine = connect()
    publish(engine, models[0], 1)
    for prompt, group in zip(prompts, engine.generate(prompts, params(stop=("1",)), range(3)), strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids.tolist()]])
            with torch.no_grad():
                layers = models[0](ids, output_router_logits=True).router_logits
            # [P + L - 1, layers, 2]
            expected = np.stack(
                [layer[:-1].topk(2).indices.sort().values.numpy() for layer in layers], axis=1
            )
            assert completion.routed_experts.shape == expected.shape
            assert (np.sort(completion.routed_experts) == expected).all()


def test_requests_on_their_way_go_on_under_the_new_weights_and_say_from_which_token_on(connect, models):
    """Each token's log-prob is that of the version that its span names: neither half-written weights nor
    keys of old ones had a part.
    """
    generating, publishing = connect(), connect()
    publish(generating, models[0], 1)
    prompts = [Prompt(id=place, text="", token_ids=(5 + place % 40, 7, 9, 11)) for place in range(3 * ROWS)]
    first_is_done, result = threading.Event(), []

    def generate():
        result.extend(
            generating.generate(
                prompts, params(max_new_tokens=100), [0], on_group=lambda *_: first_is_done.set()
            )
        )

    thread = threading.Thread(target=generate)
    thread.start()
    assert first_is_done.wait(60)  # its row goes to a prompt that waited, so the rows are full
    generating.begin_update(2)  # as a rank that follows: nothing can be of a version that it does not know
    publish(publishing, models[1], 2)
    thread.join(120)
    assert len(result) == len(prompts)
    mixed = 0
    for prompt, (completion,) in zip(prompts, result, strict=True):
        starts = [*(start for start, _ in completion.weight_versions), len(completion.token_ids)]
        mixed += len(starts) > 2
        for (start, version), end in zip(completion.weight_versions, starts[1:], strict=True):
            expected = teacher_forced(models[version - 1], prompt, completion)[start:end]
            np.testing.assert_allclose(completion.logprobs[start:end], expected, atol=TOLERANCE, rtol=0)
    assert mixed and {version for (completion,) in result for _, version in completion.weight_versions} == {
        1,
        2,
    }


def test_sharded_weights_are_bit_for_bit_what_the_servers_own_loader_makes_of_full_ones(
    connect, models, prompts
):
    engine = connect()
    checksums = {}
    for version, layout in enumerate(("full", "sharded"), start=1):
        publish(engine, models[1], 2 * version - 1)  # so that nothing of models[0] is left over
        engine.begin_update(2 * version)
        if layout == "full":
            load(engine, checkpoint_of(models[0]).items())
        else:
            with bucket_file(2 * version, list(fused(checkpoint_of(models[0])).items())) as manifest:
                acks = engine.receive(replace(manifest, layout="sharded"))
            assert [(ack["rank"], ack["version"]) for ack in acks] == [(0, 4)]
        engine.commit_update(2 * version)
        checksums[layout] = engine.parameter_checksums()
    assert checksums["sharded"] == checksums["full"]
    assert_sampled_by(models[0], prompts, engine.generate(prompts, params(), range(2)))


def fused(full):
    """The full tensors as SGLang holds them at tensor parallel size 1."""
    parts = {}
    for name, tensor in full.items():
        if match := re.fullmatch(r"(.*\.self_attn\.)([qkv])_proj\.weight", name):
            parts.setdefault(match[1] + "qkv_proj.weight", []).append(tensor)
        elif match := re.fullmatch(r"(.*\.experts\.)\d+\.(gate|up)_proj\.weight", name):
            parts.setdefault(match[1] + "w13_weight", []).append(tensor)
        elif match := re.fullmatch(r"(.*\.experts\.)\d+\.down_proj\.weight", name):
            parts.setdefault(match[1] + "w2_weight", []).append(tensor)
        else:
            parts[name] = tensor
    experts = len([name for name in full if name.startswith("model.layers.0.mlp.experts") and "down" in name])
    shapes = {"w13_weight": (experts, -1, 32), "w2_weight": (experts, 32, -1)}
    padded = {"model.embed_tokens.weight", "lm_head.weight"}  # vocabularies are padded to a multiple of 64
    result = {}
    for name, part in parts.items():
        tensor = torch.cat(part) if isinstance(part, list) else part
        suffix = name.rsplit(".", 1)[1]
        if name in padded:
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % 64))
        result[name] = tensor.reshape(shapes[suffix]) if suffix in shapes else tensor
    return result


def test_no_client_samples_from_weights_that_another_left_half_written(connect, models, prompts):
    """Their requests are not answered, which is a clear error; the next whole update serves."""
    other = connect(request_timeout_seconds=2)
    publish(other, models[0], 1)
    stopping = connect()
    stopping.begin_update(2)
    load(stopping, list(checkpoint_of(models[1]).items())[:5])
    stopping.close()
    with pytest.raises(EngineError, match="request_timeout_seconds = 2"):
        other.generate(prompts, params(), [0])
    after = connect()
    publish(after, models[1], 2)
    assert_sampled_by(models[1], prompts, after.generate(prompts, params(), range(3)))


@pytest.mark.parametrize("payload", ["e30=", "bm90IGpzb24="])
def test_an_unreadable_instruction_is_refused_and_the_server_lives(connect, models, prompts, payload):
    engine = connect()
    publish(engine, models[0], 1)
    with pytest.raises(EngineError, match="not an instruction"):
        engine.server.call(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [payload], "load_format": "megagrpo_manifest"},
        )
    assert_sampled_by(models[0], prompts, engine.generate(prompts, params(), [0]))


def test_trainer_ranks_publish_straight_to_the_servers_ranks(server, tiny_hf_folder, publish_through_a_group):
    publish_through_a_group("sglang", server.address, tiny_hf_folder(FAMILY, **SHAPE))
