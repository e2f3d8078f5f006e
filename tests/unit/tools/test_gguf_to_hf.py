"""The GGUF reader against hand-written blocks of the format, the conversion against the transformers model
it came from.
"""

import json
import struct

import numpy as np
import pytest
import torch
from gguf_file import GgufFile
from gguf_to_hf import convert
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megagrpo.errors import UserError

F16, Q4_0, Q4_1, Q8_0, Q5_K = 1, 2, 3, 8, 13
# byte i holds weight i in its low and weight i + 16 in its high four bits
PACKED = bytes(low | (high << 4) for low, high in zip(range(16), reversed(range(16)), strict=True))
NIBBLES = np.array([*range(16), *reversed(range(16))], np.float32)


def read_one(write_gguf, shape, type_id, raw) -> np.ndarray:
    return dict(GgufFile(write_gguf({}, {"other": np.ones(5), "weight": (shape, type_id, raw)})).tensors())[
        "weight"
    ]


@pytest.mark.parametrize(
    ("type_id", "raw", "expected"),
    [
        (F16, np.arange(32, dtype="<f2").tobytes(), np.arange(32)),
        (Q4_0, struct.pack("<e", 0.5) + PACKED, 0.5 * (NIBBLES - 8)),
        (Q4_1, struct.pack("<ee", 0.25, -1.0) + PACKED, 0.25 * NIBBLES - 1.0),
        (Q8_0, struct.pack("<e", 2.0) + bytes([*range(16), *range(240, 256)]), 2.0 * np.r_[0:16, -16:0]),
    ],
)
def test_a_block_becomes_the_weights_that_the_format_defines(write_gguf, type_id, raw, expected):
    weights = read_one(write_gguf, (2, 32), type_id, raw + raw)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, np.stack([expected, expected]))


def test_metadata_of_every_kind_is_read(write_gguf):
    metadata = {"a": "text ½", "b": 7, "c": 0.5, "d": ["x", ""], "e": [1, -2]}
    assert GgufFile(write_gguf(metadata, {})).metadata == metadata


def test_a_file_that_is_cut_short_says_which_tensor(write_gguf):
    path = write_gguf({"a": "b"}, {"weight": np.ones(64)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"'weight' ends at byte .*: it is cut short"):
        GgufFile(path)
    path.write_bytes(whole[:30])
    with pytest.raises(UserError, match="the header ends at byte 30"):
        GgufFile(path)


def test_what_is_no_readable_gguf_file_is_refused(write_gguf, tmp_path):
    (tmp_path / "text").write_text("x" * 100)
    with pytest.raises(UserError, match="begins with other bytes"):
        GgufFile(tmp_path / "text")
    with pytest.raises(UserError, match="missing, or shorter"):
        GgufFile(tmp_path / "missing")
    with pytest.raises(UserError, match="GGUF version 1"):
        GgufFile(write_gguf({}, {}, version=1))
    with pytest.raises(UserError, match="has GGUF type 13; supported: F32, F16, Q4_0, Q4_1, Q8_0"):
        GgufFile(write_gguf({}, {"weight": ((32,), Q5_K, b"")}))


TOKENS = ["<|end|>", *ByteLevel.alphabet(), "Ġa", "12"]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] + [1] * (len(TOKENS) - 1),
    "tokenizer.ggml.merges": ["Ġ a", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}<|end|>",
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def make_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        )
    ).eval()  # fmt: skip


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The model as llama.cpp's converter stores it: q and k rows of each head interleaved
    (`LlamaModel.permute`).
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        stem = name.removesuffix(".weight").removeprefix("model.")
        layer = stem.split(".")[1] if stem.startswith("layers.") else None
        gguf_name = GGUF_NAMES[stem.split(".", 2)[2] if layer else stem]
        if gguf_name in ("attn_q", "attn_k"):
            heads = 4 if gguf_name == "attn_q" else 2
            array = (
                array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
            )
        tensors[f"blk.{layer}.{gguf_name}.weight" if layer else f"{gguf_name}.weight"] = array
    return tensors


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_has_the_logits_of_the_model_it_came_from(write_gguf, tmp_path, tied):
    model = make_model(tied)
    convert(write_gguf(METADATA, gguf_tensors(model)), tmp_path / "hf")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.config.rms_norm_eps == 1e-5  # not the 9.999999747e-06 of its float32


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_whole(write_gguf, tmp_path):
    convert(write_gguf(METADATA, gguf_tensors(make_model(tied=True))), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.tokenize("b a12<|end|>") == ["b", "Ġa", "1", "2", "<|end|>"]
    text = "naïve ½ 東京 🙂\n\t12"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 0)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|end|>"


def test_the_gpt2_scheme_does_not_split_digits(write_gguf, tmp_path):
    convert(
        write_gguf({**METADATA, "tokenizer.ggml.pre": "gpt-2"}, gguf_tensors(make_model(tied=True))),
        tmp_path / "hf",
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").tokenize("12") == ["12"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma'; only llama"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is not supported"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer gpt2 / llama-bpe; supported: gpt2 / gpt-2, smollm"),
    ],
)
def test_what_has_no_equal_is_refused_before_anything_is_written(write_gguf, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        convert(write_gguf({**METADATA, **change}, {}), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_tensor_without_a_place_leaves_no_weights_behind(write_gguf, tmp_path):
    with pytest.raises(UserError, match=r"'rope_freqs\.weight' has no place"):
        convert(write_gguf(METADATA, {"rope_freqs.weight": np.ones(4)}), tmp_path / "hf")
    assert not list((tmp_path / "hf").glob("*.safetensors"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
