"""Worker: losses x aggregations with a correction, in several layouts, against the dense result and against
one rank.

Arguments: model folder, file with the dense results, file with the metrics of one rank (written by a launch
    of one rank), then cases
`layout:all` (every loss and aggregation of the dense results) or `layout:some`
(every loss, another aggregation for each).
"""

import os
import re
import sys
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import dense_update as dense  # noqa: E402
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
from megagrpo.parallel.groups import ParallelGroups, build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.policy.actor import Actor  # noqa: E402
from megagrpo.policy.batch import MicroBatchBuilder  # noqa: E402
from megagrpo.policy.logprob_gap import LogprobGap  # noqa: E402
from megagrpo.policy.microbatches import PackingRules  # noqa: E402
from megagrpo.policy.reference import Reference  # noqa: E402
from megagrpo.policy.update import PolicyUpdater, UpdateResult  # noqa: E402
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts  # noqa: E402
from megagrpo.types import Completion, Prompt, Reward, Span  # noqa: E402
from megagrpo.weights.export import WeightExporter  # noqa: E402

TOLERANCE = 1e-5  # relative, float32 against float64


def make_config(folder: Path, loss: str, aggregation: str) -> Config:
    low, high = dense.CLIP[loss]
    correction = {
        "importance": "sequence",
        "importance_cap": dense.CAP,
        "band_low": dense.BAND[0],
        "band_high": dense.BAND[1],
    }
    correction |= {"reject": "geometric", "reject_low": dense.REJECT[0], "reject_high": dense.REJECT[1]}
    algorithm = {
        "loss": loss,
        "aggregation": aggregation,
        "clip_low": low,
        "clip_high": high,
        "advantage_std_epsilon": 0.0,
    }
    algorithm |= {"aggregation_constant": dense.CONSTANT} if aggregation == "constant" else {}
    algorithm |= {
        "kl": {"coef": dense.KL_COEF, "estimator": "k3"},
        "entropy_coef": dense.ENTROPY_COEF,
        "correction": correction,
    }
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"source": "unused"},
            "rewards": {"functions": [{"name": "unused"}]},
            "rollout": {"temperature": dense.TEMPERATURE, "completions_per_prompt": dense.COMPLETIONS},
            "algorithm": algorithm,
            "optimizer": {
                "lr": dense.learning_rate(aggregation),
                "clip_grad": 0.0,
                "eps": dense.EPS,
                "beta1": dense.BETA1,
                "beta2": dense.BETA2,
                "weight_decay": dense.WEIGHT_DECAY,
            },
            "update": {"epochs_per_step": 2},
        }
    )


def spans_of(row: dense.Row, rollout_logprobs: np.ndarray) -> tuple[Span, ...]:
    """The row's tokens, cut where sampled ones begin and end; `rollout_logprobs` are of the sampled ones."""
    places = np.split(np.arange(len(row.tokens)), np.diff(row.trained).nonzero()[0] + 1)
    logprobs = np.zeros(len(row.tokens), np.float32)
    logprobs[row.trained] = rollout_logprobs
    return tuple(
        Span(row.tokens[part], logprobs[part], 0)
        if row.trained[part[0]]
        else Span(row.tokens[part], None, 0, False)
        for part in places
    )


def make_rollouts(vocab_size: int, rollout_logprobs: dict) -> StepRollouts:
    """The dense rows, each held by one rank only."""
    rows = dense.make_rows(vocab_size)
    prompts = [
        Prompt(group, "", next(row.prompt for row in rows if row.group == group))
        for group in range(dense.GROUPS)
    ]
    records, local = {}, {}
    for number, row in enumerate(rows):
        source = number % dist.get_world_size()
        completion = Completion(*row.key, spans_of(row, rollout_logprobs[row.key]), row.finish, "")
        records[row.key] = CompletionRecord(
            row.key,
            source,
            len(row.tokens),
            row.finish,
            Reward(row.reward, {"unused": row.reward}),
            0,
            completion.untrained,
        )
        if source == dist.get_rank():
            local[row.key] = completion
    return StepRollouts(prompts, records, local, dense.COMPLETIONS)


def run_case(
    folder: Path,
    config: Config,
    groups: ParallelGroups,
    parallel: ParallelConfig,
    rollout_logprobs: dict,
    reference_folder: Path | None = None,
) -> tuple[UpdateResult, list[dict], list[dict[str, torch.Tensor]]]:
    """Two updates; returns the result, and the metrics and gradients of each update. The reference is the
    model itself unless it has a folder of its own.
    """
    hf, layout = read_hf_config(folder), groups.layout

    def load(folder: Path):
        transformer_config = build_transformer_config(
            hf, groups, build_precision("fp32"), parallel.sp, moe_dispatcher=parallel.moe_dispatcher
        )
        return load_stage_model(str(folder), hf, transformer_config, groups, DEVICE, use_te=False)

    actor = Actor(load(folder), config.optimizer)
    exporter = WeightExporter(actor.model)
    rules = PackingRules(
        48,
        token_alignment(parallel, "fp32"),
        min_microbatches=layout.min_microbatches,
        microbatch_multiple=layout.microbatch_multiple,
    )
    builder = MicroBatchBuilder(DEVICE, rules, 0, False, layout.cp, groups.cp_rank)
    algorithm = Algorithm(config.algorithm, dense.COMPLETIONS, dense.LIMIT)
    updater = PolicyUpdater(
        actor=actor,
        reference=Reference(load(reference_folder or folder)),
        algorithm=algorithm,
        groups=groups,
        layout=layout,
        builder=builder,
        rules=rules,
        update=config.update,
        rollout=config.rollout,
        rewards=config.rewards,
    )
    metrics: list[dict] = []
    gradients: list[dict] = []

    def collect(update: dict, gap: LogprobGap | None) -> None:
        assert (gap is None) == bool(metrics)  # before the first update alone
        metrics.append(dict(update))
        gradients.append(export_gradients(actor, exporter))

    result = updater.run(
        make_rollouts(hf.vocab_size, rollout_logprobs), lambda k: config.optimizer.lr, collect
    )
    return result, metrics, gradients


def export_gradients(actor: Actor, exporter: WeightExporter) -> dict[str, torch.Tensor]:
    """Full gradients by HF name: each rank's reduced part gathered, then exported in the place of the
    weights.
    """
    for buffer in (
        buffer for chunk in actor.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
    parameters = [parameter for *_, parameter in actor.model.named_rules()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    gradients = {name: tensor.double().cpu() for name, tensor in exporter.tensors()}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return gradients


def check_gap(name: str, result: UpdateResult, vocab_size: int, rollout_logprobs: dict) -> dict[str, float]:
    """Whether the token that is named is that token; which one it is may differ, since several are equally
    far off.
    """
    gap = result.logprob_gap
    row = next(row for row in dense.make_rows(vocab_size) if row.key == gap.key)
    assert gap.token_id == row.tokens[gap.position], name
    assert row.trained[gap.position], name
    sampled_before = int(row.trained[: gap.position].sum())
    assert gap.rollout_logprob == float(rollout_logprobs[gap.key][sampled_before]), name
    return {"logprob_gap": gap.gap}


def close(value: float, expected: float, aggregation: str) -> bool:
    # Sums of signed terms nearly cancel, and float32 rounds the terms, not the sum: they are of size 0.1 to 1
    # in a mean over tokens, some seven tokens together under `sequence_sum`.
    return abs(value - expected) <= TOLERANCE * max(
        abs(expected), 0.7 if aggregation == "sequence_sum" else 0.1
    )


def check(
    name: str, expected: dict, result: UpdateResult, metrics: list[dict], gradients: list[dict]
) -> None:
    """Compare with the dense result."""
    aggregation = name.split()[-1]
    assert result.trained_tokens == expected["trained_tokens"], name
    for number, (got, gradient, update, want) in enumerate(
        zip(metrics, gradients, result.applied, expected["updates"], strict=True)
    ):
        assert close(update.grad_norm, want["grad_norm"], aggregation), (
            f"{name} update {number}: grad-norm {update.grad_norm}, not {want['grad_norm']}"
        )
        for metric, value in want["metrics"].items():
            assert close(got[metric], value, aggregation), (
                f"{name} update {number}: {metric} {got[metric]} instead of {value}"
            )
        for tensor, value in want["gradients"].items():
            error = float((gradient[tensor] - value).norm() / value.norm())
            assert error <= TOLERANCE, (
                f"{name} update {number}: the gradient of {tensor} is off by {error:.1e}"
            )


def main() -> None:
    folder, single = Path(sys.argv[1]), Path(sys.argv[3])
    expected = torch.load(sys.argv[2], weights_only=False)
    one_rank = torch.load(single) if single.is_file() else {}
    for layout_name, amount in (case.split(":") for case in sys.argv[4:]):
        sizes = {name: int(size) for name, size in re.findall(r"(etp|ep|tp|cp|vpp|pp)(\d+)", layout_name)}
        dispatcher = "allgather" if "allgather" in layout_name else "alltoall"
        parallel = ParallelConfig(**sizes, sp="sp" in layout_name, moe_dispatcher=dispatcher)
        groups = build_groups(ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes), timeout_seconds=120)
        for algorithm in expected["results"] if amount == "all" else dense.SOME:
            name = f"{layout_name}:{' '.join(algorithm)}"
            with reported_case(name):
                result, metrics, gradients = run_case(
                    folder, make_config(folder, *algorithm), groups, parallel, expected["rollout_logprobs"]
                )
                check(name, expected["results"][algorithm], result, metrics, gradients)
                got = result.metrics | check_gap(
                    name, result, read_hf_config(folder).vocab_size, expected["rollout_logprobs"]
                )
                alone = one_rank.setdefault(algorithm, got)
                assert alone.keys() == got.keys(), f"{name}: {alone.keys() ^ got.keys()}"
                for metric, value in alone.items():
                    assert close(got[metric], value, algorithm[1]), (
                        f"{name}: {metric} {got[metric]}, on one rank {value}"
                    )
        destroy_groups()
    if not single.is_file():
        torch.save(one_rank, single)


if __name__ == "__main__":
    main()
