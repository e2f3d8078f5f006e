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
EXPERTS = {
    "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 2, "v_head_dim": 2}
MODELS = {
    "llama": HFConfig("llama", **SHAPE),
    "llama_tied": HFConfig("llama", **{**SHAPE, "tie_word_embeddings": True}),
    "qwen2": HFConfig("qwen2", **SHAPE),
    "qwen3": HFConfig("qwen3", **SHAPE),
    "qwen3_moe": HFConfig("qwen3_moe", **{**SHAPE, "raw": {"moe_intermediate_size": 12}}, num_experts=8),
    "mixtral": HFConfig("mixtral", **SHAPE, num_experts=8),
    "deepseek_v3": HFConfig(
        "deepseek_v3", **{**SHAPE, "raw": {**EXPERTS, **LATENT, "q_lora_rank": 16}}, num_experts=8
    ),
    "deepseek_v3_moonlight": HFConfig(
        "deepseek_v3", **{**SHAPE, "raw": {**EXPERTS, **LATENT, "q_lora_rank": None}}, num_experts=8
    ),
    "glm4_moe": HFConfig(
        "glm4_moe",
        **{**SHAPE, "raw": {**EXPERTS, "attention_bias": True, "use_qk_norm": True}},
        num_experts=8,
    ),
}


NAMES = {"mixtral": ("w1", "w3", "w2")}


def block_of(hf: HFConfig, layer: int) -> str:
    return f"model.layers.{layer}.{'block_sparse_moe' if hf.model_type == 'mixtral' else 'mlp'}."


def latent_shapes(hf: HFConfig, p: str) -> dict[str, tuple[int, ...]]:
    """Tensors of an attention as in DeepSeek-V2's paper, section 2.1: parts without a position, then
    those with one.
    """
    h, heads, raw = hf.hidden_size, hf.num_attention_heads, hf.raw
    nope, rope, v, latent = (
        raw[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    queries, rank = heads * (nope + rope), raw["q_lora_rank"]
    shapes = {f"{p}q_proj.weight": (queries, h)}
    if rank:
        shapes = {f"{p}q_a_proj.weight": (rank, h), f"{p}q_a_layernorm.weight": (rank,)}
        shapes[f"{p}q_b_proj.weight"] = (queries, rank)
    return shapes | {
        f"{p}kv_a_proj_with_mqa.weight": (latent + rope, h),
        f"{p}kv_a_layernorm.weight": (latent,),
        f"{p}kv_b_proj.weight": (heads * (nope + v), latent),
        f"{p}o_proj.weight": (h, heads * v),
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
        if "kv_lora_rank" in hf.raw:
            shapes |= latent_shapes(hf, f"{p}self_attn.")
        else:
            shapes |= {
                f"{p}self_attn.{n}_proj.weight": (rows, h) for n, rows in (("q", q), ("k", k), ("v", k))
            }
            shapes[f"{p}self_attn.o_proj.weight"] = (h, q)
        if hf.model_type in ("qwen2", "glm4_moe"):
            shapes |= {f"{p}self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", q), ("k", k), ("v", k))}
        if hf.model_type.startswith(("qwen3", "glm4")):
            shapes |= {f"{p}self_attn.{n}_norm.weight": (hf.head_dim,) for n in "qk"}
        mlps = {f"{p}mlp.": hf.ffn_hidden_size}
        if hf.num_experts and layer >= hf.raw.get("first_k_dense_replace", 0):
            block, ffn = block_of(hf, layer), hf.raw.get("moe_intermediate_size", hf.ffn_hidden_size)
            shapes[f"{block}gate.weight"] = (hf.num_experts, h)
            mlps = {f"{block}experts.{expert}.": ffn for expert in range(hf.num_experts)}
            if "n_shared_experts" in hf.raw:
                mlps[f"{block}shared_experts."] = ffn * hf.raw["n_shared_experts"]
                shapes[f"{block}gate.e_score_correction_bias"] = (hf.num_experts,)
        for m, ffn in mlps.items():
            gate, up, down = NAMES.get(hf.model_type, ("gate_proj", "up_proj", "down_proj"))
            shapes |= {
                f"{m}{gate}.weight": (ffn, h),
                f"{m}{up}.weight": (ffn, h),
                f"{m}{down}.weight": (h, ffn),
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
        if "norm" in name or "mlp.gate." in name or "moe.gate." in name:
            held[name] = tensor
        elif any(part in name for part in ("o_proj", "down_proj", ".w2.")):
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
    is_latent = "kv_lora_rank" in hf.raw
    kv_shards = min(tp, hf.num_query_groups)
    kv_rank = rank // (tp // kv_shards)
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = -(-hf.vocab_size // 64) * 64
            padded = np.concatenate([tensor, np.full((rows - len(tensor), tensor.shape[1]), -2)])
            kept[name] = np.split(padded, tp)[rank]
        elif "q_a_proj" in name:
            both = [tensor, tensors[name.replace("q_a_proj", "kv_a_proj_with_mqa")]]
            kept[name.replace("q_a_proj", "fused_qkv_a_proj")] = np.concatenate(both)  # on every rank
        elif "kv_a_proj_with_mqa" in name:
            if hf.raw["q_lora_rank"] is None:
                kept[name] = tensor
        elif any(part in name for part in ("q_b_proj", "kv_b_proj")) or ("q_proj" in name and is_latent):
            kept[name] = np.split(tensor, tp)[rank]
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
        for layer in range(hf.raw.get("first_k_dense_replace", 0), hf.num_layers):
            p = f"{block_of(hf, layer)}experts."
            names = NAMES.get(hf.model_type, ("gate_proj", "up_proj", "down_proj"))
            part = {
                n: [
                    np.split(tensors[f"{p}{e}.{name}.weight"], cut, axis=1 if n == "down" else 0)[rank % cut]
                    for e in experts
                ]
                for n, name in zip(("gate", "up", "down"), names, strict=True)
            }
            kept[f"{p}w13_weight"] = np.stack(
                [np.concatenate(pair) for pair in zip(part["gate"], part["up"], strict=True)]
            )
            kept[f"{p}w2_weight"] = np.stack(part["down"])
    return kept
