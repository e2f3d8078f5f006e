"""Small models of every family whose elements are all different integers, and what each trainer rank and
engine rank holds of them.

Both sides are written down a second time here, with plain numpy, as Megatron's and vLLM's documentation state
them; the plan is not used.
"""

from dataclasses import replace

import numpy as np

from megagrpo.models import families
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.parallel.layout import ParallelLayout

families.load_all()
SHAPE = {
    "vocab_size": 101, "hidden_size": 8, "ffn_hidden_size": 24, "num_layers": 4, "num_attention_heads": 8,
    "num_query_groups": 4,
    "head_dim": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "rope_type": "default", "rope_parameters": {}, "raw": {},
}  # fmt: skip
MODELS = {
    "llama": HFConfig("llama", **SHAPE),
    "llama_tied": HFConfig("llama", **{**SHAPE, "tie_word_embeddings": True}),
    "qwen2": HFConfig("qwen2", **SHAPE),
    "qwen3": HFConfig("qwen3", **SHAPE),
    "qwen3_moe": HFConfig("qwen3_moe", **{**SHAPE, "raw": {"moe_intermediate_size": 12}}, num_experts=8),
}


def deeper(hf: HFConfig, layers: int) -> HFConfig:
    return replace(hf, num_layers=layers)


def hf_tensors(hf: HFConfig) -> dict[str, np.ndarray]:
    """Every tensor of the HF checkpoint, by name; no two elements are equal."""
    h, q, k = hf.hidden_size, hf.num_attention_heads * hf.head_dim, hf.num_query_groups * hf.head_dim
    shapes = {"model.embed_tokens.weight": (hf.vocab_size, h), "model.norm.weight": (h,)}
    if not hf.tie_word_embeddings:
        shapes["lm_head.weight"] = (hf.vocab_size, h)
    for layer in range(hf.num_layers):
        p = f"model.layers.{layer}."
        shapes |= {f"{p}input_layernorm.weight": (h,), f"{p}post_attention_layernorm.weight": (h,)}
        shapes |= {f"{p}self_attn.{n}_proj.weight": (rows, h) for n, rows in (("q", q), ("k", k), ("v", k))}
        shapes[f"{p}self_attn.o_proj.weight"] = (h, q)
        if hf.model_type == "qwen2":
            shapes |= {f"{p}self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", q), ("k", k), ("v", k))}
        if hf.model_type.startswith("qwen3"):
            shapes |= {f"{p}self_attn.{n}_norm.weight": (hf.head_dim,) for n in "qk"}
        mlps = [f"{p}mlp."]
        ffn = hf.ffn_hidden_size
        if hf.num_experts:
            shapes[f"{p}mlp.gate.weight"] = (hf.num_experts, h)
            mlps, ffn = (
                [f"{p}mlp.experts.{expert}." for expert in range(hf.num_experts)],
                hf.raw["moe_intermediate_size"],
            )
        for m in mlps:
            shapes |= {
                f"{m}gate_proj.weight": (ffn, h),
                f"{m}up_proj.weight": (ffn, h),
                f"{m}down_proj.weight": (h, ffn),
            }
    tensors, start = {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(start, start + count).reshape(shape)
        start += count
    return tensors


def parameter_rules(hf: HFConfig):
    return FAMILIES.get(hf.model_type).parameter_rules(hf)


def held_by(
    hf: HFConfig, tensors: dict[str, np.ndarray], layout: ParallelLayout, rank: int, padded_vocab: int
) -> dict[str, np.ndarray]:
    """A trainer rank's slices of the HF tensors; vocabulary padding is -1."""
    at = layout.coordinates(rank)
    chunks = layout.chunk_layers(hf.num_layers)
    own_layers = [
        sum(chunks[:chunk]) + number
        for chunk, count in enumerate(chunks)
        if chunk % layout.pp == at.pp
        for number in range(count)
    ]
    held = {}
    for name, tensor in tensors.items():
        shards, shard = layout.tp, at.tp
        if ".layers." in name:
            if int(name.split(".")[2]) not in own_layers:
                continue
            if ".experts." in name:
                each = hf.num_experts // layout.ep
                if int(name.split(".experts.")[1].split(".")[0]) // each != at.ep:
                    continue
                shards, shard = layout.expert_tp, rank % layout.expert_tp
        elif at.pp != (0 if "embed_tokens" in name else layout.pp - 1):
            continue
        if "norm" in name or "mlp.gate." in name:
            held[name] = tensor
        elif "o_proj" in name or "down_proj" in name:
            held[name] = np.split(tensor, shards, axis=1)[shard]
        else:
            if "embed" in name or "lm_head" in name:
                tensor = np.concatenate([tensor, np.full((padded_vocab - len(tensor), tensor.shape[1]), -1)])
            held[name] = np.split(tensor, shards)[shard]
    return held


def kept_by(
    hf: HFConfig, tensors: dict[str, np.ndarray], tp: int, ep: int, rank: int
) -> dict[str, np.ndarray]:
    """What rank `rank` of a vLLM engine holds, fused as vLLM fuses; its vocabulary padding is -2."""
    kept = {}
    kv_shards = min(tp, hf.num_query_groups)
    kv_rank = rank // (tp // kv_shards)
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = -(-hf.vocab_size // 64) * 64
            padded = np.concatenate([tensor, np.full((rows - len(tensor), tensor.shape[1]), -2)])
            kept[name] = np.split(padded, tp)[rank]
        elif "q_proj" in name:
            k, v = (np.split(tensors[name.replace("q_proj", f"{n}_proj")], kv_shards)[kv_rank] for n in "kv")
            kept[name.replace("q_proj", "qkv_proj")] = np.concatenate([np.split(tensor, tp)[rank], k, v])
        elif "gate_proj" in name:
            parts = [np.split(tensors[n], tp)[rank] for n in (name, name.replace("gate_proj", "up_proj"))]
            kept[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts)
        elif "o_proj" in name or "down_proj" in name:
            kept[name] = np.split(tensor, tp, axis=1)[rank]
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            kept[name] = tensor
    if hf.num_experts:
        cut = tp // ep
        experts = np.split(np.arange(hf.num_experts), ep)[rank // cut]
        for layer in range(hf.num_layers):
            p = f"model.layers.{layer}.mlp.experts."
            part = {
                n: [
                    np.split(tensors[f"{p}{e}.{n}_proj.weight"], cut, axis=1 if n == "down" else 0)[
                        rank % cut
                    ]
                    for e in experts
                ]
                for n in ("gate", "up", "down")
            }
            kept[f"{p}w13_weight"] = np.stack(
                [np.concatenate(pair) for pair in zip(part["gate"], part["up"], strict=True)]
            )
            kept[f"{p}w2_weight"] = np.stack(part["down"])
    return kept
