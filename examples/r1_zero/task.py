"""Word problems of `examples/gsm8k`, in the template of DeepSeek-R1-Zero (arXiv 2501.12948, Table 1)."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "gsm8k"
TEMPLATE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
    "assistant first thinks about the reasoning process in the mind and then provides the user with the "
    "answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> "
    "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: "
    "{question}. Assistant:"
)


def _rows(name: str) -> list[dict]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {"prompt": TEMPLATE.format(question=row["question"].rstrip(".")), "answer": row["answer"]}
        for row in rows
    ]


def train_rows() -> list[dict]:
    """Return the 48 problems to train on."""
    return _rows("sample.jsonl")


def eval_rows() -> list[dict]:
    """Return the 16 held-out problems."""
    return _rows("sample_eval.jsonl")
