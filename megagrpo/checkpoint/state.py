"""What a checkpoint holds beside the model and the optimizer. Sampling is counter-based, so there is no RNG state to keep."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TrainerState:
    """The position of a run; small, the same on all ranks."""

    step: int = 0  # finished outer steps
    updates: int = 0  # optimizer updates so far: what the learning-rate schedule counts
    weight_version: int = 0  # last published
    prompt_position: int = 0  # prompts drawn so far
    nonfinite_in_a_row: int = 0
    algorithm: dict[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> "TrainerState":
        """Read what `save` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        return cls(**values)
