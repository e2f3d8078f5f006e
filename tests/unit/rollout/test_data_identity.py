"""A position in the data is gone on from in the same prompts alone."""

import json
import time
from dataclasses import replace

import pytest

from megagrpo.config.rollout_sections import DataConfig
from megagrpo.errors import SharedUserError, UserError
from megagrpo.rollout import data_identity
from megagrpo.rollout.data_identity import check_same_on_ranks, describe_data, describe_other_held_out
from megagrpo.rollout.prompts import PromptSource
from megagrpo.types import Prompt

ONE_STEP_OFF = "rollout.off_policy=one_step_off"
ALLOWED = "run.allow_config_changes=[data.source]"


def numbered(count, **token_ids):
    return [Prompt(n, str(n), token_ids.get(f"row_{n}", (1, 2, n))) for n in range(count)]


def save(pipeline, folder):
    """Train one step; return the snapshot after it, as it comes back from disk."""
    pipeline.collect(1, weight_version=0)
    snapshot = pipeline.snapshot()
    for name, contents in snapshot.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    return json.loads(json.dumps(snapshot.state))


def reordered():
    first, second, *others = numbered(10)
    return [Prompt(0, second.text, second.token_ids), Prompt(1, first.text, first.token_ids), *others]


OTHERS = {
    "another row": (numbered(10, row_7=(1, 2, 99)), "10 as in the checkpoint, with other tokens"),
    "another order": (reordered(), "10 as in the checkpoint, with other tokens or in another order"),
    "a token more in one and less in the next": (
        numbered(10, row_0=(1, 2, 0, 1), row_1=(2, 1)),
        "10 as in the checkpoint",
    ),
    "a row less": (numbered(9), "10 prompts in the checkpoint, 9 in this run"),
}


@pytest.mark.parametrize("mode", ["rollout.off_policy=synchronous", ONE_STEP_OFF])
@pytest.mark.parametrize("case", OTHERS)
def test_other_prompts_are_refused_in_one_line(build_pipeline, tmp_path, case, mode):
    prompts, what = OTHERS[case]
    state = save(build_pipeline(mode, prompts=numbered(10)), tmp_path)
    with pytest.raises(UserError) as caught:
        build_pipeline(mode, prompts=prompts).restore(state, tmp_path)
    text = str(caught.value)
    assert text.startswith("data.source: ") and what in text and "\n" not in text
    assert text.endswith(ALLOWED)


@pytest.mark.parametrize("allowed", ["data.source", "data"])
def test_other_prompts_that_are_allowed_begin_with_their_first_epoch(build_pipeline, tmp_path, allowed):
    state = save(build_pipeline(ONE_STEP_OFF, prompts=numbered(10)), tmp_path)
    assert state["in_flight"] is not None and state["prompt_position"] == 3
    told = []
    settings = (ONE_STEP_OFF, f"run.allow_config_changes=[{allowed}]")
    pipeline = build_pipeline(*settings, prompts=OTHERS["another row"][0], note=told.append)
    pipeline.restore(state, tmp_path)
    assert pipeline.next_position == 0 and len(told) == 1
    assert told[0].startswith("changed: data.source: ") and "a first epoch of these begins" in told[0]
    fresh = build_pipeline(ONE_STEP_OFF, prompts=OTHERS["another row"][0])
    ids = [[prompt.id for prompt in each.collect(2, 0)[0].prompts] for each in (pipeline, fresh)]
    assert ids[0] == ids[1]
    # the next checkpoint is of the new data: the same command goes on in it
    again = build_pipeline(*settings, prompts=OTHERS["another row"][0], note=told.append)
    again.restore(json.loads(json.dumps(pipeline.snapshot().state)) | {"in_flight": None}, tmp_path)
    assert again.next_position == 3 and len(told) == 1


def test_the_same_prompts_go_on_at_their_position_whatever_is_allowed(build_pipeline, tmp_path):
    state = save(build_pipeline(prompts=numbered(10)), tmp_path)
    told = []
    pipeline = build_pipeline(ALLOWED, prompts=numbered(10), note=told.append)
    pipeline.restore(state, tmp_path)
    assert (pipeline.next_position, told) == (3, [])


def test_other_answers_to_the_same_prompts_are_told_and_gone_on_with(build_pipeline, tmp_path):
    state = save(build_pipeline(prompts=numbered(10)), tmp_path)
    corrected = numbered(10)
    corrected[7] = replace(corrected[7], columns={"answer": "8"})
    told = []
    pipeline = build_pipeline(prompts=corrected, note=told.append)
    pipeline.restore(state, tmp_path)
    assert pipeline.next_position == 3
    assert len(told) == 1 and "columns that rewards read (answers) are not" in told[0]


def test_held_out_sets_with_other_rows_are_told_by_name():
    corrected = [replace(prompt, columns={"answer": "x"}) for prompt in numbered(3)]
    saved = {
        "same": describe_data(numbered(3)),
        "longer": describe_data(numbered(3)),
        "corrected": describe_data(numbered(3)),
        "gone": describe_data(numbered(3)),
    }
    own = {
        "same": describe_data(numbered(3)),
        "longer": describe_data(numbered(4)),
        "corrected": describe_data(corrected),
        "new": describe_data(numbered(3)),
    }
    lines = describe_other_held_out(json.loads(json.dumps(saved)), own)
    assert [line.split(":")[1] for line in lines] == [" evaluation set corrected", " evaluation set longer"]
    assert "columns that rewards read (answers) are not" in lines[0]
    assert "3 prompts in the checkpoint, 4 in this run" in lines[1]


def test_columns_that_are_no_json_count_by_their_type():
    """Text of an object may hold its address, another one in each process."""
    first, second = ([Prompt(0, "a", (1,), {"source": object()})] for _ in range(2))
    assert describe_data(first) == describe_data(second)


def test_a_template_that_reads_the_clock_makes_other_prompts(tmp_path, character_tokenizer, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2"}\n')
    template = "{{ strftime_now('%S') }}{{ messages[0]['content'] }}="
    monkeypatch.setattr(character_tokenizer, "chat_template", template)
    config = DataConfig(source=str(tmp_path / "rows.jsonl"), chat_template=True)
    first = PromptSource(config, character_tokenizer, 4)
    while time.strftime("%S") == first[0].text[:2]:
        time.sleep(0.05)
    second = PromptSource(config, character_tokenizer, 4)
    assert describe_data(first.prompts) != describe_data(second.prompts)


def test_ranks_that_read_different_prompts_are_stopped(monkeypatch):
    own = {"data.source": numbered(3), "evaluation.sets.0.source": numbered(2)}
    others = {place: describe_data(prompts) for place, prompts in own.items()}
    monkeypatch.setattr(data_identity, "all_gather_metadata", lambda value: [others, value])
    check_same_on_ranks(own)
    with pytest.raises(SharedUserError, match=r"evaluation\.sets\.0\.source: rank 1 has read other prompts"):
        check_same_on_ranks(own | {"evaluation.sets.0.source": numbered(2, row_1=(5,))})
