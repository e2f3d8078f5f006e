"""A run folder that can't be used is told in one line each, before anything is started."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from megagrpo.errors import UserError
from megagrpo.supervision.failure import Failure, note_for_launcher, tell
from megagrpo.supervision.run_folder import make_run_folder


def test_a_folder_is_made_and_nothing_is_left_in_it(tmp_path):
    make_run_folder(tmp_path / "runs" / "new")
    assert list((tmp_path / "runs" / "new").iterdir()) == []


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_a_file_of_that_name_is_told(tmp_path, place):
    (tmp_path / "taken").touch()
    with pytest.raises(UserError, match=r"^run\.dir: .*taken.*: (is a file|.*Not a directory)") as told:
        make_run_folder(tmp_path / place)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_storage_that_takes_nothing_is_told(tmp_path, code, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError) as told:
        make_run_folder(tmp_path)
    assert str(told.value) == f"run.dir: {tmp_path}: can't be written to: {os.strerror(code)}"


def test_a_folder_that_nobody_can_make_is_told():
    with pytest.raises(UserError, match=r"^run\.dir: /proc/foo: can't be written to: "):
        make_run_folder(Path("/proc/foo"))


def test_what_is_in_the_way_is_told_all_at_once(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "run.lock").mkdir()
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError) as told:
        make_run_folder(tmp_path)
    assert str(told.value).splitlines() == [
        f"run.dir: {tmp_path}/metrics.jsonl: is a folder; a run keeps a file there",
        f"run.dir: {tmp_path}/run.lock: is a folder; a run keeps a file there",
        f"run.dir: {tmp_path}/checkpoints: is a file; a run keeps a folder there",
    ]


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_place_of_the_errors_is_named_where_it_is_one(tmp_path, capsys, is_kept):
    if is_kept:
        (tmp_path / "errors").mkdir()
    tell(tmp_path, Failure(1, "update", 3, "ValueError: no"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rank 1 failed in step 3, phase update: ValueError: no"
    assert lines[1:] == ([f"every rank's end: {tmp_path}/errors"] if is_kept else [])


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/error.json"])
def test_a_full_temporary_folder_keeps_no_rank_from_leaving(path, monkeypatch):
    """The note to torchrun's report is all that a rank keeps there."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    note_for_launcher("rank 0 stalled in step 3, phase update")
