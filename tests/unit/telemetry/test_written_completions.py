"""The completions that a run keeps to be read."""

import json
from dataclasses import replace

import numpy as np

from megagrpo.telemetry.completions import read_completions, spread, write_completions
from megagrpo.types import Completion, Prompt, Reward


def sample(prompt_id, index, reward):
    prompt = Prompt(id=prompt_id, text=f"prompt {prompt_id}", token_ids=(1, 2), columns={"answer": 42})
    completion = Completion.sampled(
        prompt_id, index, np.array([3, 4, 5]), np.zeros(3, np.float32), "stop", ((0, 1),), "größer"
    )
    return prompt, completion, Reward(reward, {"exact": reward})


def test_whole_groups_are_written_spread_over_the_step(tmp_path):
    samples = [sample(group, index, float(index)) for group in range(4) for index in range(2)]
    path = write_completions(tmp_path, 10, samples, 3)
    assert path == tmp_path / "completions" / "step_000010.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["prompt_id"], row["index"]) for row in rows] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert rows[0] == {
        "prompt_id": 0,
        "index": 0,
        "prompt": "prompt 0",
        "columns": {"answer": "42"},
        "completion": "größer",
        "reward": 0.0,
        "parts": {"exact": 0.0},
        "outcome": "ok",
        "detail": "",
        "finish_reason": "stop",
        "tokens": 3,
        "weight_version": 1,
    }


def test_why_a_score_failed_is_kept_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    prompt, completion, _ = sample(1, 0, 0.0)
    failed = Reward(0.0, {}, "unreachable", "reward: http://me:pa55@judge said: no such key sk-12345678")
    write_completions(tmp_path, 1, [(prompt, completion, failed)], 1)
    (row,) = read_completions(tmp_path)
    assert row["detail"] == "reward: http://***@judge said: no such key ***"


def test_a_prompt_that_was_drawn_twice_has_two_groups(tmp_path):
    samples = [sample(7, index, 0.0) for _ in range(2) for index in range(3)]
    path = write_completions(tmp_path, 1, samples, 3)
    assert len(path.read_text().splitlines()) == 3


def test_held_out_answers_are_read_back_with_their_set_and_long_texts_keep_both_ends(tmp_path):
    prompt, completion, reward = sample(1, 0, 1.0)
    long = replace(completion, text="a" * 30_000 + "b" * 30_000)
    write_completions(tmp_path, 0, [(prompt, long, reward)], 8, held_out="gsm8k/test")
    write_completions(tmp_path, 1, [sample(2, 0, 1.0)], 8)
    held_out, trained = read_completions(tmp_path)
    assert (held_out["step"], held_out["set"], trained["step"], trained["set"]) == (0, "gsm8k-test", 1, "")
    assert held_out["completion"].startswith("aaa") and held_out["completion"].endswith("bbb")
    assert "[... 40000 characters ...]" in held_out["completion"]


def test_more_completions_than_there_are_takes_all():
    assert spread(3, 10) == [0, 1, 2]
    assert spread(0, 10) == []
