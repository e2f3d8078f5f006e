"""What happens on one rank is known to all: a failed save must leave nobody waiting in a collective."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megagrpo.errors import UserError

T = TypeVar("T")


class SaveError(Exception):
    """A checkpoint could not be written: a full or read-only disk, a failed rank. The run can go on; older
    checkpoints are untouched.
    """


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on all ranks. Collective over all ranks.

    Raises:
        SaveError: on all ranks, where rank 0 met an OSError.
        UserError: on all ranks, where rank 0 met one.
    """
    outcome: list = [None, "", None]
    if dist.get_rank() == 0:
        try:
            outcome = [action(), "", None]
        except UserError as error:
            outcome = [None, str(error), UserError]
        except OSError as error:
            outcome = [None, f"{type(error).__name__}: {error}", SaveError]
        except Exception as error:  # torch wraps what the disk says in RuntimeError and types of its own
            outcome = [None, f"{type(error).__name__}: {' '.join(str(error).split())}", SaveError]
    dist.broadcast_object_list(outcome, src=0)
    result, message, kind = outcome
    if kind is not None:
        raise kind(message)
    return result
