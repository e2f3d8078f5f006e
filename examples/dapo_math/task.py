"""Word problems of `examples/gsm8k`, in the prompt of DAPO's data set (arXiv 2503.14476, DAPO-Math-17k)."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "gsm8k"
TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\nRemember "
    'to put your answer on its own line after "Answer:".'
)


def _rows(name: str) -> list[dict]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {"prompt": TEMPLATE.format(question=row["question"]), "answer": row["answer"], "source": "words"}
        for row in rows
    ]


def train_rows() -> list[dict]:
    """Return the 48 problems to train on."""
    return _rows("sample.jsonl")


def eval_rows() -> list[dict]:
    """Return the 16 held-out problems."""
    return _rows("sample_eval.jsonl")
