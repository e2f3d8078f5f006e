"""Tells how fast the steps of a run were: tokens a second, model FLOPs utilisation, peak memory, by phase.

    python tools/bench_step.py RUN_DIR [--peak-tflops 989] [--skip 2] [--json FILE]

Reads what the run wrote: config.yaml, metrics.jsonl and summary.json. The first steps, which compile and
warm up, are skipped. Utilisation is that of PaLM (arXiv 2204.02311, Appendix B): 6 FLOPs for each parameter
that multiplies a trained token, and 12 x layers x heads x head size x length for attention, over the seconds
of the update and the peak of all GPUs. Prompts, log-prob passes and recomputation do work that is not
counted, so it is a lower bound.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.config.expert_fields import count_experts
from megagrpo.config.load import load_config
from megagrpo.planning.file_checks import read_hf_config

PHASES = ("rollout", "update", "publish", "step")


def multiplied_parameters(hf: Mapping[str, Any]) -> int:
    """Return the parameters of a decoder that a token is multiplied with: of experts those it is routed to;
    the head, but not the embedding, which is looked up.
    """
    hidden, layers = hf["hidden_size"], hf["num_hidden_layers"]
    heads, head_dim = hf["num_attention_heads"], head_dim_of(hf)
    keys = hf.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + keys)
    experts = count_experts(hf)
    if experts:
        mlp = 3 * hidden * hf["moe_intermediate_size"] * hf["num_experts_per_tok"] + hidden * experts
    else:
        mlp = 3 * hidden * hf["intermediate_size"]
    return layers * (attention + mlp) + hf["vocab_size"] * hidden


def head_dim_of(hf: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def flops_of_token(hf: Mapping[str, Any], length: float) -> float:
    """Return the FLOPs of a trained token, forward and backward, in sequences of `length` tokens."""
    attention = 12 * hf["num_hidden_layers"] * hf["num_attention_heads"] * head_dim_of(hf) * length
    return 6 * multiplied_parameters(hf) + attention


def sum_up(
    rows: Sequence[Mapping[str, float]], hf: Mapping[str, Any], num_ranks: int, peak_flops: float | None
) -> dict[str, float]:
    """Return the means over steps. `rows`: of metrics.jsonl; `peak_flops`: of one GPU, a second."""
    steps = [row for row in rows if "time/step_seconds" in row]
    if not steps:
        raise SystemExit("no step is left: a longer run, or a smaller --skip")

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in steps)

    found = {f"{phase}_seconds": total(f"time/{phase}_seconds") / len(steps) for phase in PHASES}
    trained = total("update/trained_tokens")
    found["generated_tokens_per_second"] = total("rollout/generated_tokens") / total("time/rollout_seconds")
    found["trained_tokens_per_second"] = trained / total("time/update_seconds")
    found["tokens_per_second_and_rank"] = trained / total("time/step_seconds") / num_ranks
    if peak_flops is not None:
        length = total("rollout/completion_tokens") / len(steps)
        done = trained * flops_of_token(hf, length) / total("time/update_seconds")
        found["update_flops_utilisation"] = done / (peak_flops * num_ranks)
    names = {name for row in steps for name in row if name.startswith("memory/")}
    return found | {name: max(row.get(name, 0.0) for row in steps) for name in sorted(names)}


def main() -> None:
    """Print the numbers of a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--peak-tflops", type=float, help="of one GPU, dense bfloat16: 989 for an H100")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in (arguments.run_dir / "metrics.jsonl").read_text().splitlines()]
    num_ranks = len(json.loads((arguments.run_dir / "summary.json").read_text())["peak_rss_bytes"])
    hf = read_hf_config(load_config(arguments.run_dir / "config.yaml", []).model) or {}
    peak = None if arguments.peak_tflops is None else arguments.peak_tflops * 1e12
    found = sum_up([row for row in rows if row["step"] > arguments.skip], hf, num_ranks, peak)
    for name, value in found.items():
        print(f"{name:<32}{value:14.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
