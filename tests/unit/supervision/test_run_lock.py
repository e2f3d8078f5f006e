"""A run folder belongs to one live run; a dead one holds nothing."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from megagrpo.errors import UserError
from megagrpo.supervision import run_lock as lock_module
from megagrpo.supervision.run_lock import LOCK_FILE, RunLock

HOLDER = """
import sys, time
from pathlib import Path
from megagrpo.supervision.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(timeout=30)


def no_locks(*_):
    raise OSError(95, "Operation not supported")


def test_a_live_holder_is_named_beside_this_process(holder, tmp_path):
    with pytest.raises(
        UserError,
        match=rf"in use by a live run \(process {holder.pid} on .*this is process "
        rf"{os.getpid()} on",
    ):
        RunLock(tmp_path).acquire()


def test_a_killed_holder_is_taken_over(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=30)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == holder.pid
    lock = RunLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_released_lock_can_be_taken_again(tmp_path):
    for _ in range(2):
        lock = RunLock(tmp_path)
        lock.acquire()
        lock.release()


def test_without_file_locks_a_live_holder_is_still_refused(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module.fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=f"process {holder.pid}"):
        RunLock(tmp_path).acquire()


def test_without_file_locks_a_dead_holder_is_taken_over(holder, tmp_path, monkeypatch):
    holder.kill()
    holder.wait(timeout=30)
    monkeypatch.setattr(lock_module.fcntl, "flock", no_locks)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_without_file_locks_a_holder_on_another_host_is_believed(tmp_path, monkeypatch):
    holder = {"pid": 1, "host": "elsewhere", "started": "2026-01-01 00:00:00", "process_start": "1"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(holder))
    monkeypatch.setattr(lock_module.fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"process 1 on elsewhere .*remove .*run.lock"):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, number):
    def refuse(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(lock_module.os, "open", refuse)
    with pytest.raises(UserError, match=rf"^run\.dir: .*{LOCK_FILE}: {os.strerror(number)}$"):
        RunLock(tmp_path).acquire()


def test_a_disk_that_is_full_before_the_start_is_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock_module.os, "pwrite", refuse)
    with pytest.raises(UserError, match=r"No space left on device$"):
        RunLock(tmp_path).acquire()
