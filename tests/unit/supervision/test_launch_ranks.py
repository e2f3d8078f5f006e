"""What `megagrpo run` says and returns for ranks that ended badly: the cause, not those that were ended
because of it.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from megagrpo.supervision import exit_codes
from megagrpo.supervision.launch import explain


@dataclass
class Failure:
    exitcode: int
    pid: int = 77

    def signal_name(self):
        return signal.Signals(-self.exitcode).name


@pytest.mark.parametrize(
    ("codes", "expected", "told"),
    [
        (
            [exit_codes.PEER_FAILED, -signal.SIGKILL],
            128 + signal.SIGKILL,
            ["rank 1 (pid 77) was ended by SIGKILL (out of memory?)"],
        ),
        ([exit_codes.FAILED, exit_codes.PEER_FAILED], exit_codes.FAILED, []),
        ([exit_codes.USER_ERROR, exit_codes.USER_ERROR], exit_codes.USER_ERROR, []),
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
    ],
)
def test_the_cause_decides_the_code(codes, expected, told, capsys):
    assert explain([(rank, Failure(code)) for rank, code in enumerate(codes)]) == expected
    assert capsys.readouterr().err.splitlines() == told


@pytest.mark.parametrize(
    ("code", "starts"),
    [(exit_codes.FAILED, 3), (exit_codes.USER_ERROR, 1), (exit_codes.INTERRUPTED, 1), (exit_codes.DONE, 1)],
)
def test_ranks_are_started_again_unless_the_user_has_ended_them(tmp_path, code, starts):
    (tmp_path / "ends.py").write_text(
        "import os, sys\n"
        "path, code = sys.argv[1:]\n"
        "print(os.environ['TORCHELASTIC_RESTART_COUNT'], file=open(path, 'a'))\n"
        "sys.exit(int(code))\n"
    )
    run = (
        "import sys; from megagrpo.supervision.launch import run_ranks; "
        f"sys.exit(run_ranks([{str(tmp_path / 'starts')!r}, '{code}'], 1, max_restarts=2, module='ends'))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", run],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "starts").read_text().split() == [str(number) for number in range(starts)]
