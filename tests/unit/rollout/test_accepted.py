"""What rejection sampling keeps, and the file that the ranks' parts make."""

import json

import numpy as np
import pytest

from megagrpo.rollout.accepted import (
    AcceptanceRule,
    AcceptedCounts,
    accepted_rows,
    merge_parts,
    part_file,
    write_rows,
)
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Completion, Prompt, Reward


def build_rollouts(groups, first_id=0):
    """Groups of (text, reward, tokens, finish reason, outcome), all generated here."""
    prompts = [
        Prompt(first_id + number, f"prompt {number}", (1,), {"answer": "7"}) for number in range(len(groups))
    ]
    records, local = {}, {}
    for group, completions in enumerate(groups):
        for place, (text, value, tokens, reason, outcome) in enumerate(completions):
            reward = Reward(value, {"math": value}, outcome, answer=text)
            records[group, place] = CompletionRecord((group, place), 0, tokens, reason, reward, 0)
            local[group, place] = Completion.sampled(
                prompts[group].id,
                place,
                np.arange(tokens),
                np.zeros(tokens, np.float32),
                reason,
                ((0, 0),),
                text,
            )
    return StepRollouts(prompts, records, local, max(map(len, groups)))


GROUPS = [
    [
        ("long 7", 1.0, 9, "stop", "ok"),
        ("7", 1.0, 2, "stop", "ok"),
        ("7", 1.0, 2, "stop", "ok"),  # the same text again
        ("cut 7", 1.0, 9, "length", "ok"),  # right, and not finished
    ],
    [("8", 0.0, 2, "stop", "ok"), ("?", 1.0, 2, "stop", "timeout")],  # wrong; not scored
]


@pytest.mark.parametrize(("per_prompt", "texts"), [(0, ["long 7", "7"]), (1, ["7"])])
def test_what_passes_is_kept_once_a_text_and_the_shorter_first(per_prompt, texts):
    rows = list(accepted_rows(build_rollouts(GROUPS), AcceptanceRule(1.0, per_prompt), {"model": "here"}))
    assert [row["completion"] for row in rows] == texts
    assert rows[-1]["prompt"] == "prompt 0"
    assert rows[-1]["metadata"] == {
        "prompt_id": 0,
        "index": 1,
        "reward": 1.0,
        "parts": {"math": 1.0},
        "answer": "7",
        "tokens": 2,
        "columns": {"answer": "7"},
        "passing": 3,
        "model": "here",
    }


def test_a_higher_reward_is_kept_before_a_shorter_text():
    group = [("short", 1.0, 1, "stop", "ok"), ("better", 1.5, 9, "stop", "ok")]
    rows = accepted_rows(build_rollouts([group]), AcceptanceRule(1.0, 1), {})
    assert [row["completion"] for row in rows] == ["better"]


def test_counts_tell_what_became_of_every_completion():
    counts = AcceptedCounts()
    counts.add(build_rollouts(GROUPS), AcceptanceRule(1.0, 0))
    assert counts == AcceptedCounts(
        prompts=2, completions=6, failed=1, cut=1, passing=3, solved_prompts=1, kept=0
    )


def test_the_parts_of_the_ranks_become_one_file_in_the_order_of_the_prompts(tmp_path):
    rule = AcceptanceRule(1.0, 0)
    for rank, chunks in enumerate([(0, 5), (2, 9), ()]):  # the third rank has generated nothing
        part_file(tmp_path, rank).touch()
        for first_id in chunks:
            rows = list(accepted_rows(build_rollouts(GROUPS[:1], first_id), rule, {}))
            write_rows(part_file(tmp_path, rank), rows)
    merged = merge_parts(tmp_path, 3)
    rows = [json.loads(line) for line in merged.read_text().splitlines()]
    places = [(row["metadata"]["prompt_id"], row["metadata"]["index"]) for row in rows]
    assert places == [(number, index) for number in (0, 2, 5, 9) for index in (0, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["accepted.jsonl"]


def test_half_of_a_surrogate_pair_is_written_and_read_back(tmp_path):
    group = [("\ud83d", 1.0, 1, "stop", "ok")]
    write_rows(
        part_file(tmp_path, 0), list(accepted_rows(build_rollouts([group]), AcceptanceRule(1.0, 0), {}))
    )
    assert json.loads(merge_parts(tmp_path, 1).read_text())["completion"] == "\ud83d"
