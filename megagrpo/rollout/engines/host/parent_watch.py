"""Ends a server when the process that started it has gone. Runs inside the server: standard library only.

The parent holds the other end of the server's standard input and never writes to it. The end of file there means that the parent has
ended, by whatever signal.
"""

import os
import signal
import sys
import threading
import time

_GRACE_SECONDS = 5.0


def watch_parent() -> None:
    """Watch from a thread of its own; on the parent's end the whole process group is asked to end, then killed.

    The server must lead a process group of its own, or the parent's would be hit.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("the server must lead its own process group")
    threading.Thread(target=_end_with_parent, name="parent_watch", daemon=True).start()


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)
