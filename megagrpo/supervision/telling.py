"""Where a failure is told: once on the screen, by each rank in the run folder, and in a line to the
launcher.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megagrpo.supervision.failure import Failure, append_failure


def keep(run_dir: Path, failure: Failure) -> None:
    """Add a failure to its rank's file in `errors/`."""
    try:
        append_failure(run_dir / "errors", failure)
    except OSError as error:  # the storage may be the cause: what is told must not be lost with it
        print(
            f"rank {failure.rank}: {run_dir / 'errors'}: {error}; {failure.describe()}",
            file=sys.stderr,
            flush=True,
        )


def tell(run_dir: Path, failure: Failure) -> None:
    """Print the first failure of all ranks."""
    text = failure.describe()
    if failure.kind != "user" and (run_dir / "errors").is_dir():
        text += f"\nevery rank's end: {run_dir / 'errors'}"
    print(text, file=sys.stderr, flush=True)
    note_for_launcher(text if failure.kind == "user" else text.splitlines()[0])


def tell_stall(run_dir: Path, failure: Failure, silent: Sequence[int]) -> None:
    """Print and keep a stall, with the ranks that wrote no stacks."""
    keep(run_dir, failure)
    lines = [failure.describe(), f"Python stacks of the ranks: {run_dir / 'stacks'}"]
    if silent:
        lines.append(f"without an answer (frozen, or its host is lost): rank {', '.join(map(str, silent))}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    note_for_launcher(lines[0])


def note_for_launcher(text: str) -> None:
    """Leave the cause for torchrun's own report, which comes last on the screen and otherwise advises to turn
    tracebacks on.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        note = json.dumps({"message": {"message": text, "extraInfo": extra}})
        # in a temporary folder, which may be full: that must not end the thread which ends a stalled rank
        with contextlib.suppress(OSError):
            Path(path).write_text(note, encoding="utf-8")
