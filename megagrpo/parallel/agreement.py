"""A step that fails on one rank fails on all: no rank waits in a collective for one that has left."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megagrpo.errors import UserError
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.parallel.plain_data import exchangeable

Result = TypeVar("Result")


@exchangeable
@dataclass(frozen=True, order=True)
class FailedStep:
    """What one rank met. The first of several is the cause: a rank that only waited in vain for another one
    (a time-out of a collective) comes after all others.
    """

    is_late: bool
    rank: int
    text: str
    is_user_error: bool


def describe_error(error: BaseException) -> str:
    """Return a user's mistake as it is, and any other error on one line with its type."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def agree(
    step: Callable[[], Any],
    failure: Callable[[FailedStep], Exception],
    describe: Callable[[BaseException], str] = describe_error,
) -> list[Any]:
    """Run a step on every rank and return all results, by rank. Collective over all ranks.

    Args:
        step: its result is small; it is gathered on all ranks.
        failure: makes the error that all ranks raise from what failed first.
        describe: turns a rank's error into text.

    Raises:
        Exception: of `failure`, on all ranks alike, where the step failed on any.
    """
    result, failed, cause = None, None, None
    try:
        result = step()
    except Exception as error:  # whatever it is: told to all ranks, and raised again below
        cause = error
        failed = FailedStep(
            _is_timeout(error), dist.get_rank(), describe(error), isinstance(error, UserError)
        )
    gathered = all_gather_metadata((result, failed))
    if found := [each for _, each in gathered if each is not None]:
        raise failure(min(found)) from cause
    return [value for value, _ in gathered]


def on_first_rank(action: Callable[[], Result], error: type[Exception]) -> Result:
    """Run `action` on rank 0 and return its result on all ranks. Collective over all ranks.

    Args:
        error: what all ranks raise where rank 0 met something that is no UserError.

    Raises:
        UserError: on all ranks, where rank 0 met one.
    """
    results = agree(
        lambda: action() if dist.get_rank() == 0 else None,
        lambda failed: (UserError if failed.is_user_error else error)(failed.text),
    )
    return results[0]


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "connection closed by peer" in text
