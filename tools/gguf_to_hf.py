"""Convert a GGUF file of the llama architecture to an HF folder: config, float32 safetensors, tokenizer.

Quantised weights are dequantised: the folder holds exactly the numbers that the quantised file stands for.

Usage: python tools/gguf_to_hf.py MODEL.gguf FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf_file import GgufFile
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megagrpo.errors import UserError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
}  # fmt: skip
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # tokenizer.ggml.token_type: special tokens, never the result of merges
# Byte-level BPE schemes by GGUF's name for them: whether each digit is split off before the GPT-2 pattern
# applies.
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}


def build_config(file: GgufFile) -> dict[str, Any]:
    """Return the HF config of the model; a key that changes the maths and is not known raises UserError."""
    values = {
        key.removeprefix("llama."): value for key, value in file.metadata.items() if key.startswith("llama.")
    }
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{file.path}: architecture {architecture!r}; only llama can be converted")
    if unknown := sorted(values.keys() - _KNOWN_KEYS):
        raise UserError(f"{file.path}: llama.{unknown[0]} is not supported")
    heads = values["attention.head_count"]
    head_dim = values["embedding_length"] // heads
    if values.get("rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"{file.path}: llama.rope.dimension_count is {values['rope.dimension_count']}; only "
            f"{head_dim} (all) is supported"
        )
    names = {tensor.name for tensor in file.stored}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": _shortest(values["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest(values.get("rope.freq_base", 10_000.0)),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _shortest(value: float) -> float:
    """Return the number that was meant: GGUF stores float32, so that 1e-5 comes back as 9.999999747e-06."""
    return float(f"{value:.7g}")


def convert_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the state dict, float32, under HF names; a tensor without an HF name raises UserError."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state = {}
    for name, array in file.tensors():
        parts = name.removesuffix(".weight").split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            if parts[2] in heads:
                array = unpermute(array, heads[parts[2]])
            state[f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"] = np.ascontiguousarray(array)
        elif len(parts) == 1 and parts[0] in _OUTER_NAMES:
            state[f"{_OUTER_NAMES[parts[0]]}.weight"] = array
        else:
            raise UserError(f"{file.path}: tensor {name!r} has no place in a llama model")
    return state


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k rows in HF's order.

    GGUF rotates neighbouring rows (2i, 2i + 1) of a head, HF rows (i, i + head_dim / 2): llama.cpp's
    converter interleaves the two halves of each head, and this takes them apart again.

    Args:
        weight: [heads * head_dim, hidden].
        heads: number of heads of this projection.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the byte-level BPE tokenizer that the metadata describes; another scheme raises UserError."""
    metadata = file.metadata
    scheme = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or scheme not in _SPLITS_DIGITS:
        found = f"{metadata.get('tokenizer.ggml.model')} / {scheme}"
        raise UserError(f"{file.path}: tokenizer {found}; supported: gpt2 / {', '.join(_SPLITS_DIGITS)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _SPLITS_DIGITS[scheme] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL_TOKEN, _USER_TOKEN):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)])
    return tokenizer


def build_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer_config.json: the special tokens by role and the chat template."""
    metadata = file.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    config = {role: tokens[index] for role, index in ids.items() if index is not None}
    # the generic class reads tokenizer.json as it stands; a model's own class would rebuild it with its own
    # pre-tokenizer
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    config["model_max_length"] = metadata["llama.context_length"]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def convert(source: str | Path, folder: str | Path) -> None:
    """Write the HF folder. The weights are put in place last and whole: a folder with weights is complete.

    Raises:
        UserError: the file can't be read, or holds something that has no equal in HF's llama.
    """
    file = GgufFile(source)
    config = build_config(file)
    tokenizer = build_tokenizer(file)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    texts = {
        "config.json": config,
        "generation_config.json": special,
        "tokenizer_config.json": build_tokenizer_config(file),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    partial = folder / "model.safetensors.partial"
    save_file(convert_tensors(file, config), partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")


def main() -> int:
    """Command line: convert, or say in one line why not."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        convert(*sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{sys.argv[2]}: converted from {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
