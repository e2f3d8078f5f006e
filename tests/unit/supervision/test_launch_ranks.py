"""What `megagrpo run` says and returns for ranks that ended badly: the cause, not those that were ended because of it."""

import signal
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
        ([exit_codes.PEER_FAILED, -signal.SIGKILL], 128 + signal.SIGKILL, ["rank 1 (pid 77) was ended by SIGKILL (out of memory?)"]),
        ([exit_codes.FAILED, exit_codes.PEER_FAILED], exit_codes.FAILED, []),
        ([exit_codes.USER_ERROR, exit_codes.USER_ERROR], exit_codes.USER_ERROR, []),
        ([exit_codes.STALLED, -signal.SIGKILL], exit_codes.STALLED, ["rank 1 (pid 77) was ended by SIGKILL (out of memory?)"]),
        ([exit_codes.PEER_FAILED, exit_codes.PEER_FAILED], exit_codes.PEER_FAILED, []),
        ([-signal.SIGSEGV, exit_codes.PEER_FAILED], 128 + signal.SIGSEGV, ["rank 0 (pid 77) was ended by SIGSEGV"]),
    ],
)
def test_the_cause_decides_the_code(codes, expected, told, capsys):
    assert explain([(rank, Failure(code)) for rank, code in enumerate(codes)]) == expected
    assert capsys.readouterr().err.splitlines() == told
