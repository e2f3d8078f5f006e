"""A reward worker: `python -m megagrpo.rewards.worker`, started by `process.py`.

It reads a Setup, answers Ready or Refused, then answers each Request with Scores, Failed or Refused until its
standard input ends. The
two pipes are its own: reward code that reads standard input finds it empty, and what it prints goes to
    standard error.
"""

import ctypes
import os
import signal
import sys

from megagrpo.errors import UserError
from megagrpo.rewards.build import Scorer, build_scorer
from megagrpo.rewards.frames import read_frame, write_frame
from megagrpo.rewards.messages import Failed, Ready, Refused, Reply, Request, Scores, Setup

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve the pool on the other end of the pipes."""
    _die_with_parent()
    requests, replies = _take_pipes()
    try:
        setup: Setup = read_frame(requests)
        scorers = _build(setup)
        write_frame(replies, scorers if isinstance(scorers, Refused) else Ready())
        while isinstance(scorers, list):
            write_frame(replies, _answer(scorers, read_frame(requests)))
    except (EOFError, BrokenPipeError):
        return  # the pool is closed


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends: a scorer in an endless loop would never see its
    standard input end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the parent ended before the request was made
        os._exit(1)


def _take_pipes() -> tuple[int, int]:
    """Return private duplicates of standard input and output, and point the originals at /dev/null and
    standard error.
    """
    requests, replies = os.dup(0), os.dup(1)  # not inherited by processes that reward code starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _build(setup: Setup) -> list[Scorer] | Refused:
    sys.path.extend(folder for folder in setup.search_path if folder not in sys.path)
    try:
        return [build_scorer(spec) for spec in setup.rewards]
    except UserError as error:
        return Refused(str(error))


def _answer(scorers: list[Scorer], request: Request) -> Reply:
    try:
        return Scores(scorers[request.reward](request.prompts, request.completions))
    except UserError as error:
        return Refused(str(error))
    except TimeoutError as error:
        return Failed("timeout", str(error))
    except Exception as error:
        # a registered reward's failure on one completion: counted under its name, and the run goes on
        return Failed("error", " ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    main()
