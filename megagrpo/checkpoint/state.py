"""The position of a run, as a checkpoint keeps it: the trainer's counters, and the states of named parts, in
`trainer_state.json`; what single ranks hold of their own in files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from megagrpo.checkpoint.carried import Carried, pack, unpack
from megagrpo.config.section import NonNegativeInt
from megagrpo.errors import UserError
from megagrpo.types import Snapshot

STATE_FILE = "trainer_state.json"


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
    """A part of which every rank has its own."""

    def __init__(self, name: str, carried: Carried, rank: int):
        self._carried, self._rank = {name: carried}, rank

    def snapshot(self) -> Snapshot:
        """Return this rank's part as it is now."""
        files = pack(self._carried, self._rank)
        return Snapshot({}, lambda: files)

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Take in the parts of all ranks."""
        unpack(folder, self._carried)


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
