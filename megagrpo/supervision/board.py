"""A notice board of the ranks beside the collectives: it works while the main threads hang in one.

It lives in the store of the launcher, which outlives every rank. Each start of the ranks has keys of its own,
so that restarted ranks read nothing that the ranks before them posted.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from megagrpo.supervision.board_keys import PREFIX, left_key
from megagrpo.supervision.failure import Failure

STORE_TIMEOUT = timedelta(seconds=300)


class Board:
    """First failure, positions, process ids. All calls are quick, and safe in the watching thread: the board
    has a connection of its own.
    """

    def __init__(self, store: dist.Store, rank: int):
        self._store, self.rank = store, rank

    def claim(self, failure: Failure) -> bool:
        """Post this failure as the first one; return whether it is."""
        text = failure.to_json()
        return self._store.compare_set("first_failure", "", text) == text.encode()

    def first_failure(self) -> Failure | None:
        """Return the failure that was posted first, if there is one."""
        return (
            Failure.from_json(self._store.get("first_failure").decode())
            if self._store.check(["first_failure"])
            else None
        )

    def announce(self, phase: str, step: int | None) -> None:
        """Say where this rank is."""
        self._store.set(f"position/{self.rank}", f"{'' if step is None else step}|{phase}")

    def position(self, rank: int) -> tuple[str, int | None]:
        """Return phase and step that a rank announced last."""
        if not self._store.check([f"position/{rank}"]):
            return "start", None
        step, phase = self._store.get(f"position/{rank}").decode().split("|", 1)
        return phase, int(step) if step else None

    def sign_in(self) -> None:
        """Say which process this rank is."""
        self._store.set(f"process/{self.rank}", f"{socket.gethostname()}|{os.getpid()}")

    def process(self, rank: int) -> tuple[str, int] | None:
        """Return host and process id of a rank; None before it has signed in."""
        if not self._store.check([f"process/{rank}"]):
            return None
        host, pid = self._store.get(f"process/{rank}").decode().rsplit("|", 1)
        return host, int(pid)

    def sign_out(self) -> None:
        """Note that this rank leaves without a failure."""
        self._store.set(left_key(self.rank), "1")

    def has_left(self, rank: int) -> bool:
        """Return whether a rank left without a failure."""
        return self._store.check([left_key(rank)])

    def agree_on_stop(self, reason: str | None) -> str | None:
        """Post why this rank was asked to stop, if it was. Return the reason that was posted first by any
        rank; None: there is none.
        """
        if reason is not None:
            self._store.compare_set("stop", "", reason)
        return self._store.get("stop").decode() if self._store.check(["stop"]) else None

    def confirm_stacks(self) -> None:
        """Say that this rank's stacks are in the run folder."""
        self._store.set(f"stacks/{self.rank}", "1")

    def has_stacks(self, rank: int) -> bool:
        """Say whether a rank's stacks are in the run folder."""
        return self._store.check([f"stacks/{rank}"])


def open_board() -> Board:
    """Connect to the launcher's store, or make a board of its own for a process that runs alone.

    Raises:
        RuntimeError: (torch's DistNetworkError, DistStoreError) the store is not there.
    """
    if "RANK" not in os.environ:
        return Board(dist.HashStore(), 0)
    store, rank, _ = next(dist.rendezvous("env://", timeout=STORE_TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Board(dist.PrefixStore(f"{PREFIX}_{attempt}", store), rank)
