"""The memory of a GPU in each phase, as a table with a verdict (`--dry-run --gpus N --gpu-memory 80GB`)."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megagrpo.config.load import dump_config
from megagrpo.config.schema import Config
from megagrpo.errors import UserError
from megagrpo.planning.file_checks import read_hf_config
from megagrpo.planning.memory_phases import (
    PARTS,
    MemorySettings,
    Phase,
    TrainerBytes,
    cache_bytes_of_token,
    find_worst,
    plan_phases,
    suggest_changes,
)

_MEASURE_SECONDS = 600.0


def read_gigabytes(text: str) -> float:
    """Return the bytes of 80, 80GB or 80GiB. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)?", text, flags=re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise UserError(f"--gpu-memory {text!r}: a size in GB is wanted, as 80 or 80GB")
    return float(found[1]) * (2**30 if (found[2] or "").lower() == "gib" else 1e9)


def format_memory(config: Config, world_size: int, gpu_bytes: float) -> str:
    """Return the table, a verdict, and what to change first where it does not fit."""
    settings = memory_settings(config, read_hf_config(config.model) or {}, gpu_bytes)
    held = measure_trainer(dump_config(config), world_size, str(config.model_folder))
    title = f"Memory of a GPU of {gpu_bytes / 1e9:g} GB"
    return "\n".join([title, "-" * len(title), *describe_memory(settings, held)])


def memory_settings(config: Config, hf: Mapping[str, Any], gpu_bytes: float) -> MemorySettings:
    """Return what of a configuration decides over memory; `hf` is the model's config.json."""
    return MemorySettings(
        config.parallel,
        config.precision,
        config.update,
        config.engine,
        config.algorithm.kl.coef > 0,
        config.longest_sequence_tokens,
        config.weights.bucket_bytes,
        hf,
        gpu_bytes,
    )


def measure_trainer(config_text: str, world_size: int, hf_folder: str) -> list[TrainerBytes]:
    """Return what ranks hold, measured in a process of its own.

    Raises:
        UserError: the model can't be built in this layout.
    """
    names = {field.name for field in fields(TrainerBytes)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config_text)
        command = [sys.executable, "-m", "megagrpo.policy.resident", str(file), str(world_size), hf_folder]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURE_SECONDS, check=False)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"the model could not be built without memory: {why}")
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return [TrainerBytes(**{name: row[name] for name in names}) for row in rows]


def describe_memory(settings: MemorySettings, held: Sequence[TrainerBytes]) -> list[str]:
    """Return the lines of the table, the verdict, and the changes."""
    phases = plan_phases(settings, held)
    lines = _table(phases, held)
    worst = find_worst(phases)
    room = settings.gpu_bytes - worst.total
    if room >= 0:
        lines.append(f"fits: {room / 1e9:.1f} GB are left in the fullest phase ({worst.name})")
    else:
        lines.append(f"does not fit: {worst.name} needs {-room / 1e9:.1f} GB more")
        changes = suggest_changes(settings, held)
        lines += [f"  change: {each.text}  (saves {each.saved_bytes / 1e9:.1f} GB)" for each in changes]
        after = find_worst(plan_phases(changes[-1].settings, changes[-1].held)) if changes else worst
        if after.total > settings.gpu_bytes:
            over = (after.total - settings.gpu_bytes) / 1e9
            lines.append(
                f"  then more GPUs for a replica (parallel.tp, pp, ep; engine.server.tensor_parallel): "
                f"{after.name} still needs {over:.1f} GB more"
            )
    server = getattr(settings.engine, "server", None)
    cache = min((phase.bytes.get("cache", 0.0) for phase in phases if phase.name == "rollout"), default=0.0)
    token = cache_bytes_of_token(settings, server.tensor_parallel if server else 1)
    if cache and token:
        lines.append(f"the cache of a replica has room for about {cache / token:,.0f} tokens")
    return lines


def _table(phases: Sequence[Phase], held: Sequence[TrainerBytes]) -> list[str]:
    """One line for each phase of each kind of rank, in GB; parts that nobody has are left out."""
    shown = [part for part in PARTS if any(phase.bytes.get(part) for phase in phases)]
    rows = [["phase", *(["stage"] if len(held) > 1 else []), *shown, "sum"]]
    for phase in phases:
        sizes = [phase.bytes.get(part, 0.0) for part in shown]
        numbers = [f"{size / 1e9:.1f}" for size in (*sizes, phase.total)]
        rows.append([phase.name, *([str(phase.stage)] if len(held) > 1 else []), *numbers])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if not number else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
