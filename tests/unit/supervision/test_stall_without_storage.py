"""A stalled rank ends within seconds where nothing can be written any more: the thread that ends it tells
what it can and goes on. Whatever it meets must not leave the rank to the timer that comes a minute later.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagrpo.supervision import exit_codes
from megagrpo.supervision.supervisor import BACKSTOP_SECONDS, LEAVE_SECONDS, STACK_SECONDS

BUDGET_SECONDS = 4.0
STALL = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from megagrpo.config.run_sections import WatchdogConfig
from megagrpo.supervision.board import Board
from megagrpo.supervision.supervisor import Supervisor
seconds = float(sys.argv[2])
watchdog = WatchdogConfig(factor=1, floor_seconds=seconds, limit_seconds=seconds)
supervisor = Supervisor(Path(sys.argv[1]), watchdog)
supervisor.start(Board(dist.HashStore(), 0))
print("started", flush=True)
with supervisor.phase("update"):
    time.sleep(1000)
"""


@pytest.fixture
def screen():
    """Standard error on a full disk."""
    with Path("/dev/full").open("w") as file:
        yield file


@pytest.mark.parametrize("full", ["temporary folder", "run folder too", "screen too"])
def test_a_stall_ends_in_seconds_and_few_lines_whatever_is_full(tmp_path, screen, full):
    run_dir = tmp_path / "run"
    if full != "temporary folder":
        run_dir.write_text("no folder can be made here")
    stalled = subprocess.Popen(
        [sys.executable, "-c", STALL, str(run_dir), str(BUDGET_SECONDS)],
        stdout=subprocess.PIPE,
        stderr=screen if full == "screen too" else subprocess.PIPE,
        text=True,
        # torchrun keeps the file of a rank's error in the temporary folder
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": "/dev/full", "TMPDIR": "/dev/full"},
    )
    try:
        assert stalled.stdout.readline() == "started\n"
        started = time.monotonic()
        _, told = stalled.communicate(timeout=BUDGET_SECONDS + BACKSTOP_SECONDS)
    finally:
        stalled.kill()
    assert stalled.returncode == exit_codes.STALLED
    # the budget, and what a whole run's ranks have to write their stacks and to leave
    assert time.monotonic() - started < BUDGET_SECONDS + STACK_SECONDS + LEAVE_SECONDS
    if full != "screen too":
        assert told.count("rank 0 stalled in phase update: no progress for") >= 1
        assert len(told.splitlines()) < 30, told
