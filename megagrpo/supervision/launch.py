"""Starts the ranks of this machine with torchrun's own agent, and says in plain lines how they ended.

torchrun as a command would answer a SIGTERM with a traceback of its own and exit code 1 though every rank has saved and left with 0, would
die of a SIGUSR1, and would kill ranks that are still saving. Here the signals go to the ranks, which decide.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megagrpo.supervision import exit_codes

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def run_ranks(arguments: Sequence[str], num_ranks: int, max_restarts: int = 0, module: str = "megagrpo.train") -> int:
    """Run `python -m module` with `arguments` on `num_ranks` processes; return the exit code. Main thread only.

    They meet on the loopback at a port that the system picks while the store opens it, so nothing can take it between.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        signals_to_handle="SIGQUIT,SIGHUP",  # the agent's own; those of FORWARDED are ours
    )
    _quiet_agent()
    try:
        with _signals_go_to_ranks():
            elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        return explain(list(error.failures.items()))
    return exit_codes.DONE


def _quiet_agent() -> None:
    """Silence what the agent logs when ranks end; `explain` says it once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _signals_go_to_ranks() -> Iterator[None]:
    """Send each signal on to the ranks, whose thread for signals counts a second Ctrl-C itself."""

    def forward(number: int, _frame: object) -> None:
        for rank_process in psutil.Process().children():
            os.kill(rank_process.pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(failures: list[tuple[int, ProcessFailure]]) -> int:
    """Name the ranks that a signal ended, which they can't do themselves, and return the exit code of the rank that failed first.

    The agent ends what is left after the first failure, by SIGTERM and then by SIGKILL: those are no causes.
    """
    causes = [(rank, failure) for rank, failure in failures if failure.exitcode != exit_codes.PEER_FAILED]
    for rank, failure in causes:
        if failure.exitcode < 0:
            hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
            print(f"rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}{hint}", file=sys.stderr, flush=True)
    codes = [failure.exitcode for _, failure in causes] or [exit_codes.PEER_FAILED]
    code = max(codes)  # a rank that had the time to say why before those that a signal ended
    return code if code > 0 else 128 - code
