"""State of single ranks that a checkpoint carries: random generators here, whatever else must survive
registers itself.
"""

import pickle
import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

FOLDER = "carried"


class Carried(Protocol):
    """State that every rank has its own part of."""

    def state(self) -> bytes:
        """Return this rank's part at the end of a step."""

    def load_state(self, parts: list[bytes]) -> None:
        """Take in the parts of all ranks of the run that saved, in rank order; this run may have another
        number of ranks.
        """


class RandomStates:
    """The process-wide generators of a rank.

    Nothing of a run draws from them: prompt order and sampling are functions of counters. They are kept for
        code of the user's that does.
    On another number of ranks, rank r goes on with part r modulo the old number.
    """

    def __init__(self, rank: int):
        self.rank = rank

    def state(self) -> bytes:
        """Return the state of Python's, NumPy's and torch's generators."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return pickle.dumps(states)

    def load_state(self, parts: list[bytes]) -> None:
        """Restore them."""
        states = pickle.loads(parts[self.rank % len(parts)])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def pack(carried: dict[str, Carried], rank: int) -> dict[str, bytes]:
    """Return this rank's files: name in the checkpoint -> contents."""
    return {f"{FOLDER}/{name}.{rank:05d}": each.state() for name, each in carried.items()}


def unpack(folder: Path, carried: dict[str, Carried]) -> None:
    """Hand the parts of a checkpoint out. What the checkpoint does not have (it was saved without) keeps
    its start.
    """
    for name, each in carried.items():
        parts = [path.read_bytes() for path in sorted((folder / FOLDER).glob(f"{name}.*"))]
        if parts:
            each.load_state(parts)
