"""Reads and checks an HF folder's config.json: every field is read, known to change nothing, or refused, and
fields that contradict each other are named. Imports no torch.
"""

import difflib
import json
from pathlib import Path
from typing import Any

from megagrpo.config.expert_fields import count_experts
from megagrpo.errors import UserError
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily, use_own_family
from megagrpo.models.rope_fields import read_rope, rope_problems

# Fields of a config.json that do not change the forward pass in training.
NEUTRAL_FIELDS = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "is_llama_config", "transformers.js_config",
    "_name_or_path", "sliding_window",
    "max_window_layers", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder", "_attn_implementation", "attn_implementation", "id2label", "label2id",
    "problem_type", "task_specific_params",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
# Fields that every family reads.
READ_FIELDS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
    "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
}  # fmt: skip
# Fields whose listed values are what the families compute; any other value is refused.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
}
REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# Families that Megatron-core 0.16.1 and the attention of models/attention.py can't express, and why.
BEYOND_MEGATRON = {
    "gpt_oss": "needs biases on experts (Megatron's dispatchers refuse them), a sink in each head's soft-max "
    "(torch's attention has none) and MXFP4 weights; none of them is here",
    "gemma3_text": "needs norms behind attention and MLP (Megatron's layer has none there), a scaled "
    "embedding and two rotary embeddings by layer; none of them is here",
}
BEYOND_MEGATRON["gemma3"] = BEYOND_MEGATRON["gemma3_text"]
# Two names of one thing, of which a file may hold both if they agree.
SYNONYMS = (("num_experts", "num_local_experts"), ("dtype", "torch_dtype"))


def load_config_json(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"model.path: {folder}: no config.json there")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON, UTF-8, or nested without end
        raise UserError(f"{path}: not valid JSON ({type(error).__name__}: {error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    return raw


def read_hf_config(folder: str | Path, own_family: str | None = None) -> HFConfig:
    """Read and check the config.json of an HF folder.

    Args:
        own_family: `model.family`, which this process takes for the folder's from here on; None: the
            registered family of its model_type.

    Raises:
        UserError: missing file, unknown family, or fields that are missing, contradict each other, or change
            the maths and are not supported; one line each.
    """
    raw = load_config_json(folder)
    from megagrpo.models import families

    families.load_all()
    model_type = str(raw.get("model_type", ""))
    if own_family is not None:
        use_own_family(own_family, model_type)
    if model_type not in FAMILIES.names():
        raise UserError(f"{Path(folder) / 'config.json'}: {_unknown_family(model_type, raw)}")
    family = FAMILIES.get(model_type)
    problems = _missing_fields(raw) or _contradictions(raw) + _misfits(raw, family)
    if problems:
        raise UserError("\n".join(f"{Path(folder) / 'config.json'}: {problem}" for problem in problems))
    values = family.defaults | raw
    rope, heads = read_rope(values), values["num_attention_heads"]
    return HFConfig(
        model_type=model_type,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_attention_heads=heads,
        num_query_groups=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        max_position_embeddings=values["max_position_embeddings"],
        rope_theta=float(rope["rope_theta"]),
        rope_type=rope["rope_type"],
        rope_parameters=rope,
        raw=values,
        num_experts=count_experts(values),
    )


def _misfits(raw: dict[str, Any], family: ModelFamily) -> list[str]:
    return _unsupported_fields(raw, family) + rope_problems(raw, family.rope_types) + family.check(raw)


def _unknown_family(model_type: str, raw: dict[str, Any]) -> str:
    """Return why a model of no known family is refused: what it needs that is missing here, where that is
    known; else the known family nearest to it and the fields in which they differ.
    """
    if model_type in BEYOND_MEGATRON:
        return f"model_type: {model_type!r}: {BEYOND_MEGATRON[model_type]}"
    try:
        FAMILIES.get(model_type)
    except UserError as error:
        unknown = str(error)
    if _missing_fields(raw):
        return unknown
    fields = {name: _fields_that_differ(raw, FAMILIES.get(name)) for name in FAMILIES.names()}
    near = min(fields, key=lambda name: (len(fields[name]), -_similarity(name, model_type)))
    return f"{unknown}; by its fields it is nearest to {near}, with " + (
        f"differences in {', '.join(fields[near])}" if fields[near] else "no field that differs"
    )


def _fields_that_differ(raw: dict[str, Any], family: ModelFamily) -> list[str]:
    own, names = family.defaults | family.example_fields, []
    if (count_experts(raw) is None) != (count_experts(own) is None):
        names.append("num_experts")
    if ("kv_lora_rank" in raw) != ("kv_lora_rank" in own):
        names.append("kv_lora_rank")
    return names + [problem.partition(":")[0] for problem in _misfits(raw, family)]


def _similarity(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _missing_fields(raw: dict[str, Any]) -> list[str]:
    problems = [f"{name}: missing" for name in REQUIRED_FIELDS if raw.get(name) is None]
    for name in (*REQUIRED_FIELDS, "num_key_value_heads", "head_dim"):
        value = raw.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            problems.append(f"{name}: {value!r}: must be a whole number above 0")
    return problems


def _contradictions(raw: dict[str, Any]) -> list[str]:
    problems = []
    for name, other in SYNONYMS:
        found = [raw[each] for each in (name, other) if raw.get(each) is not None]
        values = [str(value).removeprefix("torch.") for value in found]
        if len(set(values)) > 1:
            problems.append(f"{name}: {values[0]} contradicts {other}: {values[1]}; keep one of them")
    heads, groups = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    if heads % groups:
        problems.append(f"num_attention_heads: {heads}: not a multiple of num_key_value_heads {groups}")
    if raw.get("head_dim") is None and raw["hidden_size"] % heads:
        problems.append(f"hidden_size: {raw['hidden_size']}: not a multiple of num_attention_heads {heads}")
    return problems


def _unsupported_fields(raw: dict[str, Any], family: ModelFamily) -> list[str]:
    allowed_values = {**REQUIRED_VALUES, **family.extra_values}
    problems = []
    for name, value in raw.items():
        if name in NEUTRAL_FIELDS or name in READ_FIELDS or name in family.read_fields:
            continue
        if value is None or name.startswith("_"):
            continue  # transformers' own notes, and what is not set
        if name == "layer_types":
            kinds = set(map(str, value)) if isinstance(value, list) else {str(value)}
            if kinds != {"full_attention"}:
                problems.append(f"layer_types: {sorted(kinds)}: only full_attention is supported")
        elif name == "auto_map":
            problems.append(
                f"auto_map: {value!r}: code that the folder brings is never run; "
                "model.ignore_fields=[auto_map] takes this package's own for it"
            )
        elif name in allowed_values:
            if value not in allowed_values[name]:
                allowed = ", ".join(map(repr, allowed_values[name]))
                problems.append(
                    f"{name}: {value!r}: changes the forward pass and is not supported (supported: {allowed})"
                )
        else:
            problems.append(
                f"{name}: {value!r}: not a field that family {raw.get('model_type')!r} knows; "
                f"it could change the forward pass; model.ignore_fields=[{name}] leaves it out"
            )
    return problems
