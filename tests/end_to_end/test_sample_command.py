"""`megagrpo sample` writes the same SFT set on any number of ranks, and the example makes a set of it."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(500)]

CONFIG = "examples/rejection_sampling/rejection_sampling.yaml"
PROMPTS, SAMPLES = 30, 4
SMALL = [f"data.limit={PROMPTS}", "rollout.prompts_per_step=8", f"rollout.completions_per_prompt={SAMPLES}"]


def call(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=200)


def sample(folder, *arguments):
    done = call("-m", "megagrpo", "sample", CONFIG, *SMALL, "--out", folder, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "accepted.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sample") / "two"


@pytest.fixture(scope="module")
def rows(folder):
    return sample(folder, "--nproc", 2)


def test_every_row_is_a_right_answer_of_its_prompt_and_no_text_comes_twice(rows):
    assert len(rows) > PROMPTS / 2
    for row in rows:
        assert (
            row["completion"] == row["metadata"]["columns"]["answer"] == "".join(sorted(row["prompt"][1:5]))
        )
        assert row["metadata"]["reward"] == 1.0
    assert len({(row["prompt"], row["completion"]) for row in rows}) == len(rows)
    ids = [row["metadata"]["prompt_id"] for row in rows]
    assert ids == sorted(ids)


def test_the_summary_counts_every_completion(rows, folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["prompts"], summary["completions"]) == (PROMPTS, PROMPTS * SAMPLES)
    assert summary["kept"] == len(rows) == summary["solved_prompts"]  # one right text a prompt
    assert summary["passing"] == sum(row["metadata"]["passing"] for row in rows)
    assert summary["pass_rate"] == summary["passing"] / summary["completions"]


def test_one_rank_writes_the_same_file_as_two(rows, tmp_path):
    assert sample(tmp_path / "one", "--nproc", 1) == rows


def test_the_examples_filter_makes_one_conversation_a_prompt(rows, folder):
    done = call("examples/rejection_sampling/filter.py", folder, "--samples", SAMPLES, "--easiest", 0.5)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line)["messages"] for line in (folder / "sft.jsonl").read_text().splitlines()]
    wanted = [row for row in rows if row["metadata"]["passing"] <= 0.5 * SAMPLES]
    assert [each[0]["content"] for each in made] == [row["prompt"] for row in wanted] and wanted
    assert [each[1]["content"] for each in made] == [row["completion"] for row in wanted]


def test_a_file_that_is_there_is_not_written_over(rows, folder):
    done = call("-m", "megagrpo", "sample", CONFIG, *SMALL, "--out", folder)
    assert done.returncode == 2 and done.stderr.endswith("accepted.jsonl: is there already\n")
