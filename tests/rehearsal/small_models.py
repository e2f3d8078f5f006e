"""Small models, batches and updates that the workers share. Sets the device up, then imports Megatron."""

import dataclasses
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.device import device as device_module

DEVICE = device_module.setup()
from megatron.core import parallel_state  # noqa: E402

from megagrpo.config.training_sections import OptimizerConfig  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.precision import Precision  # noqa: E402
from megagrpo.models.stage import StageModel, build_stage_model  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.groups import ParallelGroups, build_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.policy.actor import Actor  # noqa: E402
from megagrpo.policy.batch import MicroBatch, MicroBatchBuilder, TrainSample  # noqa: E402
from megagrpo.policy.forward import loss_rows, row_logprobs  # noqa: E402
from megagrpo.policy.microbatches import PackingRules, SampleSize, plan_microbatches  # noqa: E402

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "vocab_size": 64,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BF16 = Precision(torch.bfloat16)
FP32 = Precision(torch.float32)


@dataclasses.dataclass
class Rehearsed:
    """An actor with the groups and batches it trains on."""

    actor: Actor
    groups: ParallelGroups
    batches: list[MicroBatch]

    def logprobs(self) -> float:
        """Sum of all log-probs; 0 on stages other than the last."""
        return sum(float(values.sum()) for values in self.actor.logprobs(self.batches, 1.0))

    def forward_backward(self) -> None:
        """Gradients of minus the summed log-probs."""

        def loss(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, None]:
            model = self.actor.model
            rows = row_logprobs(model, loss_rows(model, output, batch), batch.targets, 1.0)
            return -rows.logprobs.sum(), None

        self.actor.forward_backward(self.batches, loss)

    def update(self, lr: float = 1e-3) -> dict[str, float]:
        """Log-probs before and after one update, and the norm of its gradient."""
        before = self.logprobs()
        self.forward_backward()
        norm = self.actor.apply_gradients(lr).grad_norm
        return {"before": before, "grad_norm": norm, "after": self.logprobs()}


def build_model(
    model: dict[str, Any], precision: Precision, use_te: bool, groups: ParallelGroups, **fields: Any
) -> StageModel:
    """A model with seeded weights, the same ones under either spec."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(model))
    hf = read_hf_config(folder)
    config = build_transformer_config(hf, groups, precision, sp=groups.tp.size() > 1, use_te=use_te, **fields)
    stage = build_stage_model(hf, config, groups, DEVICE, use_te)
    for name, rule, *_, parameter in sorted(stage.named_rules(), key=lambda row: row[0]):
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{name} {groups.tp_rank if rule.split_dimension is not None else 0}".encode())
        )
        draw = torch.randn(parameter.shape, generator=generator) * 0.02
        parameter.data.copy_(draw + 1 if "norm" in name else draw)
    return stage


def rehearsed(
    model: dict[str, Any],
    precision: Precision,
    use_te: bool,
    alignment: int = 1,
    lengths: Sequence[int] = (7, 12, 3, 9),
    layout: dict[str, int] | None = None,
    **fields: Any,
) -> Rehearsed:
    """An actor in a world of its own; end it with `end`."""
    groups = build_groups(ParallelLayout(WORLD, **(layout or {})), 60)
    stage = build_model(model, precision, use_te, groups, **fields)
    draw = np.random.default_rng(0)
    samples = [
        TrainSample(
            (i, 0), tuple(draw.integers(3, 60, 5).tolist()), draw.integers(3, 60, n), np.zeros(n, np.float32)
        )
        for i, n in enumerate(lengths)
    ]
    rules = PackingRules(1024, alignment, packing=True, share_prompts=False)
    plan = plan_microbatches([SampleSize(s.key[0], 5, len(s.token_ids)) for s in samples], 1, rules, 0)[0]
    builder = MicroBatchBuilder(DEVICE, rules, 0, use_te, groups.cp.size(), groups.cp_rank)
    batches = [builder.build(part, lambda index: samples[index]) for part in plan]
    return Rehearsed(Actor(stage, OptimizerConfig()), groups, batches)


def end() -> None:
    """Forget Megatron's groups, so that the next case can build its own."""
    parallel_state.destroy_model_parallel()


def on(act: Callable[[Rehearsed], Any], *args: Any, **kwargs: Any) -> Any:
    """Return `act` of an actor that is built, and ended, for it."""
    try:
        return act(rehearsed(*args, **kwargs))
    finally:
        end()
