"""What may differ when a run goes on from a checkpoint."""

import json

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.resume_changes import find_changes, free_places, refused
from megagrpo.config.schema import Config

QUICKSTART = "examples/quickstart/quickstart.yaml"


def changes_by(*overrides):
    saved, own = (json.loads(load_config(QUICKSTART, given).model_dump_json()) for given in ([], overrides))
    return find_changes(saved, own)


def test_equal_configurations_have_no_changes():
    assert changes_by() == []


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=77",
        "run.dir=elsewhere",
        "parallel.pp=2",
        "evaluation.every=3",
        "checkpoint.keep_last=9",
        "telemetry.writers=[jsonl]",
    ],
)
def test_where_and_how_fast_may_change(override):
    changes = changes_by(override)
    assert [change.place for change in changes] == [override.partition("=")[0]]
    assert refused(changes, []) == []


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=5",
        "optimizer.lr=1e-2",
        "algorithm.loss=gspo",
        "rollout.temperature=0.5",
        "data.shuffle=false",
        "precision.recipe=bf16",
    ],
)
def test_what_is_learned_may_not_change_unless_named(override):
    place = override.partition("=")[0]
    changes = changes_by(override)
    assert [change.place for change in refused(changes, [])] == [place]
    assert refused(changes, [place]) == []
    assert refused(changes, [place.partition(".")[0]]) == []
    assert refused(changes, [place[:-1]]) == changes  # a part of a name is no name


def test_a_change_shows_both_values():
    (change,) = changes_by("run.seed=5")
    assert str(change) == "run.seed: 0 in the checkpoint, 5 in this run"


def test_a_field_that_one_side_does_not_know_is_a_change():
    own = json.loads(load_config(QUICKSTART, []).model_dump_json())
    saved = json.loads(json.dumps(own))
    saved["algorithm"]["forgotten"] = 3
    del saved["data"]["shuffle"]
    assert [(change.place, change.saved, change.own) for change in find_changes(saved, own)] == [
        ("data.shuffle", None, True),
        ("algorithm.forgotten", 3, None),
    ]


def test_nothing_that_is_learned_from_is_marked_free():
    """The sections of the algorithm, the optimizer, the data and the number format hold no free field."""
    free = set(free_places(Config))
    assert not [
        place for place in free if place.split(".")[0] in ("algorithm", "optimizer", "data", "precision")
    ]
    assert "run.seed" not in free and "rewards.functions" not in free
