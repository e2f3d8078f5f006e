"""The examples' tasks: their splits never meet, their rewards judge as their READMEs say, their
configurations load.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megagrpo.config.load import load_config
from megagrpo.registry import load_callable
from megagrpo.rewards.build import build_scorer
from megagrpo.rewards.messages import RewardSpec
from megagrpo.rewards.places import find_after_hashes

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TASKS = {"quickstart": (8999, 256), "smollm2_arithmetic": (633, 48)}


@pytest.fixture(autouse=True)
def run_from_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)  # where the examples are run from: their paths are relative to it


def load(task: str, function: str):
    return load_callable(f"examples/{task}/task.py:{function}")


@pytest.mark.parametrize(
    "path",
    sorted(set(EXAMPLES.glob("*/*.yaml")) - set(EXAMPLES.glob("launch/*"))),
    ids=lambda path: path.stem,
)
def test_every_example_configuration_is_valid_and_its_files_exist(path):
    config = load_config(path)
    for source in [config.data.source, *(held_out.source for held_out in config.evaluation.sets)]:
        assert Path(source.partition(":")[0]).is_file()


@pytest.mark.parametrize("task", TASKS)
def test_training_and_held_out_prompts_never_meet(task):
    train, held_out = ([row["prompt"] for row in load(task, f"{kind}_rows")()] for kind in ("train", "eval"))
    assert (len(train), len(held_out)) == TASKS[task]
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)
    assert held_out == [row["prompt"] for row in load(task, "eval_rows")()]


@pytest.mark.parametrize(
    ("task", "answer", "text", "expected"),
    [
        ("quickstart", "1249", "1249", 1.0),
        ("quickstart", "1249", "1249$", 1.0),
        ("quickstart", "1249", "4192", 0.0),
        ("quickstart", "1249", "12499", 0.0),
        ("smollm2_arithmetic", "63", " 63\n", 1.0),
        ("smollm2_arithmetic", "63", " 63", 1.0),
        ("smollm2_arithmetic", "63", " 63.\n", 0.0),
        ("smollm2_arithmetic", "63", " 6\n63", 0.0),
        ("smollm2_arithmetic", "63", "", 0.0),
    ],
)
def test_an_examples_reward_is_exact(make_group, task, answer, text, expected):
    assert load(task, "reward")(*make_group(text, answer=answer)) == [expected]


def test_the_sorting_task_asks_for_the_end(make_group):
    prompts, completions = make_group("1249", answer="1249")
    assert load("quickstart", "reward")(prompts, [replace(completions[0], finish_reason="length")]) == [0.0]


def test_rows_of_the_arithmetic_task_hold_their_sums():
    for row in load("smollm2_arithmetic", "train_rows")():
        first, second = row["prompt"].splitlines()[-1].removesuffix(" =").split(" + ")
        assert int(first) + int(second) == int(row["answer"])


def test_the_custom_rewards_judge_as_they_say(make_group):
    def call(function: str, *texts: str, **columns) -> list:
        scorer = build_scorer(RewardSpec(f"examples/custom_reward.py:{function}"))
        return [score.value for score in scorer(*make_group(*texts, **columns))]

    assert call("reward_brevity", "", "x" * 100, "x" * 400, "x" * 900) == [1.0, 0.75, 0.0, 0.0]
    assert call("reward_contains", "it is 7", "8", answer=7) == [1.0, 0.0]
    assert call("reward_steps", "1. add. Therefore 3", "3") == [1.0, 0.0]
    assert call("reward_ascii", "a", "é", "") == [1.0, 0.0, None]
    assert call("reward_judge", "It is 7.", "7") == [1.0, 0.0]


def test_word_problems_have_gsm8ks_columns_and_whole_number_answers():
    rows = [
        json.loads(line)
        for name in ("sample", "sample_eval")
        for line in (EXAMPLES / f"gsm8k/{name}.jsonl").read_text().splitlines()
    ]
    assert len({row["question"] for row in rows}) == len(rows) == 64
    for row in rows:
        assert row["prompt"].endswith(row["question"])
        assert int(find_after_hashes(row["answer"])) > 0
