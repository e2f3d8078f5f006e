"""Hands requests to worker processes, and kills and replaces the ones that hang or die."""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megagrpo.errors import UserError
from megagrpo.rewards.messages import (
    Failed,
    Ready,
    Refused,
    Reply,
    Request,
    Scores,
    Setup,
    encode_request,
    encode_setup,
)
from megagrpo.rewards.outage import OutageWatch
from megagrpo.rewards.worker_process import MalformedReplyError, WorkerLimits, WorkerProcess

# a worker imports and warms up its rewards: 0.5 to 4 s on a quiet machine, many times that on a busy one
START_SECONDS = 120.0


@dataclass(frozen=True)
class _Job:
    """A request and the promise of its reply."""

    request: Request
    body: bytes  # the request, encoded
    reply: "Future[Reply]" = field(default_factory=Future)


class Dispatcher:
    """A fixed number of workers, one request at a time each, served by one thread whose `select` waits for
    all of them.

    Any thread may ask. The workers belong to the serving thread: it starts them (they die with the thread
    that started them), so nothing but the inbox is shared.
    """

    def __init__(
        self,
        setup: Setup,
        workers: int,
        timeout_seconds: float,
        limits: WorkerLimits,
        outages: OutageWatch,
    ):
        """Start the workers and wait until each is ready; raises UserError where one refuses the setup or
        ends.
        """
        self._setup, self._timeout_seconds = encode_setup(setup), timeout_seconds
        self._limits, self._outages = limits, outages
        self.replaced_workers = 0  # killed after a time-out or found dead, since the start
        self._selector = selectors.DefaultSelector()
        self._assigned: dict[WorkerProcess, _Job | None] = {}  # busy workers; None while starting
        self._idle: list[WorkerProcess] = []
        self._waiting: deque[_Job] = deque()
        self._inbox: deque[_Job] = deque()
        self._lock = threading.Lock()  # guards the inbox and the two below
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._serve, args=(workers, ready), name="rewards", daemon=True
        )
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, request: Request) -> "Future[Reply]":
        """Ask for one reply; may be called from any thread. A refusal is raised by the result, and stops
        all workers.
        """
        job = _Job(request, encode_request(request))  # in the caller's thread: its mistakes are the caller's
        with self._lock:
            if self._closing:
                raise ValueError("the reward pool is closed")
            if not self._inbox:  # one wake-up until it is opened: a full socket would block under the lock
                self._wake_sender.send(b"r")
            self._inbox.append(job)
        return job.reply

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """Return one reply per request, in order. A refusal raises UserError and stops all workers."""
        return [reply.result() for reply in [self.submit(request) for request in requests]]

    def close(self) -> None:
        """Kill and reap every worker; nothing is left to close the second time. Requests without a reply
        raise ValueError.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake_sender.send(b"c")
        self._thread.join()
        self._wake_sender.close()

    # ---- below this line: in the serving thread alone

    def _serve(self, workers: int, ready: "Future[None]") -> None:
        failure: BaseException = ValueError("the reward pool is closed")
        try:
            for _ in range(workers):
                self._start_worker()
            while self._assigned and not self._closing:
                self._wait()
            ready.set_result(None)
            while not self._closing:
                while self._waiting and self._idle:
                    self._assign()
                self._wait()
        except BaseException as error:  # handed to the threads that wait: this thread has no caller
            failure = error
        with self._lock:
            self._closing = True
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        jobs = [*self._waiting, *(job for job in self._assigned.values() if job is not None)]
        for worker in [*self._idle, *self._assigned]:
            worker.kill()
        self._selector.close()
        self._wake_receiver.close()
        if not ready.done():
            ready.set_exception(failure)
        for job in jobs:
            job.reply.set_exception(failure)

    def _start_worker(self) -> None:
        worker = WorkerProcess(self._limits)
        self._selector.register(worker, selectors.EVENT_READ, data=worker)
        self._assigned[worker] = None
        self._send(worker, self._setup, START_SECONDS)

    def _send(self, worker: WorkerProcess, body: bytes, seconds: float) -> bool:
        """Begin to send, and say whether the worker is there to read. The rest goes when it can take more."""
        try:
            worker.send(body, seconds)
        except OSError:  # it is gone: where it was busy, the next read says how it ended
            return False
        if worker.is_sending:
            self._selector.modify(worker, selectors.EVENT_READ | selectors.EVENT_WRITE, data=worker)
        return True

    def _send_more(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(OSError):  # the same
            worker.send_more()
        if not worker.is_sending:
            self._selector.modify(worker, selectors.EVENT_READ, data=worker)

    def _assign(self) -> None:
        worker = self._idle[-1]
        if self._send(worker, self._waiting[0].body, self._timeout_seconds):
            self._idle.remove(worker)
            self._assigned[worker] = self._waiting.popleft()
        else:  # it died while it had nothing to do: no completion is at fault
            self._replace(worker)

    def _wait(self) -> None:
        """Wait for new requests, or for the next reply, end or time-out of any busy worker, and deal with
        it.
        """
        nearest = min((worker.deadline for worker in self._assigned), default=None)
        events = self._selector.select(None if nearest is None else max(0.0, nearest - time.monotonic()))
        for key, ready in events:
            if key.data is None:
                self._open_inbox()
            elif ready & selectors.EVENT_READ:
                self._receive(key.data)
            else:
                self._send_more(key.data)
        now = time.monotonic()
        for worker in [worker for worker in self._assigned if worker.deadline <= now]:
            self._lose(worker, "", timed_out=True)

    def _open_inbox(self) -> None:
        self._wake_receiver.recv(1 << 16)
        with self._lock:
            self._waiting.extend(self._inbox)
            self._inbox.clear()

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            reply = worker.receive()
            if reply is None:
                return
            job = self._check_reply(worker, reply)
        except EOFError:
            self._lose(worker, "")
        except MalformedReplyError as error:
            self._lose(worker, f"its process sent a malformed reply: {error}")
        else:
            self._assigned.pop(worker)
            self._idle.append(worker)
            if job is not None:
                self._conclude(job, worker, reply)

    def _check_reply(self, worker: WorkerProcess, reply: Reply) -> _Job | None:
        """Return the request that `reply` answers, None for the setup; a refusal raises UserError."""
        if worker in self._idle:
            raise MalformedReplyError("nothing was asked")
        if isinstance(reply, Refused):
            raise UserError(reply.message)
        job = self._assigned[worker]
        if isinstance(reply, Ready) != (job is None) or worker.is_sending:
            raise MalformedReplyError(f"{reply.kind!r} is no answer to what was asked")
        if isinstance(reply, Scores) and job and len(reply.scores) != len(job.request.completions):
            raise MalformedReplyError(
                f"{len(reply.scores)} scores for {len(job.request.completions)} completions"
            )
        return job

    def _conclude(self, job: _Job, worker: WorkerProcess, reply: Reply) -> None:
        try:
            self._outages.observe(job.request, reply, time.monotonic() - worker.started)
        except UserError:
            self._waiting.append(job)  # it fails with all the others
            raise
        job.reply.set_result(reply)

    def _lose(self, worker: WorkerProcess, cause: str, timed_out: bool = False) -> None:
        """Kill a worker that hangs, lies or is gone, start another, and answer the request that it leaves
        behind.
        """
        was_idle = worker in self._idle
        job = None if was_idle else self._assigned[worker]
        try:
            status = self._replace(worker)
        except BaseException:
            if job is not None:
                self._waiting.append(job)  # it fails with all the others
            raise
        if job is not None:
            failed = (
                Failed("timeout", f"took over {self._timeout_seconds:g} s")
                if timed_out
                else Failed("crash", cause or f"the process ended with {_name_status(status)}")
            )
            self._conclude(job, worker, failed)
        elif not was_idle:
            reason = (
                f"was not ready after {START_SECONDS:g} s"
                if timed_out
                else cause or f"ended with {_name_status(status)} while it started"
            )
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
