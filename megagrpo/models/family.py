"""The contract of a model family."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from megagrpo.errors import UserError
from megagrpo.models.rules import ParameterRule
from megagrpo.registry import Registry, require_methods


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
    raw: dict[str, Any]  # the file's fields, with the family's `defaults` for those that it lacks
    num_experts: int | None = None  # in each layer; None: a dense model

    @property
    def has_latent_attention(self) -> bool:
        """Say whether keys and values are made from a latent."""
        return self.raw.get("kv_lora_rank") is not None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        factor = self.rope_parameters.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        return self.raw.get("qk_rope_head_dim") or int(self.head_dim * (factor or 1.0))


class ModelFamily(ABC):
    """One architecture: what Megatron builds for it and how its parameters map to HF tensors."""

    extra_values: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012 (a constant table of the class)
    # what transformers takes where config.json lacks a field
    defaults: dict[str, Any] = {}  # noqa: RUF012 (a constant table of the class)
    # fields of config.json that this family reads beside the shared ones
    read_fields: frozenset[str] = frozenset()
    # types of rotary embedding that it supports beside those that all do
    rope_types: tuple[str, ...] = ()
    # fields that a tiny config.json of this family needs beside the shared ones
    example_fields: dict[str, Any] = {}  # noqa: RUF012 (a constant table of the class)

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


FAMILIES: Registry[ModelFamily] = Registry(
    "model family", _read_family, "one of yours that model.family names, FILE.py:CLASS"
)


def use_own_family(place: str, model_type: str) -> None:
    """Let a family of the user's be that of a `model_type` in this process.

    Args:
        place: FILE.py:CLASS, or a registered family's name.

    Raises:
        UserError: there is no such code, or it does not meet the contract.
    """
    FAMILIES.override(model_type, FAMILIES.find(place))


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
