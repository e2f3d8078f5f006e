"""Launches a worker script under torchrun (gloo, loopback, a free port) with a hard time-out: a dead or
hung rank fails in seconds.
"""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from megagrpo.device.environment import thread_environment

WORKERS = Path(__file__).parent / "workers"
_CASE_LINE = re.compile(r"^CASE .* \| .*$", re.MULTILINE)  # of workers/reported_cases.py


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_torchrun(
    ranks: int,
    target: str | list[str],
    *arguments: object,
    timeout_seconds: int = 240,
    expect_failure: bool = False,
) -> str:
    """Run `target` (a file in workers/, or `["-m", module]`) on `ranks` ranks and return its output; any
    non-zero exit fails the test.
    """
    code, output = _run(ranks, target, tuple(map(str, arguments)), timeout_seconds)
    assert code is not None, f"{target} hung for {timeout_seconds} s:\n{output[-6000:]}"
    if expect_failure:
        assert code != 0, f"{target} was expected to fail:\n{output[-6000:]}"
    else:
        assert code == 0, f"{target} exited with {code}:\n{_first_cause(output)}"
    return output


def check_case(
    name: str, cases: Collection[str], ranks: int, worker: str, *arguments: object, timeout_seconds: int = 240
) -> None:
    """Fail unless a worker reports that the case `name` passed; all cases of a launch share it.

    Args:
        cases: names of all cases that the worker runs with these arguments; where one of them has no test id,
            or an id no case, every test of the launch fails.
    """
    code, output = _run_once(ranks, worker, tuple(map(str, arguments)), timeout_seconds)
    told = dict(line.removeprefix("CASE ").rsplit(" | ", 1) for line in _CASE_LINE.findall(output))
    if told.get(name) != "passed":
        failed = [case for case in told if told[case] != "passed" and case != name]
        reason = told.get(name) or (f"not reached, {failed[0]} failed" if failed else f"not run, code {code}")
        raise AssertionError(f"{name}: {reason}\n{_first_cause(output)}")
    assert code != 0 or told.keys() == set(cases), f"no test id, or no case: {told.keys() ^ set(cases)}"
    assert code == 0 or any(what != "passed" for what in told.values()), _first_cause(output)


def _run(
    ranks: int, target: str | list[str], arguments: tuple[str, ...], timeout_seconds: int
) -> tuple[int | None, str]:
    """Return (exit code, output); the code is None where the launch hung and was killed."""
    command = [str(WORKERS / target)] if isinstance(target, str) else target
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
    ]
    environment = {**os.environ, **thread_environment(ranks), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [*launcher, "--master-port", str(free_port()), *command, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    finally:
        if process.poll() is None:  # left by another exception, such as the test's own time-out
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


_run_once = functools.cache(_run)


def _first_cause(output: str) -> str:
    """Return the end of what the ranks printed, without the launcher's own report after it."""
    report = output.rfind("torch/distributed/run.py")
    end = output.rfind("Traceback", 0, report) if report >= 0 else len(output)
    return output[:end][-5000:]
