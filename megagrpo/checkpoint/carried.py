"""State of single ranks that a checkpoint carries: random generators here, whatever else must survive
registers itself.
"""

import json
import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from megagrpo.errors import UserError

FOLDER = "carried"


class Carried(Protocol):
    """State that every rank has its own part of, in a format whose reading runs nothing: JSON, no pickle."""

    def state(self) -> bytes:
        """Return this rank's part at the end of a step."""

    def load_state(self, parts: list[bytes]) -> None:
        """Take in the parts of all ranks of the run that saved, in rank order; this run may have another
        number of ranks.
        """


class RandomStates:
    """The process-wide generators of a rank.

    Nothing of a run draws from them: prompt order and sampling are functions of counters. They are kept for
    code of the user's that does. On another number of ranks, rank r goes on with part r modulo the old
    number.
    """

    def __init__(self, rank: int):
        self.rank = rank

    def state(self) -> bytes:
        """Return the state of Python's, NumPy's and torch's generators, as JSON."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), position, has_gauss, cached],
            "torch": _to_hex(torch.get_rng_state()),
        }
        if torch.cuda.is_available():
            states["cuda"] = _to_hex(torch.cuda.get_rng_state())
        return json.dumps(states).encode()

    def load_state(self, parts: list[bytes]) -> None:
        """Restore them."""
        states = json.loads(parts[self.rank % len(parts)])
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_from_hex(states["torch"]))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(_from_hex(states["cuda"]))


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def pack(carried: dict[str, Carried], rank: int) -> dict[str, bytes]:
    """Return this rank's files: name in the checkpoint -> contents."""
    return {f"{FOLDER}/{name}.{rank:05d}": each.state() for name, each in carried.items()}


def unpack(folder: Path, carried: dict[str, Carried]) -> None:
    """Hand the parts of a checkpoint out. What the checkpoint does not have (it was saved without) keeps
    its start.

    Raises:
        UserError: a part is not what its owner writes.
    """
    for name, each in carried.items():
        parts = [path.read_bytes() for path in sorted((folder / FOLDER).glob(f"{name}.*"))]
        if not parts:
            continue
        try:
            each.load_state(parts)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:  # RecursionError too
            cause = f"{type(error).__name__}: {error}"
            raise UserError(f"{folder / FOLDER}/{name}.*: not what a save writes: {cause}") from error
