"""Opens what a run would open before its first rollout: tokenizer, every data set through the chat template,
every reward on a made-up completion, the checkpoint to go on from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.config.rollout_sections import RewardsConfig
from megagrpo.config.run_sections import RunConfig
from megagrpo.config.schema import Config
from megagrpo.errors import UserError
from megagrpo.planning.file_checks import read_hf_config

if TYPE_CHECKING:
    from megagrpo.types import Prompt, Reward

MADE_UP = "The answer is 42."


def format_inputs(config: Config) -> str:
    """Open them, and return a description.

    Raises:
        UserError: what the run would stop at: a row, the tokenizer, a chat template, a reward.
    """
    # with torch and transformers, which the arithmetic needs none of
    from megagrpo.rollout.prompts import describe_prompt, load_prompts, prompts_by_field
    from megagrpo.rollout.tokenisation import check_tokenizer, load_tokenizer

    hf = read_hf_config(config.model) or {}
    tokenizer, context = load_tokenizer(config.model), hf.get("max_position_embeddings")
    if isinstance(vocabulary := hf.get("vocab_size"), int):
        check_tokenizer(tokenizer, vocabulary)
    lines: list[str] = []
    source, held_out = load_prompts(
        config.data,
        config.evaluation.sets,
        config.rollout.max_new_tokens,
        tokenizer,
        context if isinstance(context, int) else None,
        lines.append,
    )
    lines.append(f"last of them: {describe_prompt(source[len(source) - 1], tokenizer)}")
    lines.append(_describe_epoch(len(source), config.rollout.prompts_per_step, config.run.steps))
    lines += [f"{each.name}: {len(prompts)} held-out prompts" for each, prompts in held_out]
    sets = prompts_by_field(source, held_out)
    rewards = [
        f"{place}: {_describe_reward(reward)}"
        for place, reward in zip(sets, try_rewards(config.rewards, tokenizer, sets), strict=True)
    ]
    sections = [
        ("Prompts", lines),
        (f"Rewards of a made-up completion, {MADE_UP!r}", rewards),
        ("Run folder", [_describe_folder(config.run)]),
    ]
    return "\n\n".join("\n".join([title, "-" * len(title), *body]) for title, body in sections)


def try_rewards(
    rewards: RewardsConfig, tokenizer: Any, sets: "dict[str, Sequence[Prompt]]"
) -> "list[Reward]":
    """Return what the rewards say of a made-up completion of the first prompt of each set.

    Raises:
        UserError: a reward can't be loaded or called, needs another column, raises, or returns what the
            contract does not allow.
    """
    import numpy as np

    from megagrpo.rewards.pool import NO_OPINION, RewardPool
    from megagrpo.types import Completion

    ids = np.asarray(tokenizer.encode(MADE_UP, add_special_tokens=False) or [0])
    logprobs = np.zeros(len(ids), np.float32)
    found = []
    with RewardPool(rewards.model_copy(update={"workers": 1}), sets) as pool:
        for place, prompts in sets.items():
            completion = Completion.sampled(prompts[0].id, 0, ids, logprobs, "stop", ((0, 0),), MADE_UP)
            (reward,) = pool.score([prompts[0]], [completion])
            if reward.outcome != "ok" and reward.detail != NO_OPINION:
                raise UserError(
                    f"rewards.functions: a made-up completion of the first prompt of {place} can't be "
                    f"scored: {reward.outcome}: {reward.detail}"
                )
            found.append(reward)
    return found


def _describe_reward(reward: "Reward") -> str:
    parts = ", ".join(
        f"{name} {'no opinion' if value is None else f'{value:g}'}" for name, value in reward.parts.items()
    )
    return f"{reward.value:g} ({parts})"


def _describe_epoch(rows: int, step: int, steps: int) -> str:
    """`step`: prompts of one, of `steps` steps."""
    drawn = steps * step
    return (
        f"an epoch is {rows} prompts / {step} a step = {rows / step:.4g} steps; the run draws "
        f"{steps} * {step} = {drawn} prompts = {drawn / rows:.3g} epochs"
    )


def _describe_folder(run: RunConfig) -> str:
    from megagrpo.checkpoint.folder import list_complete

    folder = Path(run.dir)
    saved = list_complete(folder / "checkpoints")
    if not saved:
        return f"{folder}: no checkpoint, so the run starts at step 1"
    if run.resume == "never":
        raise UserError(
            f"run.resume: never: {saved[-1]} is there; take another run.dir, or run.resume=auto to go on"
        )
    return f"{folder}: the run goes on from {saved[-1].name} if its files are whole"
