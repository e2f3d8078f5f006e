"""What acts from beside the main thread: signals that arrive while it hangs, stacks, siblings, the end of
a process.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from megagrpo.supervision.board import Board
from megagrpo.supervision.processes import Siblings, dump_stacks
from megagrpo.supervision.signals import LAUNCHER_ENDED, STOP_SIGNALS, SignalPipe

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


def test_signals_reach_the_waiting_thread_and_handlers_come_back():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    pipe = SignalPipe()
    try:
        for number in (*STOP_SIGNALS, signal.SIGHUP, LAUNCHER_ENDED):
            os.kill(os.getpid(), number)
            assert pipe.wait(10) == [number]
        assert pipe.wait(0) == []
    finally:
        pipe.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_stacks_name_the_line_where_a_thread_waits(tmp_path):
    gate = threading.Event()

    def waits_for_the_gate():
        gate.wait(30)

    thread = threading.Thread(target=waits_for_the_gate)
    thread.start()
    try:
        text = dump_stacks(tmp_path, 4).read_text()
    finally:
        gate.set()
        thread.join()
    assert (tmp_path / "rank_0004.txt").exists() and "waits_for_the_gate" in text and "dump_stacks" in text


@pytest.fixture
def sibling(monkeypatch):
    """A process that has signed in as rank 1 beside this one as rank 0; its parent passes for this one's
    too.
    """
    store, process = dist.HashStore(), subprocess.Popen(SLEEP)
    board = Board(store, 1)
    with monkeypatch.context() as as_sibling:
        as_sibling.setattr(os, "getpid", lambda: process.pid)
        board.sign_in()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "getppid", os.getpid)
    yield process, board, Siblings(Board(store, 0))
    process.kill()
    process.wait()


def test_a_sibling_that_was_killed_is_dead_even_before_it_is_reaped(sibling):
    process, _, siblings = sibling
    assert siblings.dead() == []
    process.kill()
    deadline = time.monotonic() + 30
    while siblings.dead() != [1]:
        assert time.monotonic() < deadline


def test_a_sibling_that_left_in_good_order_is_not_dead(sibling):
    process, board, siblings = sibling
    board.sign_out()
    process.kill()
    process.wait()
    assert siblings.dead() == []


def test_a_frozen_sibling_can_be_killed(sibling):
    process, _, siblings = sibling
    process.send_signal(signal.SIGSTOP)
    assert siblings.kill(1)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert not siblings.kill(1)


def test_leaving_takes_the_children_along_and_waits_for_no_thread():
    code = (
        "import subprocess, sys, threading, time\n"
        "from megagrpo.supervision.processes import leave_now\n"
        f"child = subprocess.Popen({SLEEP!r}, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "threading.Thread(target=lambda: time.sleep(100)).start()\n"
        "leave_now(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    deadline = time.monotonic() + 30
    while _runs(int(done.stdout)):
        assert time.monotonic() < deadline


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
