"""The position of a run, as a checkpoint keeps it in `trainer_state.json`.

A new field needs a default, so that older checkpoints load; what single ranks hold of their own registers as
`carried.Carried`.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

STATE_FILE = "trainer_state.json"


@dataclass
class TrainerState:
    """Small, the same on all ranks. Sampling and prompt order are functions of these numbers."""

    step: int = 0  # finished outer steps
    updates: int = 0  # optimizer updates so far: what the learning-rate schedule counts
    weight_version: int = 0  # last published
    prompt_position: int = 0  # prompts drawn so far, those of rollouts in flight that are saved included
    rollout: dict[str, Any] = field(default_factory=dict)  # see rollout/pipeline.py
    nonfinite_in_a_row: int = 0
    algorithm: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0  # of all runs so far
    spikes: dict[str, list[float]] = field(default_factory=dict)  # what the running medians are over
    roll_backs: int = 0  # made so far
    # metrics of this step, where its evaluation and its row are still to come
    unrecorded: dict[str, float] | None = None

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def load(cls, folder: Path) -> "TrainerState":
        """Read it from a checkpoint. A field that this version does not know is dropped: the format
        version guards the meaning.
        """
        values: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
