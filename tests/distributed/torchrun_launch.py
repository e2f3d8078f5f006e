"""Launches a worker script under torchrun (gloo, loopback, a free port) with a hard time-out: a dead or
hung rank fails in seconds.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from megagrpo.device.launch import thread_environment

WORKERS = Path(__file__).parent / "workers"


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
        [*launcher, "--master-port", str(free_port()), *command, *map(str, arguments)],
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
        raise AssertionError(f"{command} hung for {timeout_seconds} s:\n{output[-6000:]}") from None
    finally:
        if process.poll() is None:  # left by another exception, such as the test's own time-out
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if expect_failure:
        assert process.returncode != 0, f"{command} was expected to fail:\n{output[-6000:]}"
    else:
        assert process.returncode == 0, f"{command} exited with {process.returncode}:\n{_first_cause(output)}"
    return output


def _first_cause(output: str) -> str:
    """Return the end of what the ranks printed, without the launcher's own report after it."""
    report = output.rfind("torch/distributed/run.py")
    end = output.rfind("Traceback", 0, report) if report >= 0 else len(output)
    return output[:end][-5000:]
