"""Makes an SFT set of what `megagrpo sample` has kept: easy prompts out, one completion of each other prompt.

    python examples/rejection_sampling/filter.py FOLDER [--samples 8] [--easiest 0.9]

Writes FOLDER/sft.jsonl with `messages`, and adds `sft_rows` and `too_easy` to FOLDER/summary.json.
"""

import argparse
import json
from itertools import groupby
from pathlib import Path


def main() -> None:
    """Read, filter, write, and say how many are left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=8, help="completions that were drawn for each prompt")
    parser.add_argument("--easiest", type=float, default=0.9, help="keep no prompt that more of them solve")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.folder / "accepted.jsonl").read_text().splitlines()]
    kept, too_easy = [], 0
    for _, group in groupby(rows, key=lambda row: row["metadata"]["prompt_id"]):
        accepted = list(group)
        if accepted[0]["metadata"]["passing"] > options.easiest * options.samples:
            too_easy += 1
            continue
        best = min(accepted, key=lambda row: row["metadata"]["tokens"])
        user, assistant = best["prompt"], best["completion"]
        kept.append(
            {
                "messages": [
                    {"role": "user", "content": user},
                    {"role": "assistant", "content": assistant},
                ]
            }
        )
    (options.folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    summary = json.loads((options.folder / "summary.json").read_text())
    summary |= {"sft_rows": len(kept), "too_easy": too_easy}
    (options.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{options.folder / 'sft.jsonl'}: {len(kept)} rows; {too_easy} prompts were too easy")


if __name__ == "__main__":
    main()
