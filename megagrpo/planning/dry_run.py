"""What a run would do, as text: resolved configuration, rank grid, batch arithmetic, prompts. No model, no
process group.
"""

from dataclasses import dataclass

from rich.console import Console

from megagrpo.config.load import dump_config
from megagrpo.config.schema import Config
from megagrpo.parallel.alignment import token_alignment
from megagrpo.parallel.layout import ParallelLayout, build_layout
from megagrpo.planning.file_checks import read_hf_config


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
    max_microbatches_per_rank: int  # of one mini-batch


def compute_batch_arithmetic(config: Config, layout: ParallelLayout) -> BatchArithmetic:
    """Return the counts of one step of `config` in `layout`. The configuration has passed its checks."""
    groups, completions = config.rollout.prompts_per_step, config.rollout.completions_per_prompt
    mini_batches = config.update.mini_batches_per_step
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    alignment = token_alignment(config.parallel, config.precision.recipe)
    budget = config.update.max_tokens_per_microbatch // alignment * alignment
    return BatchArithmetic(
        groups=groups,
        completions=groups * completions,
        max_tokens_per_sequence=longest,
        max_tokens_per_step=groups * completions * longest,
        updates_per_step=config.update.updates_per_step,
        groups_per_mini_batch=groups // mini_batches,
        sequences_per_mini_batch=groups // mini_batches * completions,
        microbatch_tokens=budget,
        max_microbatches_per_rank=_max_microbatches(config, groups // mini_batches, layout, budget),
    )


def _max_microbatches(config: Config, groups: int, layout: ParallelLayout, budget: int) -> int:
    """Micro-batches of one mini-batch on one rank at most.

    The planner puts each item where there is room. Items of at most s tokens find none only when every
    micro-batch holds k = budget // s of them already, so ceil(items / (dp * k)) micro-batches always do; a
    pipeline asks for `min_microbatches` at least. An item is a sequence, or, with shared prompts, a prompt
    with as many of its completions as fit.
    """
    prompt, new, completions = (
        config.data.max_prompt_tokens,
        config.rollout.max_new_tokens,
        config.rollout.completions_per_prompt,
    )
    sequences, dp = groups * completions, layout.dp

    def round_up(count: int) -> int:
        return count + -count % layout.microbatch_multiple

    if not config.update.packing:
        return round_up(-(-sequences // dp))
    bounds = [layout.min_microbatches, -(-sequences // (dp * (budget // (prompt + new))))]
    if config.update.share_prompts:
        together = min(completions, (budget - prompt) // new)
        trees = groups * -(-completions // together)
        bounds.append(-(-trees // (dp * (budget // (prompt + together * new)))))
    return round_up(max(bounds))


def print_dry_run(config: Config, world_size: int) -> None:
    """Print `format_dry_run` and `format_prompts` to standard output: coloured on a terminal, the plain text
    anywhere else.
    """
    text = f"{format_dry_run(config, world_size)}\n\n{format_prompts(config)}"
    Console(soft_wrap=True).print(text, markup=False)


def format_prompts(config: Config) -> str:
    """Read and tokenise all prompts as the run would; return the first one and what is to be known of them.

    Raises:
        UserError: a row, the tokenizer or a chat template that the run would stop at.
    """
    # with torch and transformers, which the arithmetic needs none of
    from megagrpo.rollout.prompts import load_prompts
    from megagrpo.rollout.tokenisation import load_tokenizer

    context = (read_hf_config(config.model.path) or {}).get("max_position_embeddings")
    lines: list[str] = []
    load_prompts(config, load_tokenizer(config), context if isinstance(context, int) else None, lines.append)
    return "\n".join(["Prompts", "-------", *lines])


def describe_ranks(config: Config, world_size: int) -> str:
    """Return how many ranks there are and how they are used, e.g. `2 ranks (tp 2, dp 1)`."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return f"{ranks} ({build_layout(config.parallel, world_size).describe()})"


def format_dry_run(config: Config, world_size: int) -> str:
    """Return the whole text of a dry run."""
    layout = build_layout(config.parallel, world_size)
    parts = [
        ("Configuration", dump_config(config).rstrip()),
        (
            f"Ranks: {world_size} = {layout.describe()}",
            f"{layout.grid()}\n(stages separated by |, tp ranks side by side)",
        ),
        ("One step", "\n".join(_batch_lines(config, compute_batch_arithmetic(config, layout), layout.dp))),
    ]
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in parts)


def _batch_lines(config: Config, batch: BatchArithmetic, dp: int) -> list[str]:
    rollout, update, prompt = config.rollout, config.update, config.data.max_prompt_tokens
    mini_batches, sequences = update.mini_batches_per_step, batch.sequences_per_mini_batch
    refills = config.algorithm.dynamic_sampling
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
