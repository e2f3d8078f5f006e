"""Ends a server when the process that started it has gone. Runs inside the server: standard library only.

The parent holds the other end of the server's standard input and never writes to it. The end of file there
means that the parent has ended, by whatever signal. What the server's processes have made in shared memory is
removed with them.
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from megagrpo.wire.shared_files import LEDGER, SHARED_MEMORY, files_of_group, list_files, read_ledger

_GRACE_SECONDS = 5.0
# A process outside of the group does it: a server that ends at the first signal could not send its children
# the second.
_END_GROUP = """
import os, signal, sys, time
group, grace = int(sys.argv[1]), float(sys.argv[2])
try:
    os.killpg(group, signal.SIGTERM)
    time.sleep(grace)
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:  # all have ended
    pass
for path in sys.argv[3:]:
    try:
        os.unlink(path)
    except OSError:  # gone
        pass
"""


def watch_parent() -> None:
    """Watch from a thread of its own; on the parent's end the whole process group is asked to end, then
    killed.

    Raises:
        RuntimeError: the server does not lead a process group of its own: the parent's would be hit.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("the server must lead its own process group")
    threading.Thread(target=_end_with_parent, args=[list_files()], name="parent_watch", daemon=True).start()


def _end_with_parent(files_before: set[str]) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    names = files_of_group(os.getpgrp()) - files_before
    if ledger := os.environ.get(LEDGER):
        with contextlib.suppress(OSError):
            names.update([*read_ledger(Path(ledger).read_text(encoding="utf-8")), Path(ledger).name])
    paths = [str(SHARED_MEMORY / name) for name in sorted(names)]
    subprocess.Popen(
        [sys.executable, "-c", _END_GROUP, str(os.getpgrp()), str(_GRACE_SECONDS), *paths],
        start_new_session=True,
    )
