"""Ends a server when the process that started it has gone. Runs inside the server: standard library only.

The parent holds the other end of the server's standard input and never writes to it. The end of file there
means that the parent has ended, by whatever signal.
"""

import os
import subprocess
import sys
import threading

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
"""


def watch_parent() -> None:
    """Watch from a thread of its own; on the parent's end the whole process group is asked to end, then
    killed.

    Raises:
        RuntimeError: the server does not lead a process group of its own: the parent's would be hit.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("the server must lead its own process group")
    threading.Thread(target=_end_with_parent, name="parent_watch", daemon=True).start()


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    subprocess.Popen(
        [sys.executable, "-c", _END_GROUP, str(os.getpgrp()), str(_GRACE_SECONDS)], start_new_session=True
    )
