"""Rank 0 of each recipe's world, on meta: parameters, and the bytes that Megatron allocates for them."""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rehearse import case, run_cases
from small_models import BF16
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.config.load import load_config
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.stage import build_stage_model
from megagrpo.models.transformer_config import build_transformer_config
from megagrpo.parallel.groups import build_groups
from megagrpo.parallel.layout import build_layout

SHARED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
MODELS = {  # what the models' own config.json says
    "Qwen3-8B": SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_hidden_layers": 36,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 151936,
    },
    "Llama-3.1-8B-Instruct": SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "vocab_size": 128256,
    },
}
FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor}
WORLD = 8


class ToMeta(torch.overrides.TorchFunctionMode):
    """Every factory makes a meta tensor, and moves keep it one: no memory, whatever device is named."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            kwargs |= {"device": "meta"}
            kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and args[0].is_meta and not isinstance(args[1], torch.dtype):
            return args[0]
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def _bytes(file: str) -> dict[str, float]:
    config = load_config(file, [])
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[Path(config.model.path).name]))
    hf, layout = read_hf_config(folder), build_layout(config.parallel, WORLD)
    groups = build_groups(layout, 60)
    with ToMeta():
        transformer = build_transformer_config(hf, groups, BF16, sp=config.parallel.sp)
        model = build_stage_model(hf, transformer, groups, torch.device("meta"), use_te=False)
    count = sum(parameter.numel() for *_, parameter in model.named_rules())
    tokens, width = config.update.max_tokens_per_microbatch, hf.hidden_size
    # An estimate: bfloat16 values that a token leaves in each layer for the backward, 8 of the hidden size
    # (inputs of norms and linears, q, k, v, the attention's output) and 3 of the inner size (fused SwiGLU).
    kept = 2 * (8 * width + 3 * hf.ffn_hidden_size)
    activations = tokens * hf.num_layers * kept / layout.tp
    held = {
        "parameters": count,
        "weights": 2 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count / groups.dp_cp.size(),
        "reference": 2 * count if config.algorithm.kl.coef else 0,
        "activations": activations,
        "engine_weights": 2 * count * layout.tp / config.engine.server.tensor_parallel,
    }
    return {name: float(value) for name, value in held.items()}


def _register(file: Path) -> None:
    def run():
        return _bytes(str(file))

    run.__name__ = file.name
    case(run)


for RECIPE in sorted(Path("configs").glob("*.yaml")):
    if RECIPE.name != "gpu_base.yaml":
        _register(RECIPE)

if __name__ == "__main__":
    os.environ["WORLD_SIZE"] = str(WORLD)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    from megatron.core import parallel_state

    real = parallel_state.initialize_model_parallel  # a fake store holds no addresses for gloo

    def without_gloo(*args, **kwargs):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        return real(*args, create_gloo_process_groups=False, **kwargs)

    parallel_state.initialize_model_parallel = without_gloo
    run_cases()
