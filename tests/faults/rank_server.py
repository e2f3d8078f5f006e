"""Forks the ranks of one launch after the other from a process that has everything imported: a start costs a
second instead of ten.

One JSON object a line on standard input: `{"ranks": n, "port": p, "arguments": [...], "faults": [...],
"log": path, "run_dir": path, "output": path, "seconds": limit, "files": names in shared memory}`. One line
back when all ranks have ended: `{"codes": of the ranks, "hung" for one that had to be killed at the limit,
"peak_bytes": of their memory, "left": what of them is still there 10 s later}`. Nothing ends the ranks that
are left after one has failed: that is for them to do.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false"
)

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import inject  # noqa: E402
import outside  # noqa: E402

import megagrpo.device.environment  # noqa: E402
import megagrpo.run  # noqa: E402
import megagrpo.train  # noqa: E402


def main() -> None:
    outside.adopt_orphans()
    megagrpo.device.environment.set_thread_environment = lambda ranks: (
        None
    )  # done above: torch is loaded already
    for line in sys.stdin:
        launch = json.loads(line)
        own, files = outside.descendants(), outside.shared_files(launch["files"])
        ranks = {fork_rank(launch, rank): rank for rank in range(launch["ranks"])}
        codes, peaks = wait_for(ranks, launch["seconds"])
        left = outside.left_behind([*(outside.descendants() - own)], files, launch["files"])
        print(json.dumps({"codes": codes, "peak_bytes": peaks, "left": left}), flush=True)


def wait_for(children: dict[int, int], limit: float) -> tuple[list[int | str | None], list[int]]:
    """Reap all ranks; those that are left at the limit are killed. Returns their exit codes and the largest
    memory of each.
    """
    started = time.monotonic()
    codes: list[int | str | None] = [None] * len(children)
    peaks = [0] * len(children)
    left = dict(children)
    while left:
        for pid, rank in list(left.items()):
            reaped, status, usage = os.wait4(pid, os.WNOHANG)
            if reaped:
                peaks[rank] = usage.ru_maxrss * 1024
                codes[rank] = codes[rank] or os.waitstatus_to_exitcode(status)
                del left[pid]
        if left and time.monotonic() - started > limit:
            for pid, rank in left.items():
                codes[rank] = "hung"
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return codes, peaks


def fork_rank(launch: dict, rank: int) -> int:
    """Start one rank and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        output = os.open(launch["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(launch["ranks"]),
            LOCAL_WORLD_SIZE=str(launch["ranks"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(launch["port"]),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        inject.install(launch["faults"], Path(launch["log"]), Path(launch["run_dir"]))
        code = megagrpo.train.main(launch["arguments"])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
