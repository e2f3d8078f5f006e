"""Cases that run in a process of their own, since they change torch for all of it; how a test starts them.

A worker registers functions with `@case` and calls `run_cases`; a test asks for all results of a worker at
once, as {case: what it returned | {"error": .., "place": ..}}.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a case under its function's name."""
    _CASES[function.__name__] = function
    return function


def run_cases() -> None:
    """Run every case and write what rank 0 saw to the file that the command line names."""
    results = {}
    for name, function in _CASES.items():
        started = time.process_time()
        try:
            results[name] = function()
        except BaseException as error:  # Megatron's checkpoint errors are BaseExceptions
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:600]}", "place": place}
        print(f"{name}: {results[name]} ({time.process_time() - started:.1f} CPU-s)", flush=True)
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1]).write_text(json.dumps(results))


def rehearse(worker: str, ranks: int = 1, timeout_seconds: int = 240, **environment: str) -> dict[str, Any]:
    """Run `workers/WORKER` on `ranks` ranks and return the results of its cases."""
    from torchrun_launch import free_port

    from megagrpo.device.environment import thread_environment

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        process = subprocess.Popen(
            [*command, str(HERE / "workers" / worker), f"{folder}/results.json"],
            env={
                **os.environ,
                **thread_environment(ranks),
                "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
                "PYTHONWARNINGS": "ignore",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{worker} hung: {process.communicate()[0][-5000:]}") from None
        assert process.returncode == 0, output[-5000:]
        return json.loads(Path(folder, "results.json").read_text())
