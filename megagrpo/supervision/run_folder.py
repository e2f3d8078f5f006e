"""The run folder, before anything is started: it is there, it can be written to, and nothing is in the way.
No torch.
"""

import os
import tempfile
from pathlib import Path

from megagrpo.errors import UserError

FILES = (
    "config.yaml",
    "log.txt",
    "metrics.jsonl",
    "roll_backs.jsonl",
    "run.lock",
    "summary.json",
    "warnings.jsonl",
)
ACCEPTED = "accepted.jsonl"  # what `megagrpo sample` keeps
FOLDERS = (
    *("checkpoints", "completions", "engines", "errors", "evaluations", "hf", "model", "stacks"),
    "tensorboard",
)


def make_run_folder(run_dir: Path) -> None:
    """Make the folder where it is missing, and write to it.

    Raises:
        UserError: it can't be made or written to (a file of that name, rights, a full disk), or a folder is
            where a run puts a file, or the other way round. One line each.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir, prefix=".probe.") as probe:
            probe.write(b"\n")
            probe.flush()
            os.fsync(probe.fileno())
    except FileExistsError:
        raise UserError(f"run.dir: {run_dir}: is a file; a folder is wanted") from None
    except OSError as error:
        raise UserError(f"run.dir: {run_dir}: can't be written to: {error.strerror}") from None
    problems = [
        f"{name}: is a folder; a run keeps a file there" for name in FILES if (run_dir / name).is_dir()
    ]
    problems += [
        f"{name}: is a file; a run keeps a folder there" for name in FOLDERS if (run_dir / name).is_file()
    ]
    if problems:
        raise UserError("\n".join(f"run.dir: {run_dir / problem}" for problem in problems))
