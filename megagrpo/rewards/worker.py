"""A reward worker, seen from inside; `keeper.py` starts it.

It reads a Setup, answers Ready or Refused, then answers each Request with Scores, Failed or Refused until the
pool closes the socket. The socket is its own: reward code that reads standard input finds it empty, and what
it prints goes to standard error.
"""

import os
import signal
import sys
from typing import TYPE_CHECKING

from megagrpo.errors import UserError
from megagrpo.rewards.frames import read_frame, write_frame
from megagrpo.rewards.isolation import end_with_parent, leave_network, limit_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megagrpo.rewards.build import Scorer
    from megagrpo.rewards.messages import Refused, Reply, Request, Setup


def serve(keeper: int, memory_bytes: int, network: bool) -> None:
    """Serve the pool on the other end of standard input, a socket.

    Args:
        keeper: process id of the parent; this process ends with it.
        memory_bytes: limit of the address space.
        network: whether the network stays reachable.
    """
    end_with_parent(keeper, signal.SIGKILL)
    pool = _take_socket()
    problem = ""
    limit_memory(memory_bytes)
    try:
        if not network:
            leave_network()
    except OSError as error:
        problem = f"rewards.network: false: is not possible on this machine: {error}"
    # here, because numpy starts threads, and a process with threads can't leave the network
    from megagrpo.rewards.messages import Ready, Refused, decode_request, decode_setup, encode_reply

    try:
        setup = decode_setup(read_frame(pool))
        sys.path.extend(folder for folder in setup.search_path if folder not in sys.path)
        scorers = Refused(problem) if problem else _build(setup)
        write_frame(pool, encode_reply(scorers if isinstance(scorers, Refused) else Ready()))
        while isinstance(scorers, list):
            request = decode_request(read_frame(pool))
            write_frame(pool, encode_reply(_answer(scorers[request.reward], request, memory_bytes)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is closed


def _take_socket() -> int:
    """Return a private duplicate of standard input, and point standard input at /dev/null."""
    pool = os.dup(0)  # not inherited by programs that reward code starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    return pool


def _build(setup: "Setup") -> "list[Scorer] | Refused":
    from megagrpo.rewards.build import build_scorer
    from megagrpo.rewards.messages import Refused

    try:
        scorers = [build_scorer(spec) for spec in setup.rewards]
        for place, columns in setup.columns.items():
            _check_columns(place, columns, scorers)
        return scorers
    except UserError as error:
        return Refused(str(error))
    except MemoryError:
        return Refused("rewards.memory_gib: is too little for the rewards to start")


def _check_columns(place: str, columns: "Sequence[str]", scorers: "list[Scorer]") -> None:
    for scorer in scorers:
        try:
            scorer.check_columns(columns)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None


def _answer(scorer: "Scorer", request: "Request", memory_bytes: int) -> "Reply":
    from megagrpo.rewards.messages import Failed, Refused, Scores

    try:
        return Scores(scorer(request.prompts, request.completions))
    except UserError as error:
        return Refused(str(error))
    except TimeoutError as error:
        return Failed("timeout", str(error))
    except ConnectionError as error:
        return Failed("unreachable", f"{type(error).__name__}: {error}")
    except MemoryError:
        return Failed("memory", f"needs more than {memory_bytes / 2**30:g} GiB (rewards.memory_gib)")
    except Exception as error:
        # a registered reward's failure on one completion: counted under its name, and the run goes on
        return Failed("error", " ".join(f"{type(error).__name__}: {error}".split()))
