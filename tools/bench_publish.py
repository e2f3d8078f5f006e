"""Measures how weights get from the trainer's ranks to rollout engines.

    python tools/bench_publish.py --simulate                     # plans for 671 B parameters and 2,048 ranks, on paper; minutes
    python tools/bench_publish.py --simulate --json rows.json

`--simulate` makes the plan of large models and grids and carries it out on boxes of indices, no tensors:

    plan_seconds           one trainer rank's view (all its sends) and one engine rank's (all it receives), from nothing
    plan_peak_bytes        the most that this took, of Python's allocations
    bytes_ratio            bytes that engine ranks receive / bytes that they keep
    elements_covered_once  every element that an engine rank keeps arrives exactly once, over all senders and replicas
    sender_imbalance       largest sender / mean, among ranks that hold the same slices
    link_seconds           the busiest rank's bytes / its link's speed: no schedule can be faster
    broadcast_seconds      the same where every engine rank takes in every tensor whole, which gather-and-broadcast publishing does
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from publish_simulation import Links, build_cases, simulate

SIMULATION_COLUMNS = ("plan_seconds", "plan_peak_bytes", "bytes_ratio", "elements_covered_once", "sender_imbalance")
LINK_COLUMNS = ("busiest_sender_bytes", "busiest_receiver_bytes", "link_seconds", "broadcast_seconds", "speedup")


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
            print(f"{row['model']}: {row['parameters'] / 1e9:.0f} B parameters, {row['trainer']} -> {row['engines']}")
            print_table([row], SIMULATION_COLUMNS)
            print_table([row], LINK_COLUMNS)
            rows.append(row)
    return rows


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", required=True, help="plan large models on paper")
    parser.add_argument("--model", default="", help="simulate only models whose name contains this")
    parser.add_argument("--link-gigabytes", type=float, default=50.0, help="GB/s of a rank's network link, each way (400 Gbit/s: 50)")
    parser.add_argument("--element-bytes", type=int, default=2, help="bytes of a weight on its way (bf16: 2, fp8: 1)")
    parser.add_argument("--bucket-bytes", type=int, default=512 * 2**20, help="limit of a bucket on one engine rank")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = run_simulation(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
