"""Measures how weights get from the trainer's ranks to rollout engines.

    python tools/bench_publish.py                                # real ranks to a real vLLM server (`make
    engines`); minutes python tools/bench_publish.py --engine stub --json rows.json # to a process that only
    receives: no engine is needed python tools/bench_publish.py --simulate                     # plans for 671
        B parameters and 2,048 ranks, on paper; minutes

Without `--simulate`, SmolLM2-135M from TP1 PP2 (where examples/smollm2_arithmetic/prepare.py has made it) and
a random model of 123 M parameters from TP2 PP2 are published in float32, on one machine, by four methods:

    slices, sharded          each rank copies its slices to where the engine's rank keeps them, in fused
    parameters slices, full             the same into full tensors, which the engine's loader cuts
    group, sharded           each rank sends its slices to the engine's rank through a process group (gloo),
    as between machines gather and safetensors   full tensors are gathered on every rank, one saves a file,
    the engine loads it

    gather, transfer, load_seconds   bringing full tensors together; writing slices or the file (conversion
    included); in the engine. In
                                     the first three methods the engine loads a bucket while the next is
                                     written: total is not their sum. Through a group writing is making
                                         checksums, and receiving is part of loading
    moved_bytes                      between ranks, and into the memory or file that the engine reads
    peak_extra_bytes                 the fullest rank's memory beside the model, files in memory included

Seconds are medians of `--repeats` publishes after one that is not counted.

`--simulate` makes the plan of large models and grids and carries it out on boxes of indices, no tensors:

    plan_seconds           one trainer rank's view (all its sends) and one engine rank's (all it receives),
    from nothing plan_peak_bytes        the most that this took, of Python's allocations
    bytes_ratio            bytes that engine ranks receive / bytes that they keep
    elements_covered_once  every element that an engine rank keeps arrives exactly once, over all senders and
    replicas sender_imbalance       largest sender / mean, among ranks that hold the same slices
    link_seconds           the busiest rank's bytes / its link's speed: no schedule can be faster
    broadcast_seconds      the same where every engine rank takes in every tensor whole, which
    gather-and-broadcast publishing does
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from publish_simulation import Links, build_cases, simulate

SIMULATION_COLUMNS = (
    "plan_seconds",
    "plan_peak_bytes",
    "bytes_ratio",
    "elements_covered_once",
    "sender_imbalance",
)
TIMING_COLUMNS = (
    "method",
    "plan_seconds",
    "gather_seconds",
    "transfer_seconds",
    "load_seconds",
    "total_seconds",
)
SIZE_COLUMNS = ("method", "moved_bytes", "gigabytes_per_second", "peak_extra_bytes")
CASE_TIMEOUT_SECONDS = 1800
LINK_COLUMNS = (
    "busiest_sender_bytes",
    "busiest_receiver_bytes",
    "link_seconds",
    "broadcast_seconds",
    "speedup",
)


def show(value: object) -> str:
    """Format one cell."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def print_table(rows: list[dict[str, object]], columns: tuple[str, ...]) -> None:
    """Print rows under their columns."""
    print("  ".join(columns))
    for row in rows:
        print("  ".join(show(row[column]).rjust(len(column)) for column in columns), flush=True)


def run_simulation(options: argparse.Namespace) -> list[dict[str, object]]:
    """Simulate all models, or those whose name contains `--model`."""
    rows = []
    for case in build_cases():
        if options.model.lower() in case.model.lower():
            row = simulate(case, Links(options.link_gigabytes), options.element_bytes, options.bucket_bytes)
            print(
                f"{row['model']}: {row['parameters'] / 1e9:.0f} B parameters, {row['trainer']} -> "
                f"{row['engines']}"
            )
            print_table([row], SIMULATION_COLUMNS)
            print_table([row], LINK_COLUMNS)
            rows.append(row)
    return rows


def make_random_model(folder: Path, tokenizer: Path) -> Path:
    """Write a Qwen3 of 123 M random parameters, with the tokenizer of another folder, which engines want
    to see.
    """
    import shutil

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    target = folder / "random-123m"
    Qwen3ForCausalLM(config).save_pretrained(target)
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, target)
    return target


def run_case(options: argparse.Namespace, model: Path, tp: int, pp: int) -> list[dict[str, object]]:
    """Launch the ranks of one model and return their rows."""
    from megagrpo.device.environment import thread_environment

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(tp * pp),
        "--master-addr",
        "127.0.0.1",
    ]
    ranks = [
        str(Path(__file__).with_name("publish_ranks.py")),
        str(model),
        str(tp),
        str(pp),
        options.engine,
        str(options.repeats),
    ]
    environment = {**os.environ, **thread_environment(tp * pp), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [*launcher, "--master-port", str(port), *ranks, options.python],
        env=environment, stdout=subprocess.PIPE, text=True, timeout=CASE_TIMEOUT_SECONDS, check=True,
    )  # fmt: skip
    rows = [
        json.loads(line.removeprefix("ROW ")) for line in run.stdout.splitlines() if line.startswith("ROW ")
    ]
    print(f"{model.name}, trainer tp {tp} pp {pp}, engine {options.engine}")
    for columns in (TIMING_COLUMNS, SIZE_COLUMNS):
        print_table(rows, columns)
    return rows


def run_publishes(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure both models, or those whose name contains `--model`."""
    root = Path(__file__).resolve().parents[1]
    smollm2, tiny = root / "models" / "smollm2-135m", root / "examples" / "quickstart" / "model"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        if options.model in smollm2.name:
            if smollm2.is_dir():
                rows += run_case(options, smollm2, 1, 2)
            else:
                print(f"{smollm2}: not there, left out; examples/smollm2_arithmetic/prepare.py makes it")
        if options.model in "random-123m":
            rows += run_case(
                options, make_random_model(Path(scratch), smollm2 if smollm2.is_dir() else tiny), 2, 2
            )
    return rows


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulate", action="store_true", help="plan large models on paper")
    parser.add_argument(
        "--engine",
        default="vllm",
        choices=("vllm", "stub"),
        help="where weights go; stub: a process that only receives",
    )
    parser.add_argument(
        "--python", default="", help="Python of the engine's environment; default: that of `make engines`"
    )
    parser.add_argument("--repeats", type=int, default=5, help="publishes by each method that are counted")
    parser.add_argument("--model", default="", help="only models whose name contains this")
    parser.add_argument(
        "--link-gigabytes",
        type=float,
        default=50.0,
        help="GB/s of a rank's network link, each way (400 Gbit/s: 50)",
    )
    parser.add_argument(
        "--element-bytes", type=int, default=2, help="bytes of a weight on its way (bf16: 2, fp8: 1)"
    )
    parser.add_argument(
        "--bucket-bytes", type=int, default=512 * 2**20, help="limit of a bucket on one engine rank"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = run_simulation(options) if options.simulate else run_publishes(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
