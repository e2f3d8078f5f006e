"""Tests a part against the contract of each extension point on small inputs: one suite per registry.

A suite takes the place of the part's code (or a registered name) and yields what fails, one line each. Parts
are loaded through their registry, which refuses what lacks a method or takes other parameters.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch

from megagrpo.algorithms.advantages import ADVANTAGES, compute_advantages
from megagrpo.algorithms.losses import LOSSES, LossInputs, LossOutput
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.config.expert_fields import count_experts
from megagrpo.engines import ENGINES
from megagrpo.evaluation.score_metrics import measure_scores
from megagrpo.models.families import load_all
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import SPLIT_DIMENSION
from megagrpo.rewards.build import build_scorer
from megagrpo.rewards.messages import RewardSpec
from megagrpo.rollout.data_sources import DATA_SOURCES
from megagrpo.telemetry.writers import WRITERS

Suite = Callable[[str], Iterator[str]]
ROWS_TRIED = 100


def try_reward(place: str) -> Iterator[str]:
    """It loads, and can be called as rewards are."""
    build_scorer(RewardSpec(place))
    yield from ()


def try_loss(place: str) -> Iterator[str]:
    """One finite value per token, with a gradient; what it declares of zero advantages and of whole sequences
    is true.
    """
    entry = LOSSES.find(place)
    inputs, output = _call_loss(place, slice(0, 6))
    if not isinstance(output, LossOutput):
        yield f"returned a {type(output).__name__}, not a LossOutput"
        return
    if output.loss.shape != inputs.actor_logprobs.shape:
        yield f"loss has shape {list(output.loss.shape)}, not one value for each of the 6 tokens"
        return
    if not bool(torch.isfinite(output.loss).all()):
        yield "loss is not finite for log-ratios between -0.4 and 0.5"
    if not output.loss.requires_grad:
        yield "loss has no gradient towards actor_logprobs"
        return
    (gradient,) = torch.autograd.grad(output.loss.sum(), inputs.actor_logprobs)
    if entry.zero_at_zero_advantage and (output.loss[2] != 0 or gradient[2] != 0):
        yield "zero_at_zero_advantage is declared, but a token with advantage 0 adds to the loss or gradient"
    if not entry.needs_whole_sequences:
        _, alone = _call_loss(place, slice(1, 2))
        if not torch.allclose(alone.loss, output.loss[1:2]):
            yield "a token's loss depends on others: declare needs_whole_sequences=True"


def _call_loss(place: str, rows: slice) -> tuple[LossInputs, LossOutput]:
    tokens = {
        "actor_logprobs": [-1.0, -0.5, -2.0, -0.1, -1.5, -0.7],
        "old_logprobs": [-1.1, -0.4, -2.1, -0.2, -1.1, -1.2],
        "advantages": [1.0, 1.0, 0.0, -1.0, -1.0, -1.0],
        "ref_logprobs": [-1.2, -0.4, -2.0, -0.3, -1.4, -0.9],
        "rollout_logprobs": [-1.1, -0.4, -2.1, -0.2, -1.1, -1.2],
    }
    values = {name: torch.tensor(column, dtype=torch.float64)[rows] for name, column in tokens.items()}
    values["actor_logprobs"].requires_grad_()
    inputs = LossInputs(
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1])[rows],
        num_sequences=2,
        config=AlgorithmConfig(loss=place),
        **values,
    )
    return inputs, LOSSES.find(place).function(inputs)


def try_estimator(place: str) -> Iterator[str]:
    """Finite advantages [N, G]; 0 for invalid completions; groups do not disturb each other's order."""
    entry = ADVANTAGES.find(place)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    valid = torch.tensor([[True, True, True, True], [True, True, True, False], [True, True, True, True]])
    lengths, parts = torch.tensor([[3.0, 5.0, 2.0, 4.0]] * 3), torch.stack([rewards, rewards], dim=2)

    def advantages_of(groups: Sequence[int]) -> torch.Tensor:
        rows = list(groups)
        return compute_advantages(
            rewards[rows],
            valid[rows],
            AlgorithmConfig(advantages=place),
            lengths=lengths[rows],
            reward_parts=parts[rows],
        ).advantages

    found = advantages_of((0, 1, 2))
    if found.shape != rewards.shape:
        yield f"returned shape {list(found.shape)}, not [N, G] = [3, 4]"
        return
    if not bool(torch.isfinite(found).all()):
        yield "advantages are not finite"
    if found[1, 3] != 0:
        yield "an invalid completion has an advantage other than 0"
    if not torch.allclose(advantages_of((2, 1, 0)), found.flip(0)):
        yield "advantages depend on the order of the groups"
    if entry.group_baseline and bool(found[2].any()):
        yield "group_baseline is declared, but a group of equal rewards has advantages"


def example_config(name: str, family: ModelFamily) -> HFConfig:
    """Return a tiny model of a family, for which its rules are listed."""
    sizes = {"num_attention_heads": 4, "head_dim": 4, "vocab_size": 64, "hidden_size": 16}
    raw = {"intermediate_size": 32, **sizes, **family.defaults, **family.example_fields}
    return HFConfig(
        model_type=name,
        ffn_hidden_size=32,
        num_layers=2,
        num_query_groups=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        rope_theta=1e4,
        rope_type="default",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        raw=raw,
        num_experts=count_experts(raw),
        **sizes,
    )


def try_family(place: str) -> Iterator[str]:
    """Rules of known kinds, each parameter and HF tensor once, every layer's with {layer}."""
    load_all()
    family = FAMILIES.find(place)
    hf = example_config(place, family)
    if not isinstance(family.transformer_config_fields(hf), Mapping):
        yield "transformer_config_fields() must return a dict"
    rules = family.parameter_rules(hf)
    if not rules:
        yield "parameter_rules() returned none"
    for side, names in (
        ("Megatron parameter", [rule.megatron for rule in rules]),
        ("HF tensor", [name for rule in rules for name in rule.hf]),
    ):
        yield from (f"{side} {name} has two rules" for name in sorted(set(names)) if names.count(name) > 1)
    for rule in rules:
        if rule.kind not in SPLIT_DIMENSION:
            yield f"rule of {rule.megatron}: kind {rule.kind!r} is not one of {', '.join(SPLIT_DIMENSION)}"
        in_layer = "{layer}" in rule.megatron
        yield from (
            f"rule of {rule.megatron}: {name} must name the layer as {{layer}}, or neither of both must"
            for name in rule.hf
            if ("{layer}" in name) != in_layer
        )


def try_engine(place: str) -> Iterator[str]:
    """It loads; whether it generates is for tests/contracts/engine_contract.py, which needs a model."""
    ENGINES.find(place)
    yield from ()


def try_writer(place: str) -> Iterator[str]:
    """It records steps in a folder, and opens again after a resume."""
    factory = WRITERS.find(place)
    with tempfile.TemporaryDirectory() as folder:
        for last_step, steps in ((None, (1, 2)), (1, (2, 3))):
            writer = factory(Path(folder), last_step)
            for step in steps:
                writer.write(step, {"loss": 0.5, "reward/mean": float("nan")})
            writer.close()
    yield from ()


def try_data_source(place: str) -> Iterator[str]:
    """Rows with columns, the same ones in the same order each time."""
    if place in DATA_SOURCES.names():
        return
    source = DATA_SOURCES.find(place)
    first, second = ([*islice(source(), ROWS_TRIED)] for _ in range(2))
    if not first:
        yield "returned no rows"
    wrong = [row for row in first if not isinstance(row, Mapping)]
    if wrong:
        yield f"a row is a {type(wrong[0]).__name__}, not a mapping of columns"
    if first != second:
        yield "two calls return different rows: a resume would go on with others"


def try_metric(place: str) -> Iterator[str]:
    """Numbers by name, of sets with one and with several samples a prompt."""
    for scores in ([[1.0, 0.0], [0.0, 0.0]], [[1.0], [0.5]]):
        measure_scores([place], scores)
    yield from ()


SUITES: dict[str, Suite] = {
    "reward": try_reward,
    "loss": try_loss,
    "advantage estimator": try_estimator,
    "model family": try_family,
    "engine": try_engine,
    "metrics writer": try_writer,
    "data source": try_data_source,
    "evaluation metric": try_metric,
}
