"""The contract of a model family, and the checks that all families share."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.errors import UserError
from megagrpo.models.rules import ParameterRule
from megagrpo.registry import Registry, require_methods

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
SUPPORTED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True)
class HFConfig:
    """The parts of a Hugging Face config that the families read, standardised over transformers versions."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rope_type: str
    rope_parameters: dict[str, Any]
    raw: dict[str, Any]
    num_experts: int | None = None  # of each layer; None: a dense model


class ModelFamily(ABC):
    """One architecture: what Megatron builds for it and how its parameters map to HF tensors."""

    extra_values: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012 (a constant table of the class)
    # fields of config.json that this family reads beside the shared ones
    read_fields: frozenset[str] = frozenset()

    @abstractmethod
    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig that this family sets beside the shared ones."""

    @abstractmethod
    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the rules of all parameters."""

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return what this family refuses in a config.json beyond single values, one line each."""
        return []


def _read_family(attribute: Any) -> ModelFamily:
    if isinstance(attribute, ModelFamily):
        return attribute
    if not (isinstance(attribute, type) and issubclass(attribute, ModelFamily)):
        raise UserError("it derives from no ModelFamily (megagrpo/models/family.py)")
    require_methods(
        attribute, {"transformer_config_fields": ["hf"], "parameter_rules": ["hf"], "check": ["raw"]}
    )
    if missing := sorted(attribute.__abstractmethods__):
        raise UserError(f"class {attribute.__name__} lacks {', '.join(f'{name}()' for name in missing)}")
    return attribute()


FAMILIES: Registry[ModelFamily] = Registry("model family", _read_family)


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a model's HF folder."""

    name: str
    shape: tuple[int, ...]
    rule: ParameterRule


def checkpoint_tensors(hf: HFConfig) -> list[CheckpointTensor]:
    """Return the tensors of a model's HF folder, tied ones once."""
    return [
        CheckpointTensor(name, tuple(map(int, shape)), rule)
        for rule in FAMILIES.get(hf.model_type).parameter_rules(hf)
        if not rule.is_tied_copy
        for layer, expert in rule.places(hf.num_layers)
        for name, shape in zip(rule.hf_names(layer, expert), rule.shapes, strict=True)
    ]


def read_hf_config(folder: str | Path) -> HFConfig:
    """Read and check the config.json of an HF folder. Imports no torch.

    Raises:
        UserError: missing file, unknown family, or a field that changes the maths and is not supported; one
            line each.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"model.path: {folder}: no config.json there")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    from megagrpo.models import families

    families.load_all()
    model_type = raw.get("model_type", "")
    family = FAMILIES.get(model_type)
    problems = _unsupported_fields(raw, family) + _rope_problems(raw) + family.check(raw)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    rope = _rope_parameters(raw)
    heads = raw["num_attention_heads"]
    return HFConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        ffn_hidden_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_query_groups=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=float(rope["rope_theta"]),
        rope_type=rope["rope_type"],
        rope_parameters=rope,
        raw=raw,
        num_experts=count_experts(raw),
    )


def count_experts(raw: dict[str, Any]) -> int | None:
    """Return the experts of each layer: transformers 5 writes `num_local_experts`, older versions
    `num_experts`.
    """
    return raw.get("num_local_experts", raw.get("num_experts"))


def _unsupported_fields(raw: dict[str, Any], family: ModelFamily) -> list[str]:
    allowed_values = {**REQUIRED_VALUES, **family.extra_values}
    problems = []
    for name, value in raw.items():
        if name in NEUTRAL_FIELDS or name in READ_FIELDS or name in family.read_fields:
            continue
        if name == "layer_types":
            if set(value) != {"full_attention"}:
                problems.append(f"layer_types: {sorted(set(value))}: only full_attention is supported")
        elif name in allowed_values:
            if value not in allowed_values[name]:
                allowed = ", ".join(map(repr, allowed_values[name]))
                problems.append(
                    f"{name}: {value!r}: changes the forward pass and is not supported (supported: {allowed})"
                )
        else:
            problems.append(
                f"{name}: {value!r}: not a field that family {raw.get('model_type')!r} knows; "
                "it could change the forward pass"
            )
    problems += [
        f"{name}: missing"
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        if name not in raw
    ]
    return problems


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling (type or rope_type).
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return rope


def _rope_problems(raw: dict[str, Any]) -> list[str]:
    rope_type = _rope_parameters(raw)["rope_type"]
    if rope_type not in SUPPORTED_ROPE:
        return [f"rope_scaling: type {rope_type!r} is not supported (supported: {', '.join(SUPPORTED_ROPE)})"]
    return []
