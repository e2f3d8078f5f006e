"""Add column `prompt` to word problems in GSM8K's format.

Usage: python examples/gsm8k/prepare.py SOURCE.jsonl TARGET.jsonl

Each line of SOURCE has `question` and `answer`, the answer ending in `#### N`. TARGET keeps both and gains
`prompt`: the question after a solved example in the form that the `format` reward checks.
"""

import json
import sys
from pathlib import Path

# One solved example shows the form, which small models follow better than a description of it.
EXAMPLE = """Answer like this example: the working, then a last line with the number alone.

Question: Mia has 3 boxes of 6 pencils and loses 4 pencils. How many pencils are left?
There are 3 * 6 = 18 pencils, and 18 - 4 = 14 are left.
#### 14"""


def with_prompt(row: dict) -> dict:
    """Return the row with its column `prompt`."""
    return {"prompt": f"{EXAMPLE}\n\nQuestion: {row['question']}", **row}


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write one JSON object per line, each with its prompt."""
    path.write_text(
        "".join(json.dumps(with_prompt(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


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
