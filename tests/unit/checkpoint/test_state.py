"""The trainer's state of a checkpoint: what was written comes back, and nothing else is taken for it."""

import json
from dataclasses import asdict

import pytest

from megagrpo.checkpoint.state import STATE_FILE, TrainerState
from megagrpo.errors import UserError


def test_what_is_written_comes_back(tmp_path):
    state = TrainerState(step=3, updates=6, parts={"gate": {"loss": [0.5]}}, unrecorded={"a": float("nan")})
    (tmp_path / STATE_FILE).write_text(state.to_json())
    assert str(TrainerState.load(tmp_path)) == str(state)


@pytest.mark.parametrize(
    ("forged", "place"),
    [
        ({"step": "three"}, "step"),
        ({"step": -1}, "step"),
        ({"weight_version": 1.5}, "weight_version"),
        ({"row": {"loss": "none"}}, "row.loss"),
        ({"parts": []}, "parts"),
        (None, ""),
    ],
)
def test_a_state_that_no_run_has_written_is_one_line(tmp_path, forged, place):
    values = None if forged is None else asdict(TrainerState()) | forged
    (tmp_path / STATE_FILE).write_text(json.dumps(values))
    with pytest.raises(UserError) as raised:
        TrainerState.load(tmp_path)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"{tmp_path / STATE_FILE}: {place}: ")


def test_a_state_that_is_cut_off_is_one_line(tmp_path):
    (tmp_path / STATE_FILE).write_text(TrainerState().to_json()[:40])
    with pytest.raises(UserError, match="Invalid JSON"):
        TrainerState.load(tmp_path)
