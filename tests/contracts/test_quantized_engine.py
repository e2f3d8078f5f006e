"""Engines whose model is quantised to blockwise float8: what is published is held bit for bit, and a server
of the other kind is refused.

On a CPU vLLM runs such a model with a kernel of ours; SGLang needs AMX for it.
"""

import copy

import pytest
import torch
from bucket_files import load
from engine_contract import SERVER_MARKS, SERVER_NAMES, params, teacher_forced
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.errors import UserError
from megagrpo.models.quantization import scale_name
from megagrpo.weights.read.block_fp8 import accumulate_amax, compute_scales, quantize_slice
from megagrpo.wire.bucket_manifest import checksum_of

# The smallest that has whole blocks of 128 rows in every projection.
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory, tiny_hf_folder):
    """(HF folder, bfloat16 model with large weights: its log-probs differ by far more than bfloat16
    rounds).
    """
    tiny = tiny_hf_folder("qwen3", tie_word_embeddings=True)
    vocab_size = AutoConfig.from_pretrained(tiny).vocab_size
    torch.manual_seed(0)
    config = Qwen3Config(
        **CONFIG,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    folder = tmp_path_factory.mktemp("quantized")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder, model


def quantize(weight):
    box = tuple((0, size) for size in weight.shape)
    amax = torch.zeros(*(-(-size // 128) for size in weight.shape))
    accumulate_amax(weight, box, amax)
    return quantize_slice(weight, box, compute_scales(amax)), compute_scales(amax)


def checkpoint(model):
    """The tensors of the quantised checkpoint of a model."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        if name.endswith("_proj.weight"):
            tensors[name], tensors[scale_name(name)] = quantize(parameter.detach())
    return tensors


def dequantized(model):
    """The model that such a checkpoint stands for, in float32."""
    twin, tensors = copy.deepcopy(model).float(), checkpoint(model)
    for name, parameter in twin.named_parameters():
        value = tensors[name].float()
        if name.endswith("_proj.weight"):
            scales = tensors[scale_name(name)].repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value * scales[: value.shape[0], : value.shape[1]]
        parameter.data.copy_(value)
    return twin


def fused_checksums(tensors):
    """Of the parameters of a tensor parallel 1 engine; of the embedding, which is padded, none."""
    fused = {}
    for name, tensor in tensors.items():
        for target, parts in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            if parts[0] in name:
                rows = [tensors[name.replace(parts[0], part)].view(torch.uint8) for part in parts]
                fused[name.replace(parts[0], target)] = checksum_of(torch.cat(rows))
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed")):
            fused[name] = checksum_of(tensor)
    return fused


def publish(engine, model, version):
    engine.begin_update(version)
    load(engine, checkpoint(model).items())
    engine.commit_update(version)


@pytest.mark.parametrize("name", [pytest.param("vllm", marks=SERVER_MARKS)])
def test_a_quantised_server_holds_and_computes_with_what_is_published(name, quantized_folder, prompts):
    folder, model = quantized_folder
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(0.8)
    engine = ENGINES.get(name)(
        folder, build_engine_config(name=name, server={"quantization": "fp8_block"}), dtype=torch.bfloat16
    )
    try:
        engine.check_model()
        unaware = ENGINES.get(name)(
            folder,
            build_engine_config(name=name, server={"addresses": (engine.address,)}),
            dtype=torch.bfloat16,
        )
        with pytest.raises(UserError, match=r"engine\.server\.quantization: none: .* is float8 at http"):
            unaware.check_model()
        publish(engine, model, version=1)
        engine.begin_update(2)  # given up half-way: what was loaded of it is not left in the next one
        load(engine, list(checkpoint(other).items())[: len(checkpoint(other)) // 2])
        with pytest.raises(EngineError, match="tensors are missing"):
            engine.commit_update(2)
        engine.abort_update()
        for version, published, replaced in ((2, model, other), (3, other, model)):
            publish(engine, published, version)
            (kept,) = engine.parameter_checksums()
            expected = fused_checksums(checkpoint(published))
            assert {parameter: kept[parameter] for parameter in expected} == expected
            groups = engine.generate(prompts, params(), range(4))
            gaps = {id(one): [] for one in (published, replaced)}
            for one in (published, replaced):
                twin = dequantized(one)
                for prompt, group in zip(prompts, groups, strict=True):
                    for completion in group:
                        expected_logprobs, _ = teacher_forced(twin, prompt, completion)
                        gaps[id(one)].append(
                            (expected_logprobs - torch.from_numpy(completion.logprobs)).abs().mean().item()
                        )
            right, wrong = (sum(gaps[id(one)]) / len(gaps[id(one)]) for one in (published, replaced))
            assert right < 0.1 * wrong, (right, wrong)  # activations in bfloat16 against float32
    finally:
        engine.close()


@pytest.mark.parametrize("name", SERVER_NAMES)
def test_a_server_that_is_not_quantised_is_refused_where_a_quantised_one_is_wanted(
    name, server_address, tiny_hf_folder
):
    config = build_engine_config(
        name=name, server={"quantization": "fp8_block", "addresses": (server_address(name),)}
    )
    engine = ENGINES.get(name)(tiny_hf_folder("qwen3", tie_word_embeddings=True), config)
    with pytest.raises(
        UserError, match=r"engine\.server\.quantization: fp8_block: the model has no float8 weights"
    ):
        engine.check_model()
