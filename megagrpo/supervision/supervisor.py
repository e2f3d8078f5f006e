"""Watches one rank from its own thread: failed peers, stalls, signals. Ends a rank that can't end itself."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megagrpo.config.run_sections import WatchdogConfig
from megagrpo.supervision import exit_codes
from megagrpo.supervision.board import Board
from megagrpo.supervision.failure import (
    Failure,
    build_failure,
    is_echo,
    keep,
    note_for_launcher,
    say,
    tell,
    tell_stall,
)
from megagrpo.supervision.processes import Siblings, dump_stacks, leave_now
from megagrpo.supervision.signals import LAUNCHER_ENDED, SignalPipe
from megagrpo.supervision.watchdog import PhaseBudgets

BETWEEN = "between phases"
POLL_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # how long a rank may take to unwind after a peer has failed
STACK_SECONDS = 5.0  # how long all ranks may take to write their stacks
CAUSE_SECONDS = 10.0  # how long a rank whose collective broke waits for the peer that knows why
# faulthandler's own timer ends a main thread that holds the interpreter's lock so long after its budget
BACKSTOP_SECONDS = 60.0


class Supervisor:
    """Where this rank is, and the thread that acts on it.

    The main thread tells with `phase`, `enter`, `leave` and `step`; without `start` that is all that happens.
    """

    def __init__(self, run_dir: Path, watchdog: WatchdogConfig, rank: int = 0, world_size: int = 1):
        self.run_dir, self.rank, self.world_size = run_dir, rank, world_size
        self.step: int | None = None  # the step that runs now
        # why this rank or another was asked to save and leave, e.g. the signal's name
        self.stop_reason: str | None = None
        # the watching thread calls it again and again once a stop was asked for
        self._while_stopping: Callable[[], None] = self._leave_before_training
        self._before_leaving: Callable[[], None] = lambda: None
        self.budgets = PhaseBudgets(watchdog)
        self._phases: list[tuple[str, float]] = [(BETWEEN, time.monotonic())]  # innermost last, with starts
        # the newest exception that left a phase, and that phase
        self._raised: tuple[BaseException, str] | None = None
        self._board: Board | None = None  # None: not started, or lost with the launcher
        self._is_started = False
        self._done = threading.Event()
        self._peer_failed_at: float | None = None
        self._interrupts = 0
        self._exit_code: int | None = None

    # ---- told by the main thread

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase."""
        self.enter(name)
        started = time.monotonic()
        try:
            yield
        finally:
            self.leave(name, time.monotonic() - started)

    def training_begins(self, while_stopping: Callable[[], None], before_leaving: Callable[[], None]) -> None:
        """From now on there is something to save: a stop no longer leaves at once. `while_stopping` is called
        again and again until the loop has ended, `before_leaving` once where any rank has failed.
        """
        self._while_stopping, self._before_leaving = while_stopping, before_leaving

    def enter(self, name: str) -> None:
        """A phase starts; it may be inside another, whose clock stands still meanwhile."""
        self._phases.append((name, time.monotonic()))
        self._moved()

    def leave(self, name: str, seconds: float) -> None:
        """The innermost phase ends, by an exception or not."""
        error = sys.exc_info()[1]
        if error is None:
            self.budgets.record(name, seconds)
        elif self._raised is None or self._raised[0] is not error:
            self._raised = (error, name)
        self._phases = [(outer, since + seconds) for outer, since in self._phases[:-1]]
        if len(self._phases) == 1:
            self._phases[0] = (BETWEEN, time.monotonic())
        self._moved()

    def _moved(self) -> None:
        if not self._is_started:
            return
        name, _ = self._phases[-1]
        seconds = self.budgets.seconds(name) + BACKSTOP_SECONDS
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        board = self._board
        try:
            if board is not None:
                board.announce(name, self.step)
        except RuntimeError:
            self._look_for_the_launcher()

    # ---- life

    def start(self, board: Board) -> None:
        """Begin to watch; main thread only."""
        self._board, self._is_started = board, True
        board.sign_in()
        self._siblings = Siblings(board)
        self._signals = SignalPipe()
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop watching: this rank leaves in good order."""
        if not self._is_started:
            return
        faulthandler.cancel_dump_traceback_later()
        self._done.set()
        self._thread.join()
        if self._board is not None:
            self._board.sign_out()
        self._signals.close()
        self._board, self._is_started = None, False

    def fail(self, error: BaseException) -> int:
        """Tell of an exception that ends this rank, once for all ranks, and return the exit code; the
        first call counts.
        """
        if self._exit_code is not None:
            return self._exit_code
        phase = self._raised[1] if self._raised and self._raised[0] is error else self._phases[-1][0]
        failure = build_failure(error, self.rank, phase, self.step)
        self._peer_failed_at = float("inf")  # the watching thread leaves it to this one
        self._exit_code = self._tell(failure, echo=is_echo(error))
        self._before_leaving()
        return self._exit_code

    def _tell(self, failure: Failure, echo: bool) -> int:
        if failure.kind != "user":
            keep(self.run_dir, failure)
        board = self._board
        if board is None:
            say(failure.tell())
            return failure.exit_code
        try:
            if echo:
                self._wait_for_cause(board)
            is_first = board.claim(failure)
        except RuntimeError:  # the store is gone, so nobody can say who is the first
            is_first = True
        if is_first:
            tell(self.run_dir, failure)
            return failure.exit_code
        first = board.first_failure()
        assert first is not None
        note_for_launcher(f"left because rank {first.rank} failed")
        return first.peer_exit_code

    def _wait_for_cause(self, board: Board) -> None:
        """Wait until the rank that met the cause says so, or is found dead."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline and board.first_failure() is None:
            self._look_for_the_dead(board)
            time.sleep(POLL_SECONDS / 5)

    # ---- the watching thread

    def _watch(self) -> None:
        while not self._done.is_set():
            for number in self._signals.wait(POLL_SECONDS):
                self._on_signal(number)
            self._look_for_the_launcher()
            board = self._board
            try:
                if board is not None:
                    self._look(board)
            except RuntimeError:  # the store does not answer
                self._look_for_the_launcher()
            if self.stop_reason is not None:
                self._while_stopping()

    def _look_for_the_launcher(self) -> None:
        """Save and stop where the launcher has ended: the store is gone with it."""
        if self._board is not None and "RANK" in os.environ and os.getppid() != self._parent:
            self._leave_the_launcher()

    def _leave_the_launcher(self) -> None:
        self._board = None
        self._ask_to_stop("the launcher's end")

    def _on_signal(self, number: signal.Signals) -> None:
        if number == LAUNCHER_ENDED:
            self._leave_the_launcher()
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                self._tell_interrupt()
                leave_now(exit_codes.INTERRUPTED)
        self._ask_to_stop(number.name)

    def _tell_interrupt(self) -> None:
        told = "interrupted twice: left at once, without saving"
        failure = Failure(self.rank, self._phases[-1][0], self.step, told, kind="user")
        if self._board is not None and self._board.claim(failure):
            tell(self.run_dir, failure)

    def _leave_before_training(self) -> None:
        """Leave at once: what starts may wait for minutes, and the same command starts it again."""
        reason = self.stop_reason or ""
        failure = Failure(
            self.rank, self._phases[-1][0], None, f"stopped by {reason} before training began", kind="user"
        )
        board = self._board
        try:
            is_first = self.rank == 0 if board is None else board.claim(failure)
        except RuntimeError:  # the store is gone
            is_first = self.rank == 0
        if is_first:
            tell(self.run_dir, failure)
        number = getattr(signal, reason, signal.SIGTERM)
        leave_now(128 + number)

    def _ask_to_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def _look(self, board: Board) -> None:
        self.stop_reason = board.agree_on_stop(self.stop_reason)
        first = board.first_failure()
        if first is None and self._peer_failed_at is None:
            self._look_for_the_dead(board)
            self._look_for_stalls(board)
            return
        if first is not None and first.kind == "stalled":
            self._leave_stalled(board, first)
        if self._peer_failed_at is None:
            self._peer_failed_at = time.monotonic()
        elif time.monotonic() - self._peer_failed_at > LEAVE_SECONDS:
            assert first is not None
            dump_stacks(self.run_dir / "errors", self.rank)
            note_for_launcher(f"left because rank {first.rank} failed")
            self._before_leaving()
            leave_now(first.peer_exit_code)

    def _look_for_the_dead(self, board: Board) -> None:
        for rank in self._siblings.dead():
            phase, step = board.position(rank)
            message = (
                "its process is gone without a word: killed from outside, out of memory, or a crash "
                "in native code"
            )
            failure = Failure(rank, phase, step, message, kind="died")
            if board.claim(failure):
                keep(self.run_dir, failure)
                tell(self.run_dir, failure)

    def _look_for_stalls(self, board: Board) -> None:
        name, since = self._phases[-1]
        waited = time.monotonic() - since
        if waited <= self.budgets.seconds(name):
            return
        message = f"no progress for {waited:.0f} s, budget {self.budgets.explain(name)}"
        failure = Failure(self.rank, name, self.step, message, kind="stalled")
        if board.claim(failure):
            self._leave_stalled(board, failure)

    def _leave_stalled(self, board: Board, failure: Failure) -> None:
        """Write this rank's stacks and leave; the rank that posted the stall waits for the others' stacks and
        reports it.
        """
        dump_stacks(self.run_dir / "stacks", self.rank)
        board.confirm_stacks()
        others = set(range(self.world_size)) - {self.rank}
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(board.has_stacks(rank) for rank in others):
            time.sleep(POLL_SECONDS / 5)
        if failure.rank == self.rank:
            silent = sorted(rank for rank in others if not board.has_stacks(rank))
            self._tell_stall(failure, silent)
        else:  # the launcher ends everyone at the first exit, and that is for the rank that tells
            time.sleep(STACK_SECONDS)
        self._before_leaving()
        leave_now(exit_codes.STALLED if failure.rank == self.rank else exit_codes.PEER_FAILED)

    def _tell_stall(self, failure: Failure, silent: list[int]) -> None:
        tell_stall(self.run_dir, failure, silent)
        for rank in silent:
            self._siblings.kill(rank)
