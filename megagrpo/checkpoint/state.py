"""The position of a run, as a checkpoint keeps it in `trainer_state.json`.

A new field needs a default, so that older checkpoints load; what single ranks hold of their own registers as
`carried.Carried`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megagrpo.config.section import NonNegativeInt
from megagrpo.errors import UserError

STATE_FILE = "trainer_state.json"


@dataclass
class TrainerState:
    """Small, the same on all ranks. Sampling and prompt order are functions of these numbers."""

    step: NonNegativeInt = 0  # finished outer steps
    updates: NonNegativeInt = 0  # optimizer updates so far: what the learning-rate schedule counts
    weight_version: NonNegativeInt = 0  # last published
    prompt_position: NonNegativeInt = (
        0  # prompts drawn so far, those of rollouts in flight that are saved included
    )
    rollout: dict[str, Any] = field(default_factory=dict)  # see rollout/pipeline.py
    nonfinite_in_a_row: NonNegativeInt = 0
    algorithm: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0  # of all runs so far
    spikes: dict[str, list[float]] = field(default_factory=dict)  # what the running medians are over
    roll_backs: NonNegativeInt = 0  # made so far
    # metrics of this step as they were recorded: a row that a crash has torn is written again from here
    row: dict[str, float] = field(default_factory=dict)
    # metrics of this step, where its evaluation and its row are still to come
    unrecorded: dict[str, float] | None = None

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
