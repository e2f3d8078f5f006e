"""The model card of an export: `hf/README.md`, with what a stranger needs to judge and repeat the run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.config.schema import Config

CARD = "README.md"  # as the Hugging Face hub reads it


def write_model_card(export: Path, config: Config, summary: Mapping[str, Any]) -> Path:
    """Write the card into the folder of an export and return its path. Atomic.

    Args:
        export: HF folder.
        config: of the run.
        summary: what `build_summary` returned.
    """
    path, temporary = export / CARD, export / f"{CARD}.tmp"
    temporary.write_text(format_model_card(config, summary), encoding="utf-8")
    os.replace(temporary, path)
    return path


def format_model_card(config: Config, summary: Mapping[str, Any]) -> str:
    """Return the card: YAML front matter, then what was trained, how, and what came of it."""
    algorithm, rollout = config.algorithm, config.rollout
    name = algorithm.preset or algorithm.loss
    rewards = ", ".join(f"`{each.name}` x {each.weight:g}" for each in config.rewards.functions)
    rows = [
        ("base model", f"`{config.model.path}`"),
        ("prompts", f"`{config.data.description}`"),
        ("rewards", rewards),
        ("algorithm", f"{name}: advantages {algorithm.advantages}, loss {algorithm.loss}"),
        ("KL to the base model", f"{algorithm.kl.coef:g} ({algorithm.kl.placement})"),
        ("a step", f"{rollout.prompts_per_step} prompts x {rollout.completions_per_prompt} completions"),
        ("sampling", f"temperature {rollout.temperature:g}, at most {rollout.max_new_tokens} tokens"),
        ("learning rate", f"{config.optimizer.lr:g}, {config.optimizer.schedule}"),
        ("precision", config.precision.recipe),
        ("steps", str(summary["steps"])),
        ("seed", str(config.run.seed)),
    ]
    parts = [
        _front_matter(config.model.path, name),
        f"# {Path(config.model.path).name}, trained with megagrpo",
        "Reinforcement learning on verifiable rewards; only what is below is known of its behaviour.",
        _table(("what", "value"), rows),
    ]
    if summary["eval"]:
        evaluations = [
            (each, *(f"{values[key]:.4g}" for key in ("first", "last", "best")))
            for each, values in summary["eval"].items()
        ]
        parts += [
            "## Held-out sets",
            "Mean of the first reward over all completions, before and after training.",
            _table(("set", "before", "after", "best"), evaluations),
        ]
    versions = ", ".join(f"{package} {version}" for package, version in summary["versions"].items())
    return "\n\n".join([*parts, "## Versions", versions]) + "\n"


def _front_matter(base_model: str, algorithm: str) -> str:
    values = {
        "base_model": base_model,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "megagrpo", algorithm],
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in (" | ".join(head), " | ".join(["---"] * len(head)), *lines))
