"""What a server makes in shared memory does not outlive it, whoever is killed: the server, the rank that
started it, or both.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megagrpo.engines.server.command import HOST_PATH
from megagrpo.engines.server.server_process import ServerProcess
from megagrpo.supervision.orphaned_files import remove_orphans
from megagrpo.wire.shared_files import SHARED_MEMORY, files_of_group

# As vLLM's and SGLang's processes do: a file under a name of its own, mapped by a child; and one that was
# there before, which stays.
SERVER = f"""
import mmap, os, subprocess, sys, time
sys.path.insert(0, {str(HOST_PATH)!r})
from megagrpo.host.parent_watch import watch_parent
watch_parent()
make = "import mmap, os, sys, time; name = '/dev/shm/' + sys.argv[1]; file = open(name + '.first', 'wb+'); "
make += "file.truncate(4096); mapped = mmap.mmap(file.fileno(), 4096); "
make += "os.link(file.name, name); os.unlink(file.name); "  # as a semaphore gets its name
make += "other = open('/dev/shm/' + sys.argv[2], 'rb'); "
make += "kept = mmap.mmap(other.fileno(), 1, access=mmap.ACCESS_READ); print(flush=True); time.sleep(600)"
command = [sys.executable, "-c", make, *sys.argv[1:3]]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[3], "w").write(str(os.getpid()))
time.sleep(600)
"""
OWNER = f"""
import sys, time
from pathlib import Path
from megagrpo.engines.server.server_process import ServerProcess
words = [sys.executable, "-c", {SERVER!r}, *sys.argv[1:4]]
server = ServerProcess(lambda port: words, {{}}, Path(sys.argv[4]))
server.wait_ready(Path(sys.argv[3]).is_file, 60)
"""


@pytest.fixture
def names():
    """Of the file that a server makes, and of one that it only reads."""
    own = [f"test_{what}_{os.getpid()}" for what in ("made", "kept")]
    (SHARED_MEMORY / own[1]).write_bytes(b"x")
    yield own
    for name in own:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


@pytest.fixture
def arguments(names, tmp_path):
    return [*names, str(tmp_path / "pid"), str(tmp_path / "log")]


def files_of(pid, names):
    """What is there of the ledgers of an owner, and of these names."""
    found = [path.name for path in SHARED_MEMORY.glob(f"megagrpo_ledger_{pid}_*")]
    return {*found, *(name for name in names if (SHARED_MEMORY / name).exists())}


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.05)


def start(arguments, tmp_path):
    server = ServerProcess(
        lambda port: [sys.executable, "-c", SERVER, *arguments[:3]], {}, Path(arguments[3])
    )
    server.wait_ready((tmp_path / "pid").is_file, 60)
    return server


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed before"])
def test_files_of_a_server_go_with_it_and_those_from_before_stay(arguments, names, tmp_path, is_killed):
    before = files_of(os.getpid(), [])
    server = start(arguments, tmp_path)
    assert files_of_group(server.pid) >= set(names)
    assert files_of(os.getpid(), names) > before | set(names)
    if is_killed:
        os.killpg(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_alive())
        assert names[0] in files_of(os.getpid(), names)
    server.stop(grace_seconds=0.5)
    assert files_of(os.getpid(), names) == before | {names[1]}


def owner(arguments, then):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER + then, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_files_go_where_the_owner_is_killed(arguments, names, tmp_path):
    rank = owner(arguments, "time.sleep(600)")
    wait_until(lambda: names[0] in files_of(rank.pid, names) and (tmp_path / "pid").is_file(), 60)
    rank.kill()
    rank.wait()
    wait_until(lambda: files_of(rank.pid, names) == {names[1]})


def test_files_go_where_the_owner_leaves_at_once(arguments, names):
    rank = owner(arguments, "from megagrpo.supervision.processes import leave_now; leave_now(7)")
    assert rank.wait(60) == 7
    assert files_of(rank.pid, names) == {names[1]}


def test_the_next_run_removes_files_where_all_were_killed_at_once(arguments, names, tmp_path):
    rank = owner(arguments, "open(sys.argv[4] + '.ready', 'w'); time.sleep(600)")
    wait_until(Path(arguments[3] + ".ready").is_file, 60)
    everybody = [psutil.Process(rank.pid), *psutil.Process(rank.pid).children(recursive=True)]
    for process in everybody:  # so that none can clear up after another
        process.suspend()
    for process in everybody:
        process.kill()
    rank.wait()
    (ledger,) = files_of(rank.pid, [])
    assert ledger not in remove_orphans() and names[0] in files_of(rank.pid, names)  # may still be in use
    os.utime(SHARED_MEMORY / ledger, (time.time() - 60,) * 2)
    assert ledger in remove_orphans()
    assert files_of(rank.pid, names) == {names[1]}
