"""A failed save is known to all ranks: it must leave nobody waiting in a collective."""

from collections.abc import Callable
from typing import TypeVar

from megagrpo.parallel import agreement

T = TypeVar("T")


class SaveError(Exception):
    """A checkpoint could not be written: a full or read-only disk, a failed rank. The run can go on; older
    checkpoints are untouched.
    """


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on all ranks. Collective over all ranks.

    Raises:
        SaveError: on all ranks, where rank 0 met anything but a UserError.
        UserError: on all ranks, where rank 0 met one.
    """
    return agreement.on_first_rank(action, SaveError)
