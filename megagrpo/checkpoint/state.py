"""The position of a run, as a checkpoint keeps it: the trainer's counters, and the states of named parts, in
`trainer_state.json`; what single ranks hold of their own in files.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from megagrpo.config.section import NonNegativeInt
from megagrpo.errors import UserError
from megagrpo.types import Snapshot

FOLDER, STATE_FILE = "carried", "trainer_state.json"


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


class Stateful(Protocol):
    """A part of a run whose position a checkpoint keeps."""

    def snapshot(self) -> Snapshot:
        """Return what it has to keep of the step that ends. Collective over all ranks."""

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go on from the state that `snapshot` returned; the files of all ranks lie in `folder`, and this run
        may have another number of ranks.
        """


class StateOfNumbers:
    """A part whose state is small and the same on all ranks."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], load: Callable[[Any], None]):
        self._read, self._load = read, load

    def snapshot(self) -> Snapshot:
        """Return what `read` gives."""
        return Snapshot(self._read())

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Hand it to `load`."""
        self._load(state)


class StateOfRanks:
    """A part of which every rank has its own, in a file of each rank."""

    def __init__(self, name: str, carried: Carried, rank: int):
        self._name, self._carried, self._rank = name, carried, rank

    def snapshot(self) -> Snapshot:
        """Return this rank's part as it is now."""
        files = {f"{FOLDER}/{self._name}.{self._rank:05d}": self._carried.state()}
        return Snapshot({}, lambda: files)

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Take in the parts of all ranks. What was saved without them keeps its start.

        Raises:
            UserError: a part is not what its owner writes.
        """
        parts = [path.read_bytes() for path in sorted((folder / FOLDER).glob(f"{self._name}.*"))]
        if not parts:
            return
        try:
            self._carried.load_state(parts)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:  # RecursionError too
            place, cause = f"{folder / FOLDER}/{self._name}.*", f"{type(error).__name__}: {error}"
            raise UserError(f"{place}: not what a save writes: {cause}") from error


@dataclass
class TrainerState:
    """Small, the same on all ranks; the trainer alone writes the one of a run. Sampling and prompt order are
    functions of these numbers.
    """

    step: NonNegativeInt = 0  # finished outer steps
    updates: NonNegativeInt = 0  # optimizer updates so far: what the learning-rate schedule counts
    weight_version: NonNegativeInt = 0  # last published
    nonfinite_in_a_row: NonNegativeInt = 0
    wall_seconds: float = 0.0  # all runs so far
    roll_backs: NonNegativeInt = 0  # made so far
    # metrics of this step as they were recorded: a row that a crash has torn is written again from here
    row: dict[str, float] = field(default_factory=dict)
    # metrics of this step, where its evaluation and its row are still to come
    unrecorded: dict[str, float] | None = None
    # states of the named parts at the end of this step; set in a checkpoint alone
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def load(cls, folder: Path) -> "TrainerState":
        """Read it from a checkpoint. A field that this version does not know is dropped: the format
        version guards the meaning.

        Raises:
            UserError: it is not what `to_json` writes, one line for each field.
        """
        path = folder / STATE_FILE
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes(), strict=True)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            places = [".".join(map(str, problem["loc"])) for problem in problems]
            lines = [
                f"{path}: {place}: {problem['msg']}" for place, problem in zip(places, problems, strict=True)
            ]
            raise UserError("\n".join(lines)) from error
