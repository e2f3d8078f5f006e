"""What breaks the engine servers that this rank started."""

import os
import signal
import threading
import time


def servers():
    """Return the engine servers that this rank started, one at least; each leads a process group."""
    import psutil

    for _ in range(100):  # one that has just been started may not have its command line yet
        if found := [
            child
            for child in psutil.Process().children()
            if any(word.startswith("megagrpo.host.") for word in child.cmdline())
        ]:
            return found
        time.sleep(0.05)
    raise RuntimeError("this rank has no server")


def kill_server() -> None:
    """The process that was started; those that it started are left to whoever starts it anew."""
    for server in servers():
        server.kill()


def kill_server_workers() -> None:
    for server in servers():
        for worker in server.children(recursive=True):
            worker.kill()


def freeze_server() -> None:
    for server in servers():
        os.killpg(server.pid, signal.SIGSTOP)


def kill_server_soon() -> None:
    """It takes what is sent to it now, and answers nothing."""
    for server in servers():
        os.killpg(server.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.killpg, (server.pid, signal.SIGKILL)).start()


def await_server() -> None:
    for thread in threading.enumerate():
        if thread.name == "start engine":
            thread.join(120)
