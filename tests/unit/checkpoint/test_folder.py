"""The names in a checkpoint folder, and what retention removes."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.checkpoint.folder import (
    Retention,
    checkpoint_path,
    finish_publishing,
    list_complete,
    list_named,
    partial_path,
    publish,
    removable,
    remove_leftovers,
    remove_retired,
    set_aside,
)
from megagrpo.checkpoint.manifest import MANIFEST

STEPS = [10, 20, 30, 40, 50]


def make(folder, step, complete=True):
    partial = partial_path(folder, step)
    partial.mkdir()
    if complete:
        (partial / MANIFEST).write_text("{}")
    return partial


@pytest.mark.parametrize(
    ("retention", "scores", "gone"),
    [
        (Retention(2), {}, [10, 20, 30]),
        (Retention(1, keep_every=20), {}, [10, 30]),
        (Retention(1, keep_best=1), {10: 0.9, 20: 0.5, 50: 0.1}, [20, 30, 40]),
        (Retention(1, keep_best=1, best_mode="min"), {10: 0.9, 20: 0.5}, [10, 30, 40]),
        (Retention(1, keep_best=2), {10: 0.9, 20: 0.9, 30: 0.9}, [10, 40]),  # of equal ones the newer
        (Retention(9), {}, []),
    ],
)
def test_retention_keeps_last_periodic_and_best(retention, scores, gone):
    assert removable(STEPS, scores, retention) == gone


@given(
    st.sets(st.integers(1, 200), min_size=1),
    st.dictionaries(st.integers(1, 200), st.floats(-1, 1)),
    st.builds(
        Retention, st.integers(1, 5), st.integers(0, 50), st.integers(0, 3), st.sampled_from(["max", "min"])
    ),
)
def test_the_newest_stays_and_a_second_look_removes_nothing(steps, scores, retention):
    gone = removable(list(steps), scores, retention)
    assert max(steps) not in gone and set(gone) <= steps
    assert removable([step for step in steps if step not in gone], scores, retention) == []


def test_a_checkpoint_appears_with_its_manifest_and_latest_follows(tmp_path):
    make(tmp_path, 10)
    assert list_complete(tmp_path) == []
    publish(tmp_path, 10)
    make(tmp_path, 20)
    publish(tmp_path, 20)
    assert [path.name for path in list_complete(tmp_path)] == ["step_000010", "step_000020"]
    assert (tmp_path / "latest").readlink().name == "step_000020"


def test_a_step_is_replaced_by_a_later_save_of_it(tmp_path):
    make(tmp_path, 10)
    publish(tmp_path, 10)
    (make(tmp_path, 10) / "second").touch()
    publish(tmp_path, 10)
    assert (checkpoint_path(tmp_path, 10) / "second").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]


def test_order_is_by_step_beyond_six_digits(tmp_path):
    for step in (999_999, 1_000_000):
        make(tmp_path, step)
        publish(tmp_path, step)
    assert [path.name for path in list_complete(tmp_path)] == ["step_999999", "step_1000000"]


def test_leftovers_of_a_killed_save_go_and_complete_checkpoints_stay(tmp_path):
    make(tmp_path, 10)
    publish(tmp_path, 10)
    make(tmp_path, 20, complete=False)
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]


def test_a_damaged_checkpoint_is_set_aside_and_counts_no_more(tmp_path):
    make(tmp_path, 10)
    path = publish(tmp_path, 10)
    (path / MANIFEST).unlink()
    assert list_named(tmp_path) == [path] and list_complete(tmp_path) == []
    assert set_aside(path).name == "step_000010.bad"
    assert list_named(tmp_path) == []


def test_a_kill_between_the_two_renames_of_a_second_save_loses_nothing(tmp_path):
    """The only checkpoint is saved again; the process dies with the old name moved away, no new one."""
    make(tmp_path, 10)
    target = publish(tmp_path, 10)
    (make(tmp_path, 10) / "second").touch()
    target.rename(target.with_name("step_000010.old"))
    finish_publishing(tmp_path)
    remove_leftovers(tmp_path)
    remove_retired(tmp_path)
    assert list_complete(tmp_path) == [target] and (target / "second").exists()


def test_an_unfinished_save_gets_no_name(tmp_path):
    make(tmp_path, 10, complete=False)
    finish_publishing(tmp_path)
    assert list_named(tmp_path) == []


@pytest.mark.parametrize("in_the_way", ["nothing", "a folder"])
def test_without_symbolic_links_a_checkpoint_is_published_all_the_same(tmp_path, monkeypatch, in_the_way):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    if in_the_way == "a folder":
        (tmp_path / "latest" / "mine").mkdir(parents=True)
    make(tmp_path, 10)
    assert publish(tmp_path, 10) == checkpoint_path(tmp_path, 10)
    assert list_complete(tmp_path) == [checkpoint_path(tmp_path, 10)]
    if in_the_way == "nothing":
        assert (tmp_path / "latest").read_text() == "step_000010\n"
