"""Breaks tiny real runs at named points and shows what each fault came to.

python tests/faults/harness.py [--json FILE] [--chain NAME]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import outside
from cases import CHAINS
from chains import Chain, ChainRun, Result
from fleet import Fleet

# The quickstart's model with the smallest steps that train: two groups of two for each of two ranks.
CONFIG = [
    "examples/quickstart/quickstart.yaml",
    "parallel.tp=1",
    "rollout.prompts_per_step=4",
    "rollout.completions_per_prompt=2",
    "evaluation.every=0",
    "evaluation.sets.0.limit=4",
    "evaluation.sets.1.limit=4",
    "checkpoint.every=1",
    # with saves in the background a fault costs the step that was being saved too
    "checkpoint.asynchronous=false",
    "telemetry.writers=[jsonl]",
    "telemetry.completions_every=0",
    "watchdog.floor_seconds=60",
]


def run_chain(chain: Chain, fleet: Fleet, folder: Path) -> list[Result]:
    """Return one result per fault of a chain, which goes on for two steps after the last one."""
    return ChainRun(chain, fleet, folder, [*CONFIG, f"run.steps={chain.last_step + 2}"]).run()


def format_table(results: list[Result]) -> str:
    """Return the table: fault, outcome, seconds to recover, steps lost, bit-equal."""
    rows = [("fault", "outcome", "recover_seconds", "steps_lost", "bit_equal")]
    rows += [
        tuple("-" if value is None else str(value) for value in result.row().values()) for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def count(results: list[Result]) -> str:
    """Return how many faults there were, and how many came to what they must."""
    right = sum(not result.problems for result in results)
    return f"{len(results)} faults, {right} as they must be"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--chain",
        action="append",
        choices=[chain.name for chain in CHAINS],
        help="only this one; may be repeated",
    )
    options = parser.parse_args()
    outside.adopt_orphans()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        try:
            for chain in CHAINS:
                if options.chain is not None and chain.name not in options.chain:
                    continue
                if chain.needs is not None and not Path(chain.needs).exists():
                    print(f"{chain.name}: skipped: {chain.needs} is not there", file=sys.stderr, flush=True)
                    continue
                found = run_chain(chain, fleet, Path(folder))
                results += found
                print(f"{chain.name}: done: {count(found)}", file=sys.stderr)
                for result in found:
                    if result.problems:
                        print(f"\n{result.fault}\n  " + "\n  ".join(result.problems), file=sys.stderr)
                sys.stderr.flush()
        finally:
            fleet.close()
    print(format_table(results))
    if options.json:
        options.json.write_text(
            json.dumps([result.row() for result in results], indent=2) + "\n", encoding="utf-8"
        )
    print(count(results))
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
