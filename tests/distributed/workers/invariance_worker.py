"""Worker: three steps of GRPO give the dense float64 reference's losses, grad-norms and weights in every
layout and packing.

Arguments: model folder, file with the reference's result, then cases such as `tp2pp2sp:packed`: sizes of 1
    may be left out (dp is what is
left), `=` writes the pipeline chunks out.
"""

import os
import re
import sys
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import dense_grpo  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from reported_cases import reported_case  # noqa: E402

from megagrpo.algorithms.algorithm import Algorithm  # noqa: E402
from megagrpo.config.schema import Config  # noqa: E402
from megagrpo.config.training_sections import ParallelConfig  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.alignment import token_alignment  # noqa: E402
from megagrpo.parallel.groups import build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.policy.actor import Actor  # noqa: E402
from megagrpo.policy.batch import MicroBatchBuilder  # noqa: E402
from megagrpo.policy.microbatches import PackingRules  # noqa: E402
from megagrpo.policy.reference import Reference  # noqa: E402
from megagrpo.policy.update import PolicyUpdater  # noqa: E402
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts  # noqa: E402
from megagrpo.types import Completion, Prompt, Reward  # noqa: E402
from megagrpo.weights.export import WeightExporter  # noqa: E402

TOLERANCE = 1e-5  # relative, float32 against float64 after twelve AdamW updates

# name -> (packing, share_prompts, max_tokens_per_microbatch); `equal` pads every micro-batch to the maximum
PACKINGS = {
    "packed": (True, True, 200),
    "tiny": (True, True, 36),
    "unshared": (True, False, 64),
    "unpacked": (False, False, 64),
    "equal": (True, True, 48),
}


RECOMPUTE = {"full": ("full",), "selective": ("core_attn", "layernorm", "mlp")}


def make_config(folder: Path, recompute: tuple[str, ...]) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"source": "unused"},
            "rewards": {"functions": [{"name": "unused"}]},
            "rollout": {
                "temperature": dense_grpo.TEMPERATURE,
                "completions_per_prompt": dense_grpo.COMPLETIONS,
            },
            "algorithm": {
                "clip_low": dense_grpo.CLIP_LOW,
                "clip_high": dense_grpo.CLIP_HIGH,
                "advantage_std_epsilon": 0.0,
                "kl": {"coef": dense_grpo.KL_COEF, "estimator": "k3"},
            },
            "optimizer": {
                "lr": dense_grpo.LR,
                "clip_grad": dense_grpo.CLIP_GRAD,
                "eps": dense_grpo.EPS,
                "beta1": dense_grpo.BETA1,
                "beta2": dense_grpo.BETA2,
                "weight_decay": dense_grpo.WEIGHT_DECAY,
            },
            "update": {
                "mini_batches_per_step": dense_grpo.MINI_BATCHES,
                "epochs_per_step": dense_grpo.EPOCHS,
                "recompute": recompute,
            },
        }
    )


def make_rollouts(step: int, vocab_size: int) -> StepRollouts:
    """The reference's rollouts, each completion held by one rank only."""
    rows = dense_grpo.make_rollouts(step, vocab_size)
    prompts = [
        Prompt(group, "", next(row.prompt for row in rows if row.group == group))
        for group in range(dense_grpo.GROUPS)
    ]
    records, local = {}, {}
    for number, row in enumerate(rows):
        key, source = (row.group, row.place), number % dist.get_world_size()
        records[key] = CompletionRecord(
            key, source, len(row.tokens), "stop", Reward(row.reward, {"unused": row.reward}), 0
        )
        if source == dist.get_rank():
            local[key] = Completion.sampled(
                row.group,
                row.place,
                row.tokens,
                np.full(len(row.tokens), -1.0, np.float32),
                "stop",
                ((0, 0),),
                "",
            )
    return StepRollouts(prompts, records, local, dense_grpo.COMPLETIONS)


def relative(value: float, expected: float) -> float:
    # A loss is a mean of terms of size 1 (standardised advantages) that nearly cancel: float32 rounds the
    # terms, not the sum.
    return abs(value - expected) / max(abs(expected), 0.1)


def check(folder: Path, expected: dict, layout_name: str, packing_name: str) -> None:
    sizes = {name: int(size) for name, size in re.findall(r"(etp|ep|tp|cp|vpp|pp)(\d+)", layout_name)}
    uneven = {"layers_first_stage": 1} if "uneven" in layout_name else {}
    written = {"pipeline_layout": layout_name.split("=")[1]} if "=" in layout_name else {}
    layout = ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes, **uneven, **written)
    sp, recompute = (
        "sp" in layout_name,
        next((modes for name, modes in RECOMPUTE.items() if name in layout_name), ()),
    )
    packing, share, max_tokens = PACKINGS[packing_name]
    config = make_config(folder, recompute)
    groups = build_groups(layout, timeout_seconds=120)
    hf = read_hf_config(folder)

    def load():
        transformer_config = build_transformer_config(
            hf,
            groups,
            build_precision("fp32"),
            sp,
            recompute,
            moe_dispatcher="allgather" if "allgather" in layout_name else "alltoall",
            router_aux_loss_coef=expected["balance_coefficient"],
        )
        return load_stage_model(str(folder), hf, transformer_config, groups, DEVICE, use_te=False)

    overlap = "overlap" in layout_name
    actor, reference = Actor(load(), config.optimizer, overlap, overlap), Reference(load())
    rules = PackingRules(
        max_tokens,
        max_tokens if packing_name == "equal" else token_alignment(ParallelConfig(**sizes, sp=sp), "fp32"),
        packing,
        share,
        layout.min_microbatches,
        layout.microbatch_multiple,
    )
    updater = PolicyUpdater(
        actor=actor,
        reference=reference,
        algorithm=Algorithm(config.algorithm, dense_grpo.COMPLETIONS, 64),
        groups=groups,
        layout=layout,
        builder=MicroBatchBuilder(DEVICE, rules, 0, False, layout.cp, groups.cp_rank),
        rules=rules,
        update=config.update,
        rollout=config.rollout,
        rewards=config.rewards,
    )
    losses, norms, load_ratios = [], [], []
    for step in range(dense_grpo.STEPS):
        rollouts = make_rollouts(step, hf.vocab_size)
        result = updater.run(
            rollouts, lambda k: dense_grpo.LR, lambda metrics, gap: losses.append(metrics["loss"])
        )
        norms += [applied.grad_norm for applied in result.applied]
        if isinstance(expected["loads"][0], torch.Tensor):
            load_ratios.append(
                [result.metrics[f"expert_load_ratio/layer_{layer}"] for layer in range(hf.num_layers)]
            )
    assert len(losses) == len(norms) == len(expected["updates"])
    for update, (loss, norm, (want_loss, want_norm)) in enumerate(
        zip(losses, norms, expected["updates"], strict=True)
    ):
        assert relative(loss, want_loss) <= TOLERANCE, (
            f"{layout_name}:{packing_name} update {update}: loss {loss} instead of {want_loss}"
        )
        assert relative(norm, want_norm) <= TOLERANCE, (
            f"{layout_name}:{packing_name} update {update}: norm {norm} instead of {want_norm}"
        )
    for ratios, loads in zip(load_ratios, expected["loads"], strict=bool(load_ratios)):
        # Two scores that differ by less than float32's rounding may swap an expert: one token more or less.
        torch.testing.assert_close(
            torch.tensor(ratios, dtype=torch.float64), loads.amax(1) / loads.mean(1), rtol=0, atol=0.02
        )
    for name, tensor in WeightExporter(actor.model).tensors():
        want = expected["weights"][name]
        error = float((tensor.double().cpu() - want).norm() / want.norm())
        assert error <= TOLERANCE, f"{layout_name}:{packing_name}: weights of {name} off by {error:.1e}"


def main() -> None:
    folder, reference, *cases = sys.argv[1:]
    expected = torch.load(reference)
    for case in cases:
        with reported_case(case):
            check(Path(folder), expected, *case.split(":"))
        destroy_groups()


if __name__ == "__main__":
    main()
