"""Starts the ranks of this machine with torchrun's own agent, and says in plain lines how they ended.

torchrun as a command would answer a SIGTERM with a traceback of its own and exit code 1 though every rank has
saved and left with 0, would die of a SIGUSR1, and would kill ranks that are still saving. Here the signals go
to the ranks, which decide.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megagrpo.supervision import exit_codes

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
FINAL = (exit_codes.USER_ERROR, exit_codes.INTERRUPTED)  # no restart after these


class _Agent(LocalElasticAgent):
    """torchrun's agent, which does not restart ranks that the user has ended, or whose mistake they would
    only meet again.
    """

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode in FINAL for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


def run_ranks(
    arguments: Sequence[str], num_ranks: int, max_restarts: int = 0, module: str = "megagrpo.train"
) -> int:
    """Run `python -m module` with `arguments` on `num_ranks` processes; return the exit code. Main thread
    only.

    They meet on the loopback at a port that the system picks while the store opens it, so nothing can take it
    between.
    """
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            "c10d", "127.0.0.1:0", uuid.uuid4().hex, min_nodes=1, max_nodes=1, local_addr="127.0.0.1"
        )
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=("-m", module, *arguments),
        max_restarts=max_restarts,
        local_addr="127.0.0.1",
    )
    # the agent's own; those of FORWARDED are ours
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT,SIGHUP"
    _quiet_agent()
    try:
        with _signals_go_to_ranks():
            result = _Agent(spec, DefaultLogsSpecs()).run()
    finally:
        rendezvous.shutdown()
    return explain(list(result.failures.items())) if result.is_failed() else exit_codes.DONE


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
    """Name the ranks that a signal ended, which they can't do themselves, and return the exit code of the
    rank that failed first.

    The agent ends what is left after the first failure, by SIGTERM and then by SIGKILL: those are no causes.
    """
    causes = [(rank, failure) for rank, failure in failures if failure.exitcode != exit_codes.PEER_FAILED]
    for rank, failure in causes:
        if failure.exitcode < 0:
            hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
            print(
                f"rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}{hint}",
                file=sys.stderr,
                flush=True,
            )
    codes = [failure.exitcode for _, failure in causes] or [exit_codes.PEER_FAILED]
    code = max(codes)  # a rank that had the time to say why before those that a signal ended
    return code if code > 0 else 128 - code
