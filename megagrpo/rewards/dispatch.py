"""Hands requests to worker processes, and kills and replaces the ones that hang or die."""

import contextlib
import selectors
import time
from collections.abc import Sequence

from megagrpo.errors import UserError
from megagrpo.rewards.messages import Failed, Ready, Refused, Request, Scores, Setup
from megagrpo.rewards.process import WorkerProcess

START_SECONDS = 120.0  # a worker imports and warms up its rewards: 0.5 to 4 s on a quiet machine, many times that on a busy one


class Dispatcher:
    """A fixed number of workers, one request at a time each. One thread, no locks: `select` waits for all of them."""

    def __init__(self, setup: Setup, workers: int, timeout_seconds: float):
        """Start the workers and wait until each is ready; raises UserError where one refuses the setup or ends."""
        self._setup, self._timeout_seconds = setup, timeout_seconds
        self.replaced_workers = 0  # killed after a time-out or found dead, since the start
        self._selector = selectors.DefaultSelector()
        self._assigned: dict[WorkerProcess, int | None] = {}  # busy workers: position of the request, None while starting
        self._idle: list[WorkerProcess] = []
        try:
            for _ in range(workers):
                self._start_worker()
            while self._assigned:
                self._wait({})
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[Request]) -> list[Scores | Failed]:
        """Return one reply per request, in order. A refusal raises UserError and stops all workers."""
        if not (self._idle or self._assigned):
            raise ValueError("the reward pool is closed")
        replies: dict[int, Scores | Failed] = {}
        waiting = list(range(len(requests)))[::-1]
        try:
            while len(replies) < len(requests):
                while waiting and self._idle:
                    self._assign(waiting, requests)
                self._wait(replies)
        except BaseException:  # workers at work would answer the next call's requests with this one's scores
            self.close()
            raise
        return [replies[position] for position in range(len(requests))]

    def close(self) -> None:
        """Kill and reap every worker; nothing is left to close the second time."""
        for worker in [*self._idle, *self._assigned]:
            self._selector.unregister(worker)
            worker.kill()
        self._idle.clear()
        self._assigned.clear()

    def _start_worker(self) -> None:
        worker = WorkerProcess()
        self._selector.register(worker, selectors.EVENT_READ, data=worker)
        self._assigned[worker] = None
        with contextlib.suppress(BrokenPipeError):  # it ended at once: the next read says with which status
            worker.send(self._setup, START_SECONDS)

    def _assign(self, waiting: list[int], requests: Sequence[Request]) -> None:
        worker = self._idle[-1]
        try:
            worker.send(requests[waiting[-1]], self._timeout_seconds)
        except BrokenPipeError:  # it died while it had nothing to do: no completion is at fault
            self._replace(worker)
        else:
            self._idle.remove(worker)
            self._assigned[worker] = waiting.pop()

    def _wait(self, replies: dict[int, Scores | Failed]) -> None:
        """Wait for the next reply, end or time-out of any busy worker, and deal with it."""
        nearest = min(worker.deadline for worker in self._assigned)
        events = self._selector.select(max(0.0, nearest - time.monotonic()))
        for key, _ in events:
            self._receive(key.data, replies)
        now = time.monotonic()
        for worker in [worker for worker in self._assigned if worker.deadline <= now]:
            self._lose(worker, replies, timed_out=True)

    def _receive(self, worker: WorkerProcess, replies: dict[int, Scores | Failed]) -> None:
        try:
            reply = worker.receive()
        except EOFError:
            self._lose(worker, replies, timed_out=False)
            return
        if isinstance(reply, Refused):
            raise UserError(reply.message)
        if reply is not None:
            position = self._assigned.pop(worker)
            self._idle.append(worker)
            if position is not None and not isinstance(reply, Ready):
                replies[position] = reply

    def _lose(self, worker: WorkerProcess, replies: dict[int, Scores | Failed], timed_out: bool) -> None:
        """Kill a worker that hangs or is gone, put a new one in its place, and answer the request that it leaves behind."""
        was_idle = worker in self._idle
        position = None if was_idle else self._assigned[worker]
        status = self._replace(worker)
        if position is not None:
            limit = f"took over {self._timeout_seconds:g} s"
            replies[position] = Failed("timeout", limit) if timed_out else Failed("crash", f"the process ended with {_name_status(status)}")
        elif not was_idle:
            reason = f"was not ready after {START_SECONDS:g} s" if timed_out else f"ended with {_name_status(status)} while it started"
            raise UserError(f"rewards: a worker process {reason}; its standard error is above")

    def _replace(self, worker: WorkerProcess) -> int:
        """Kill, reap and forget the worker, start another, and return the exit status of the first."""
        self._selector.unregister(worker)
        self._assigned.pop(worker, None)
        if worker in self._idle:
            self._idle.remove(worker)
        status = worker.kill()
        self.replaced_workers += 1
        self._start_worker()
        return status


def _name_status(status: int) -> str:
    """Return `exit status 3` or `signal 11`; a process's return code is negative for a signal."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"
