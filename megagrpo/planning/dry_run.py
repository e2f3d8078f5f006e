"""What a run would do, as text: rank grid, batch arithmetic, memory, inputs, configuration. No model and no
process group.
"""

from dataclasses import dataclass

from rich.console import Console

from megagrpo.config.algorithm_section import DynamicSamplingConfig
from megagrpo.config.differences import differences
from megagrpo.config.load import dump_config
from megagrpo.config.rollout_sections import RolloutConfig
from megagrpo.config.schema import Config
from megagrpo.config.training_sections import ModelConfig, ParallelConfig, PrecisionConfig, UpdateConfig
from megagrpo.parallel.alignment import token_alignment
from megagrpo.parallel.layout import ParallelLayout, build_layout
from megagrpo.planning.file_checks import read_hf_config
from megagrpo.planning.inputs import format_inputs
from megagrpo.planning.memory_table import format_memory
from megagrpo.planning.starter import count_parameters


@dataclass(frozen=True)
class BatchArithmetic:
    """Counts of one step; "at most" counts assume prompts and completions of the greatest length allowed."""

    groups: int
    completions: int
    max_tokens_per_sequence: int
    max_tokens_per_step: int
    updates_per_step: int  # mini-batches * epochs
    groups_per_mini_batch: int
    sequences_per_mini_batch: int
    microbatch_tokens: int  # budget in whole multiples of the alignment
    max_microbatches_per_rank: int  # in one mini-batch


def compute_batch_arithmetic(
    rollout: RolloutConfig,
    update: UpdateConfig,
    max_prompt_tokens: int,
    layout: ParallelLayout,
    alignment: int = 1,
) -> BatchArithmetic:
    """Return the counts of one step in `layout`, whose packed tokens come in multiples of `alignment`. The
    sections have passed their checks.
    """
    groups, completions = rollout.prompts_per_step, rollout.completions_per_prompt
    mini_batches = update.mini_batches_per_step
    longest = max_prompt_tokens + rollout.max_new_tokens
    budget = update.max_tokens_per_microbatch // alignment * alignment
    return BatchArithmetic(
        groups=groups,
        completions=groups * completions,
        max_tokens_per_sequence=longest,
        max_tokens_per_step=groups * completions * longest,
        updates_per_step=update.updates_per_step,
        groups_per_mini_batch=groups // mini_batches,
        sequences_per_mini_batch=groups // mini_batches * completions,
        microbatch_tokens=budget,
        max_microbatches_per_rank=_max_microbatches(
            rollout, update, max_prompt_tokens, groups // mini_batches, layout, budget
        ),
    )


def _max_microbatches(
    rollout: RolloutConfig,
    update: UpdateConfig,
    prompt: int,
    groups: int,
    layout: ParallelLayout,
    budget: int,
) -> int:
    """Micro-batches of one mini-batch on one rank at most.

    The planner puts each item where there is room. Items of at most s tokens find none only when every
    micro-batch holds k = budget // s of them already, so ceil(items / (dp * k)) micro-batches always do; a
    pipeline asks for `min_microbatches` at least. An item is a sequence, or, with shared prompts, a prompt
    with as many of its completions as fit.
    """
    new, completions = rollout.max_new_tokens, rollout.completions_per_prompt
    sequences, dp = groups * completions, layout.dp

    def round_up(count: int) -> int:
        return count + -count % layout.microbatch_multiple

    if not update.packing:
        return round_up(-(-sequences // dp))
    bounds = [layout.min_microbatches, -(-sequences // (dp * (budget // (prompt + new))))]
    if update.share_prompts:
        together = min(completions, (budget - prompt) // new)
        trees = groups * -(-completions // together)
        bounds.append(-(-trees // (dp * (budget // (prompt + together * new)))))
    return round_up(max(bounds))


def print_dry_run(
    config: Config, world_size: int, shows_config: bool = False, gpu_bytes: float | None = None
) -> None:
    """Print `format_dry_run` and `format_inputs` to standard output: coloured on a terminal, the plain text
    anywhere else. What matters comes first; the resolved configuration, where it is asked for, last. The
    memory of a GPU, where one of `gpu_bytes` is planned for, is counted on a model without memory.
    """
    parts = [format_dry_run(config, world_size), format_inputs(config)]
    if gpu_bytes is not None:
        parts.insert(1, format_memory(config, world_size, gpu_bytes))
    if shows_config:
        parts.append(f"Configuration\n-------------\n{dump_config(config).rstrip()}")
    Console(soft_wrap=True).print("\n\n".join(parts), markup=False)


def describe_ranks(parallel: ParallelConfig, world_size: int) -> str:
    """Return how many ranks there are and how they are used, e.g. `2 ranks (tp 2, dp 1)`."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return f"{ranks} ({build_layout(parallel, world_size).describe()})"


def format_dry_run(config: Config, world_size: int) -> str:
    """Return what is known from the configuration alone: ranks, batch arithmetic, memory of the model, and
    what differs from the defaults.
    """
    layout = build_layout(config.parallel, world_size)
    alignment = token_alignment(config.parallel, config.precision.recipe)
    rollout, update, prompt = config.rollout, config.update, config.data.max_prompt_tokens
    batch = compute_batch_arithmetic(rollout, update, prompt, layout, alignment)
    step = _batch_lines(rollout, update, config.algorithm.dynamic_sampling, prompt, batch, layout.dp)
    model = _model_lines(config.model, config.precision, config.algorithm.kl.coef > 0, layout)
    parts = [
        (
            f"Ranks: {world_size} = {layout.describe()}",
            f"{layout.grid()}\n(stages separated by |, tp ranks side by side)",
        ),
        ("One step", "\n".join(step)),
        ("Model", "\n".join(model)),
        ("Differs from the defaults", "\n".join(differences(config))),
    ]
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in parts if body)


def _model_lines(
    model: ModelConfig, precision: PrecisionConfig, has_reference: bool, layout: ParallelLayout
) -> list[str]:
    """Parameters, and what a rank holds of them: the distributed optimizer shares its state over dp."""
    hf = read_hf_config(model) or {}
    size = count_parameters(hf)
    if not size:
        return []
    own = size / (layout.tp * layout.pp)
    is_float32 = precision.recipe == "fp32" or precision.emulate
    weights, states = (4, 8) if is_float32 else (2, 12)  # bf16: float32 main weights beside Adam's two
    terms = {
        "weights": own * weights,
        "gradients (float32)": own * 4,
        f"optimizer (over dp {layout.dp})": own * states / layout.dp,
    }
    if has_reference:
        terms["reference"] = own * weights
    parts = " + ".join(f"{name} {format_bytes(value)}" for name, value in terms.items())
    return [
        f"parameters        about {_count(size)}, {_count(own)} on a rank",
        f"a rank holds      {parts} = {format_bytes(sum(terms.values()))}",
        "beside that       activations of a micro-batch, and the rollout engine's weights and cache",
    ]


def format_bytes(size: float) -> str:
    """Return a size in GiB, below a tenth of one in MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.1f} MiB"


def _count(number: float) -> str:
    unit, letter = next(
        ((unit, letter) for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= unit), (1, "")
    )
    return f"{number / unit:.3g}{letter}"


def _batch_lines(
    rollout: RolloutConfig,
    update: UpdateConfig,
    refills: DynamicSamplingConfig,
    prompt: int,
    batch: BatchArithmetic,
    dp: int,
) -> list[str]:
    mini_batches, sequences = update.mini_batches_per_step, batch.sequences_per_mini_batch
    rows = [
        ("groups", f"{batch.groups}"),
        ("completions", f"{batch.groups} groups * {rollout.completions_per_prompt} = {batch.completions}"),
        (
            "tokens of one sequence",
            f"at most {prompt} prompt + {rollout.max_new_tokens} new = {batch.max_tokens_per_sequence}",
        ),
        (
            "tokens of the step",
            f"at most {batch.completions} * {batch.max_tokens_per_sequence} = {batch.max_tokens_per_step}",
        ),
        (
            "optimizer updates",
            f"{mini_batches} mini-batches * {update.epochs_per_step} epochs = {batch.updates_per_step}",
        ),
        (
            "one mini-batch",
            f"{batch.groups} / {mini_batches} = {batch.groups_per_mini_batch} groups = {sequences} sequences",
        ),
        ("sequences per replica", f"{sequences} / dp {dp} = {sequences / dp:g} per mini-batch on average"),
        (
            "tokens of a micro-batch",
            f"at most {batch.microbatch_tokens}"
            + ("" if update.packing else ", one sequence each (packing off)"),
        ),
        (
            "micro-batches per rank",
            f"at most {batch.max_microbatches_per_rank} per mini-batch, as many on every rank",
        ),
    ]
    if refills.enabled:
        rows.insert(
            2, ("refills", f"at most {refills.max_refills} extra rounds of generation (dynamic sampling)")
        )
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]
