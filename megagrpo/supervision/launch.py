"""Starts the ranks of this machine, passes signals on to them, and says in plain lines how they ended. No
torch at import.

The ranks meet in a store that this process holds on the loopback: it outlives them, and nobody else's machine
reaches it. Nothing of ours is ever written there as a pickle, which torchrun's rendezvous would execute.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megagrpo.errors import UserError
from megagrpo.supervision import exit_codes
from megagrpo.supervision.board_keys import PREFIX, left_key
from megagrpo.supervision.failure import say
from megagrpo.supervision.nodes import Nodes
from megagrpo.supervision.signals import LAUNCHER_PID, stop_signals

LOOPBACK = "127.0.0.1"
_STORE_SECONDS = 300.0  # that a request to the store may take
_POLL_SECONDS = 0.05
# between SIGTERM and SIGKILL for what is left after a failure: a rank that can still save may do so
_END_SECONDS = 30.0
_LEAVE_SECONDS = 60.0  # that the ranks of other machines may need to leave after this one's
_FINAL = (exit_codes.USER_ERROR, exit_codes.INTERRUPTED)  # no restart after these


@dataclass(frozen=True)
class Ended:
    """One rank's end."""

    rank: int
    pid: int
    code: int  # negative: the signal that ended it


class Launch:
    """The ranks of this machine. A signal is never lost: while no rank exists it ends the launch, afterwards
    the ranks get it.

    A context manager, for the main thread: enter it before anything slow is imported.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None  # the first signal that came
        self._ranks: list[subprocess.Popen[bytes]] | None = None  # None: not asked for yet
        self._is_complete = False  # all of them are there
        self._pending: list[int] = []  # came while they were started

    def __enter__(self) -> "Launch":
        self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(
        self,
        arguments: Sequence[str],
        num_ranks: int,
        max_restarts: int = 0,
        module: str = "megagrpo.train",
        engines_are_local: bool = True,
        nodes: Nodes | None = None,
    ) -> int:
        """Run `python -m module` with `arguments` on `num_ranks` processes; return the exit code.

        Args:
            max_restarts: how often all ranks are started again after a failure that is no mistake of the
                user's, and that no signal asked for.
            engines_are_local: nothing that the ranks talk to is on another machine.
            nodes: the machines of the run, each of which starts `num_ranks`; None: this one alone.

        Raises:
            UserError: the store of several machines can't listen where it should.
        """
        from megagrpo.wire.transfer_group import hold_store

        if nodes is None:
            store, port = hold_store(LOOPBACK, _STORE_SECONDS)
            environment = {**os.environ, **rendezvous_environment(port, num_ranks, engines_are_local)}
        else:
            store = hold_store_of_nodes(nodes) if nodes.holds_store else None
            environment = {**os.environ, **meeting_of_nodes(nodes, num_ranks)}
        first = 0 if nodes is None else nodes.rank * num_ranks
        for attempt in range(max_restarts + 1):
            environment["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            self._start([sys.executable, "-m", module, *arguments], num_ranks, environment, first)
            ended = self._wait(first)
            code = explain(ended, self.asked)
            is_final = code == exit_codes.DONE or self.asked or any(each.code in _FINAL for each in ended)
            if is_final or attempt == max_restarts:
                break
            say(f"all ranks are started again from the newest checkpoint ({attempt + 1} of {max_restarts})")
        if nodes is not None and store is not None and code == exit_codes.DONE:
            wait_until_left(store, nodes.count * num_ranks)
        del store  # it lived until here
        return code

    def _start(
        self, command: list[str], num_ranks: int, environment: Mapping[str, str], first: int = 0
    ) -> None:
        self._ranks, self._is_complete = [], False
        # a rank's own Python would answer it with a traceback, until `end_with_launcher` takes it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        for rank in range(num_ranks):
            own = {**environment, "RANK": str(first + rank), "LOCAL_RANK": str(rank)}
            # a session of its own: the terminal's Ctrl-C comes from here alone, once
            self._ranks.append(
                subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True)
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_complete = True
        pending, self._pending = self._pending, []
        for number in pending:
            self._pass_on(number)

    def _wait(self, first: int = 0) -> list[Ended]:
        """Wait for all ranks; after the first one that fails the others are asked to end, then killed."""
        ranks = self._ranks or []
        failed_at: float | None = None
        while any(each.poll() is None for each in ranks):
            if failed_at is None and any(each.returncode for each in ranks):
                failed_at = time.monotonic()
                self._pass_on(signal.SIGTERM)
            elif failed_at is not None and time.monotonic() - failed_at > _END_SECONDS:
                self._pass_on(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        return [Ended(first + rank, each.pid, each.returncode) for rank, each in enumerate(ranks)]

    def _on_signal(self, number: int, _frame: object) -> None:
        self.asked = self.asked or signal.Signals(number)
        if self._ranks is None:
            leave_without_ranks(self.asked)
        elif not self._is_complete:
            self._pending.append(number)
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for each in self._ranks or []:
            if each.returncode is None:
                each.send_signal(number)


def leave_without_ranks(number: signal.Signals) -> NoReturn:
    """End a launch that was asked to stop before it had ranks."""
    say(f"stopped by {number.name} before the ranks were started")
    os._exit(128 + number)


def rendezvous_environment(port: int, num_ranks: int, engines_are_local: bool) -> dict[str, str]:
    """Return what the ranks of one machine need to meet, on the loopback alone.

    gloo and NCCL otherwise listen on the address that the host's name has, or on the first interface. NCCL is
    left alone where engines are elsewhere: its groups with them use the same setting.
    """
    ranks = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        LAUNCHER_PID: str(os.getpid()),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the launcher holds the store
    }
    interface = "lo" if sys.platform == "linux" else "lo0"
    names = ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if engines_are_local else ()))
    return ranks | {name: os.environ.get(name, interface) for name in names}


def hold_store_of_nodes(nodes: Nodes) -> Any:
    """Return the store that the ranks of all machines meet in.

    Raises:
        UserError: it can't listen there.
    """
    from megagrpo.wire.transfer_group import hold_store

    try:
        store, _ = hold_store(nodes.host, _STORE_SECONDS, nodes.port)
    except OSError as error:
        raise UserError(
            f"--rendezvous {nodes.host}:{nodes.port}: node 0 can't listen there: {error.strerror or error}; "
            "take an address of this machine and a free port, alike on all machines"
        ) from error
    return store


def meeting_of_nodes(nodes: Nodes, num_ranks: int) -> dict[str, str]:
    """Return what the ranks of one of several machines need to meet the others."""
    return nodes.environment(num_ranks) | {
        LAUNCHER_PID: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def wait_until_left(store: Any, num_ranks: int) -> None:
    """Hold the store until the ranks of the other machines have left too: they look into it to the end."""
    keys = [f"{PREFIX}_0/{left_key(rank)}" for rank in range(num_ranks)]
    deadline = time.monotonic() + _LEAVE_SECONDS
    while time.monotonic() < deadline and not store.check(keys):
        time.sleep(_POLL_SECONDS)


def explain(ended: Sequence[Ended], asked: signal.Signals | None = None) -> int:
    """Name the ranks that a signal ended, which they can't do themselves, and return the exit code of the
    rank that failed first.

    What the launcher ends after the first failure, by SIGTERM and then by SIGKILL, is no cause.

    Args:
        asked: the signal that the launcher was sent, if any; a rank that it ended was not training.
    """
    failures = [each for each in ended if each.code]
    if not failures:
        return exit_codes.DONE
    causes = [each for each in failures if each.code != exit_codes.PEER_FAILED]
    codes = [each.code for each in causes] or [exit_codes.PEER_FAILED]
    if asked is not None and all(code in (-asked, -signal.SIGTERM, 128 + asked) for code in codes):
        if 128 + asked not in codes:
            say(f"stopped by {asked.name} while the ranks were not training: nothing was to be saved")
        return 128 + asked
    has_own = any(code > 0 for code in codes)
    for each in causes:
        # after a rank that could say why itself, SIGTERM is the launcher's
        if each.code < 0 and not (has_own and each.code == -signal.SIGTERM):
            hint = " (out of memory?)" if each.code == -signal.SIGKILL else ""
            name = signal.Signals(-each.code).name
            say(f"rank {each.rank} (pid {each.pid}) was ended by {name}{hint}")
    code = max(codes)  # a rank that had the time to say why before those that a signal ended
    return code if code > 0 else 128 - code
