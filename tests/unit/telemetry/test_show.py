"""`megagrpo show` and the model card: what a person reads of a finished run."""

import io
import json
import re

import pytest
from rich.console import Console

from megagrpo.config.load import load_config
from megagrpo.config.yaml_core import parse_yaml
from megagrpo.errors import UserError
from megagrpo.telemetry.model_card import write_model_card
from megagrpo.telemetry.show import show_completions


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for name, step in (("step_000010", 10), ("held_out_000000_test", 0), ("held_out_000010_test", 10)):
        rows = [
            {
                "prompt_id": prompt,
                "index": index,
                "prompt": f"question {prompt}",
                "columns": {"answer": prompt},
                "completion": f"Answer {prompt}.{index}",
                "reward": float(prompt == 2 or (index == 1 and step == 10)),
                "parts": {"math": 1.0},
                "outcome": "ok",
                "detail": "",
                "finish_reason": "stop",
                "tokens": 10 * (3 - prompt) + index,
            }
            for prompt in range(3)
            for index in range(2)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shown(run_dir, **options):
    screen = io.StringIO()
    show_completions(run_dir, console=Console(file=screen, width=100), **options)
    return screen.getvalue()


def prompts_of(text):
    return [int(found) for found in re.findall(r"─ prompt (\d)", text)]


@pytest.mark.parametrize(
    ("order", "prompts"),
    [
        ("prompt", [0, 1, 2]),
        ("best", [0, 1, 2]),
        ("worst", [0, 1, 2]),
        ("longest", [0, 1, 2]),
        ("mixed", [0, 1, 2]),
    ],
)
def test_groups_come_in_the_order_that_is_asked_for(run_dir, order, prompts):
    text = shown(run_dir, order=order)
    assert prompts_of(text) == prompts and "step 10, training prompts: 3 of 3 groups" in text
    assert "answer: 2" in text and "Answer 2.1" in text and "math 1.0" in text


def test_the_best_and_the_worst_are_the_ends_of_the_rewards(run_dir):
    path = run_dir / "completions" / "step_000010.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["reward"] = [0.5, 0.2, 0.9][row["prompt_id"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prompts_of(shown(run_dir, order="best")) == [2, 0, 1]
    assert prompts_of(shown(run_dir, order="worst")) == [1, 0, 2]
    assert prompts_of(shown(run_dir, order="best", count=1)) == [2]


def test_only_answers_whose_reward_changed_are_compared_with_the_step_before(run_dir):
    text = shown(run_dir, order="changed", held_out="test")
    assert prompts_of(text) == [0, 1]  # those of prompt 2 were right before
    assert "step 0" in text and "step 10" in text and "Answer 0.0" not in text


def test_a_word_finds_its_groups(run_dir):
    assert prompts_of(shown(run_dir, text="answer 1.")) == [1]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"order": "bset"}, "--order bset: must be one of prompt, best"),
        ({"step": 4}, "--step 4: no completions of it; there are those of 10"),
        ({"held_out": "tset"}, "--held-out tset: no such set here; there are test, training"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(run_dir, options, line):
    with pytest.raises(UserError, match=re.escape(line)):
        shown(run_dir, **options)


def test_a_folder_without_completions_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"no completions; telemetry\.completions_every writes them"):
        shown(tmp_path)


def test_a_card_says_what_was_trained_how_and_what_came_of_it(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {path: models/Qwen3-8B}\ndata: {source: train.jsonl}\n"
        "rewards: {functions: [{name: math, weight: 2.0}]}\nalgorithm: {preset: dapo}\n"
    )
    summary = {
        "steps": 40,
        "eval": {"gsm8k": {"first": 0.25, "last": 0.5, "best": 0.625}},
        "versions": {"torch": "2.13.0"},
    }
    text = write_model_card(tmp_path, load_config(tmp_path / "run.yaml", []), summary).read_text()
    head = parse_yaml(text.split("---\n")[1], "card")
    assert head["base_model"] == "models/Qwen3-8B" and "dapo" in head["tags"]
    assert head["pipeline_tag"] == "text-generation"
    for line in ("| prompts | `train.jsonl` |", "| rewards | `math` x 2 |", "| steps | 40 |", "torch 2.13.0"):
        assert line in text
    assert "| gsm8k | 0.25 | 0.5 | 0.625 |" in text


def test_a_completion_can_not_steer_the_terminal(run_dir):
    path = run_dir / "completions" / "step_000010.jsonl"
    row = json.loads(path.read_text().splitlines()[0]) | {"completion": "\x1b[2Jgone", "detail": "\x1b[31m"}
    path.write_text(json.dumps(row | {"outcome": "crash"}) + "\n")
    text = shown(run_dir)
    assert "\x1b" not in text and r"\x1b[2Jgone" in text and r"crash: \x1b[31m" in text


@pytest.mark.parametrize(
    "line", ["broken", "[1]", "7", "{}", "[" * 100_000, "TOKENS"], ids=lambda line: line[:9]
)
def test_a_line_that_is_no_row_is_passed_over(run_dir, line):
    path = run_dir / "completions" / "step_000010.jsonl"
    if line == "TOKENS":
        line = json.dumps(json.loads(path.read_text().splitlines()[0]) | {"tokens": "many"})
    path.write_text(f"{line}\n{path.read_text()}")
    assert prompts_of(shown(run_dir)) == [0, 1, 2]
