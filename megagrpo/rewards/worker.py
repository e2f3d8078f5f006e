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
from megagrpo.rewards.isolation import end_with_parent, limit_memory
from megagrpo.rewards.network import NetworkWatch

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
    watch = NetworkWatch()
    try:
        if not network:
            watch.leave()
    except OSError as error:
        problem = (
            f"rewards.network: false: the network can't be taken from reward code on this machine ({error}); "
            "rewards.network: true leaves it"
        )
    # here, because numpy starts threads, which would keep the network
    from megagrpo.rewards.messages import Ready, Refused, decode_request, decode_setup, encode_reply

    try:
        setup = decode_setup(read_frame(pool))
        sys.path.extend(folder for folder in setup.search_path if folder not in sys.path)
        scorers = Refused(problem) if problem else _build(setup, watch)
        write_frame(pool, encode_reply(scorers if isinstance(scorers, Refused) else Ready()))
        while isinstance(scorers, list):
            request = decode_request(read_frame(pool))
            reply = _answer(scorers[request.reward], request, memory_bytes)
            if said := watch.explain():
                name, prompt = setup.rewards[request.reward].name, request.prompts[0].id
                reply = Refused(f"reward {name!r}, prompt {prompt}: {said}")
            write_frame(pool, encode_reply(reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is closed


def _take_socket() -> int:
    """Return a private duplicate of standard input, and point standard input at /dev/null."""
    pool = os.dup(0)  # not inherited by programs that reward code starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    return pool


def _build(setup: "Setup", watch: NetworkWatch) -> "list[Scorer] | Refused":
    from megagrpo.rewards.build import build_scorer
    from megagrpo.rewards.messages import Refused

    try:
        scorers = []
        for spec in setup.rewards:
            try:
                scorers.append(build_scorer(spec))
            finally:  # what reached for the network may have failed by that
                if said := watch.explain():
                    raise UserError(f"reward {spec.name!r}: {said}")
        for spec, scorer in zip(setup.rewards, scorers, strict=True):
            for place, columns in spec.columns.items():
                _check_columns(place, columns, scorer)
        return scorers
    except UserError as error:
        return Refused(str(error))
    except MemoryError:
        return Refused("rewards.memory_gib: is too little for the rewards to start")


def _check_columns(place: str, columns: "Sequence[str]", scorer: "Scorer") -> None:
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
