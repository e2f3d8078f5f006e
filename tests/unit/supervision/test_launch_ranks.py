"""`megagrpo run` from outside: what it says and returns, where its signals go, who can reach its ranks."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from megagrpo.supervision import exit_codes
from megagrpo.supervision.launch import Ended, explain

LAUNCH = (
    "import sys; from megagrpo.supervision.launch import Launch\n"
    "with Launch() as launch: sys.exit(launch.run(sys.argv[4:], int(sys.argv[2]), int(sys.argv[3]), "
    "sys.argv[1]))"
)
# a rank that waits in native code before it can look after signals itself
STARTING = """
import os, pathlib, sys, threading
from megagrpo.supervision.signals import end_with_launcher
end_with_launcher()
pathlib.Path(sys.argv[1], os.environ['RANK']).touch()
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.mark.parametrize(
    ("codes", "expected", "told"),
    [
        (
            [exit_codes.PEER_FAILED, -signal.SIGKILL],
            128 + signal.SIGKILL,
            ["rank 1 (pid 77) was ended by SIGKILL (out of memory?)"],
        ),
        ([exit_codes.FAILED, exit_codes.PEER_FAILED], exit_codes.FAILED, []),
        ([exit_codes.USER_ERROR, -signal.SIGTERM], exit_codes.USER_ERROR, []),
        (
            [exit_codes.STALLED, -signal.SIGKILL],
            exit_codes.STALLED,
            ["rank 1 (pid 77) was ended by SIGKILL (out of memory?)"],
        ),
        ([exit_codes.PEER_FAILED, exit_codes.PEER_FAILED], exit_codes.PEER_FAILED, []),
        (
            [-signal.SIGSEGV, exit_codes.PEER_FAILED],
            128 + signal.SIGSEGV,
            ["rank 0 (pid 77) was ended by SIGSEGV"],
        ),
        ([exit_codes.DONE, exit_codes.DONE], exit_codes.DONE, []),
    ],
)
def test_the_cause_decides_the_code(codes, expected, told, capsys):
    assert explain([Ended(rank, 77, code) for rank, code in enumerate(codes)]) == expected
    assert capsys.readouterr().err.splitlines() == told


def test_ranks_that_a_passed_on_signal_ended_are_told_once(capsys):
    codes = [-signal.SIGUSR1, -signal.SIGTERM]
    ended = [Ended(rank, 77, code) for rank, code in enumerate(codes)]
    assert explain(ended, signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert capsys.readouterr().err.startswith("stopped by SIGUSR1 while the ranks were not training")


@contextlib.contextmanager
def launched(tmp_path, module, *arguments, ranks=2, restarts=0, preexec=None):
    """Start ranks of `module` (its text) through a launcher in a process of its own."""
    (tmp_path / "ranks_of_test.py").write_text(module)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "ranks_of_test", str(ranks), str(restarts), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=preexec,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)


@pytest.fixture
def starting(tmp_path):
    """A launcher whose ranks are in the middle of their start, and those ranks."""
    folder = tmp_path / "there"
    folder.mkdir()
    with launched(tmp_path, STARTING, folder) as launcher:
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        yield launcher, psutil.Process(launcher.pid).children()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_while_ranks_start_ends_all_in_one_line(starting, number):
    launcher, ranks = starting
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=10)
    assert (launcher.returncode, len(err.splitlines())) == (128 + number, 1), err
    assert f"stopped by {number.name}" in err
    assert not any(rank.is_running() for rank in ranks)


def test_ctrl_c_before_a_rank_has_come_to_its_first_line_is_no_traceback(tmp_path):
    first_lines = "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
    with launched(tmp_path, f"{first_lines}time.sleep(1.5)\n{STARTING}", tmp_path) as process:
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert said.splitlines() == [
        "stopped by SIGINT while the ranks were not training: nothing was to be saved"
    ]


def test_a_launcher_that_is_killed_takes_ranks_that_start_with_it(starting):
    launcher, ranks = starting
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("is_killed", "wrapper"), [(True, ""), (False, ""), (False, "#!/bin/bash\n{python} {rank}; exit $?\n")]
)
def test_a_rank_whose_torchrun_is_killed_before_its_first_line_ends(tmp_path, is_killed, wrapper):
    """One that is not killed lets it go on, also behind a shell script of the user's."""
    rank, pids = tmp_path / "rank.py", tmp_path / "pids"
    rank.write_text(
        f"import os, pathlib, time\npathlib.Path({str(pids)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(1.5)\nfrom megagrpo.supervision.signals import end_with_launcher\nend_with_launcher()\n"
        f"pathlib.Path({str(tmp_path / 'went_on')!r}).touch()\ntime.sleep(60 if {is_killed} else 0)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    if wrapper:
        (tmp_path / "rank.sh").write_text(wrapper.format(python=sys.executable, rank=rank))
        (tmp_path / "rank.sh").chmod(0o755)
        command += ["--no-python", str(tmp_path / "rank.sh")]
    else:
        command.append(str(rank))
    torchrun = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: pids.exists() and pids.read_text())
        started = psutil.Process(int(pids.read_text()))
        if not is_killed:
            assert torchrun.wait(60) == 0 and (tmp_path / "went_on").exists()
        else:
            torchrun.kill()
            _, alive = psutil.wait_procs([started], timeout=10)
            assert not alive and not (tmp_path / "went_on").exists()
    finally:
        torchrun.kill()
        torchrun.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            started.kill()


def test_nohup_outlives_its_terminal(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()

    def ignore_hangups():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with launched(tmp_path, STARTING, folder, preexec=ignore_hangups) as launcher:
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        ranks = psutil.Process(launcher.pid).children()
        for process in (launcher, *ranks):
            os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert launcher.poll() is None
        assert all(rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_ranks_is_not_lost(number):
    code = (
        "import time; from megagrpo.supervision.launch import Launch\n"
        "with Launch() as launch:\n    print('there', flush=True)\n    time.sleep(60)\n    launch.run([], 1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert err == f"stopped by {number.name} before the ranks were started\n"


@pytest.mark.parametrize(
    ("code", "starts"),
    [(exit_codes.FAILED, 3), (exit_codes.USER_ERROR, 1), (exit_codes.INTERRUPTED, 1), (exit_codes.DONE, 1)],
)
def test_ranks_are_started_again_unless_the_user_has_ended_them(tmp_path, code, starts):
    module = (
        "import os, sys\n"
        "path, code = sys.argv[1:]\n"
        "print(os.environ['TORCHELASTIC_RESTART_COUNT'], file=open(path, 'a'))\n"
        "sys.exit(int(code))\n"
    )
    with launched(tmp_path, module, tmp_path / "starts", code, ranks=1, restarts=2) as launcher:
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == code, err
    assert (tmp_path / "starts").read_text().split() == [str(number) for number in range(starts)]


MEETING = """
import json, os, pathlib, sys, time
import psutil, torch
from datetime import timedelta
from megagrpo.parallel.groups import _start_process_group
from megagrpo.supervision.board import open_board
open_board().sign_in()
_start_process_group(timedelta(seconds=60))
torch.distributed.barrier()
mine = [list(each.laddr) for pid in (os.getpid(), os.getppid())
        for each in psutil.Process(pid).net_connections() if each.status == 'LISTEN']
target = pathlib.Path(sys.argv[1], os.environ['RANK'])
target.with_suffix('.new').write_text(json.dumps(mine))
target.with_suffix('.new').rename(target)
time.sleep(100)
"""


def test_another_machine_reaches_no_port_of_a_run(tmp_path):
    """A client that comes to the address of the network card, as another machine would, is refused by every
    port that launcher and ranks listen at.
    """
    folder = tmp_path / "there"
    folder.mkdir()
    with launched(tmp_path, MEETING, folder):
        wait_until(lambda: {path.name for path in folder.iterdir()} == {"0", "1"}, 120)
        listening = [tuple(each) for path in folder.iterdir() for each in json.loads(path.read_text())]
        assert len(set(listening)) >= 3  # the store, and each rank's end of the group
        for _, port in listening:
            socket.create_connection(("127.0.0.1", port), 5).close()  # the ports are the right ones
            for outside in outside_addresses():
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((outside, port), 5)
    assert {address for address, *_ in listening} == {"127.0.0.1"}


def outside_addresses():
    """Return this machine's addresses that are not the loopback's."""
    return [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
