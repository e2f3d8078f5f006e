"""Worker: runs whose newest checkpoint is first loaded and saved again, in the layout of the run.
Argument: as of runs_worker.py.
"""

import json
import shutil
import sys
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch.distributed as dist  # noqa: E402

from megagrpo.config.load import load_config  # noqa: E402
from megagrpo.parallel.groups import destroy_groups  # noqa: E402
from megagrpo.run import build_checkpoints, build_update, run_training  # noqa: E402
from megagrpo.session import build_session  # noqa: E402
from megagrpo.telemetry.recorder import NullRecorder  # noqa: E402


class Notes(NullRecorder):
    """Keeps the notes."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def save_again(config) -> None:
    """Replace the newest checkpoint by what this layout makes of it."""
    session = build_session(config, DEVICE)
    try:
        notes = Notes()
        gate = build_update(config, session.updater, lambda: None, notes).gate
        checkpoints = build_checkpoints(
            config,
            actor=session.actor,
            reference=session.reference,
            pipeline=session.pipeline,
            algorithm=session.algorithm,
            gate=gate,
            held_out=session.evaluation_prompts,
            tokenizer=session.tokenizer,
            exporter=session.publisher.exporter,
            recorder=notes,
        )
        state = checkpoints.resume()
        path = Path(config.run.dir) / "checkpoints" / f"step_{state.step:06d}"
        dist.barrier()
        if session.groups.rank == 0:
            shutil.move(path, Path(config.run.dir) / "first")
        dist.barrier()
        checkpoints._saved_step = None
        assert checkpoints.save_now(state) and path.is_dir(), notes.lines
    finally:
        session.close()
    destroy_groups()


def main() -> None:
    for path, overrides in json.loads(sys.argv[1]):
        config = load_config(path, overrides)
        save_again(config)
        run_training(config, DEVICE)


if __name__ == "__main__":
    main()
