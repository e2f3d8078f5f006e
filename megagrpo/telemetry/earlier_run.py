"""What an earlier run has recorded in a run folder that a new run begins in: it is moved aside, never written
over.
"""

from pathlib import Path

METRICS = "metrics.jsonl"
RECORDS = (
    METRICS,
    "config.yaml",
    "summary.json",
    "log.txt",
    "roll_backs.jsonl",
    "warnings.jsonl",
    "wandb",
    "wandb_id",
    "completions",
    "evaluations",
    "tensorboard",
    "hf",
)


def set_aside_earlier_run(run_dir: Path) -> Path | None:
    """Move the records of an earlier run to `earlier_N` in the folder, and return that; None where there are
    none.
    """
    metrics = run_dir / METRICS
    if not metrics.exists() or metrics.stat().st_size == 0:
        return None
    number = 1
    while (target := run_dir / f"earlier_{number}").exists():
        number += 1
    target.mkdir()
    for name in RECORDS:
        if (run_dir / name).exists():
            (run_dir / name).rename(target / name)
    return target
