"""Add column `prompt` to word problems in GSM8K's format.

Usage: python examples/gsm8k/prepare.py SOURCE.jsonl TARGET.jsonl

Each line of SOURCE has `question` and `answer`, the answer ending in `#### N`. TARGET keeps both and gains `prompt`: the question after
the instruction that the `format` reward checks.
"""

import json
import sys
from pathlib import Path

INSTRUCTION = (
    "Solve the problem. Put your reasoning between <think> and </think>, then nothing but the final number between <answer> and </answer>."
)


def with_prompt(row: dict) -> dict:
    """Return the row with its column `prompt`."""
    return {"prompt": f"{INSTRUCTION}\n\n{row['question']}", **row}


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write one JSON object per line, each with its prompt."""
    path.write_text("".join(json.dumps(with_prompt(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    """Command line."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    if not source.is_file():
        print(f"{source}: no such file", file=sys.stderr)
        return 2
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    write_rows(target, rows)
    print(f"{target}: {len(rows)} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
