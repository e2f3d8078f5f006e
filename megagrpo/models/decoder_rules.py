"""Rules that decoder families share: embedding, norms, attention, gated MLP, head."""

from megagrpo.models.family import HFConfig
from megagrpo.models.rules import ParameterRule, Section, Size


class ModelSizes:
    """The lengths that tensors of decoder models have, each with the fields that it follows from."""

    def __init__(self, hf: HFConfig):
        self.hidden = Size(hf.hidden_size, "hidden_size")
        self.vocab = Size(hf.vocab_size, "vocab_size")
        self.ffn = Size(hf.ffn_hidden_size, "intermediate_size")
        self.head = Size(hf.head_dim, "head_dim")
        self.queries = Size(hf.num_attention_heads * hf.head_dim, "num_attention_heads x head_dim")
        self.keys = Size(hf.num_query_groups * hf.head_dim, "num_key_value_heads x head_dim")
        self.experts = Size(hf.num_experts or 0, "num_experts")


def qkv_rule(bias: bool, sizes: ModelSizes) -> ParameterRule:
    """Return the rule of the weight or the bias of the query, key and value projections."""
    layer, part = "model.layers.{layer}.self_attn.", "bias" if bias else "weight"
    rows = (sizes.queries, sizes.keys, sizes.keys)
    return ParameterRule(
        f"decoder.layers.{{layer}}.self_attention.linear_qkv.{part}",
        tuple(f"{layer}{name}_proj.{part}" for name in "qkv"),
        "qkv",
        tuple((row,) if bias else (row, sizes.hidden) for row in rows),
        engine=f"{layer}qkv_proj.{part}",
        is_quantized=not bias,
    )


def attention_rules(sizes: ModelSizes) -> list[ParameterRule]:
    """Return the rules of grouped-query attention without biases."""
    return [
        qkv_rule(False, sizes),
        ParameterRule(
            "decoder.layers.{layer}.self_attention.linear_proj.weight",
            ("model.layers.{layer}.self_attn.o_proj.weight",),
            "row",
            ((sizes.hidden, sizes.queries),),
            is_quantized=True,
        ),
    ]


def mlp_rules(hidden: Size, ffn: Size, layers: range | None = None, module: str = "") -> list[ParameterRule]:
    """Return the rules of a gated MLP.

    Args:
        hidden, ffn: its sizes.
        layers: that have it; None: all.
        module: within `mlp.` of a layer, with a dot behind it.
    """
    layer, target = f"model.layers.{{layer}}.mlp.{module}", f"decoder.layers.{{layer}}.mlp.{module}"
    return [
        ParameterRule(
            f"{target}linear_fc1.weight",
            (f"{layer}gate_proj.weight", f"{layer}up_proj.weight"),
            "gate_up",
            ((ffn, hidden),) * 2,
            engine=f"{layer}gate_up_proj.weight",
            is_quantized=True,
            layers=layers,
        ),
        ParameterRule(
            f"{target}linear_fc2.weight",
            (f"{layer}down_proj.weight",),
            "row",
            ((hidden, ffn),),
            is_quantized=True,
            layers=layers,
        ),
    ]


def norm_rule(megatron: str, hf: str, size: int, section: Section = "layer") -> ParameterRule:
    """Return the rule of a norm's weight."""
    return ParameterRule(megatron, (hf,), "replicated", ((size,),), section)


def block_rules(
    hf: HFConfig, mlp: list[ParameterRule], attention: list[ParameterRule] | None = None
) -> list[ParameterRule]:
    """Return the rules that all decoder families of this package share, around those of an MLP and of an
    attention (None: `attention_rules`): embedding, norms, head.
    """
    sizes, layer, target = ModelSizes(hf), "model.layers.{layer}.", "decoder.layers.{layer}."
    vocabulary, embedding = ((sizes.vocab, sizes.hidden),), "model.embed_tokens.weight"
    tied = hf.tie_word_embeddings
    return [
        ParameterRule("embedding.word_embeddings.weight", (embedding,), "vocab", vocabulary, "embedding"),
        norm_rule(f"{target}input_layernorm.weight", f"{layer}input_layernorm.weight", sizes.hidden),
        *(attention_rules(sizes) if attention is None else attention),
        norm_rule(
            f"{target}pre_mlp_layernorm.weight", f"{layer}post_attention_layernorm.weight", sizes.hidden
        ),
        *mlp,
        norm_rule("decoder.final_layernorm.weight", "model.norm.weight", sizes.hidden, "head"),
        ParameterRule(
            "output_layer.weight",
            (embedding if tied else "lm_head.weight",),
            "vocab",
            vocabulary,
            "head",
            is_tied_copy=tied,
        ),
    ]


def shared_rules(hf: HFConfig) -> list[ParameterRule]:
    """Return the rules of a dense decoder: `block_rules` around a gated MLP."""
    sizes = ModelSizes(hf)
    return block_rules(hf, mlp_rules(sizes.hidden, sizes.ffn))
