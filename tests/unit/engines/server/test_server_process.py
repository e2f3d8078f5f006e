"""A server is told by its log when it fails, and nothing of it is left when it or the one who started it
ends.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines.base import EngineError
from megagrpo.engines.server.command import HOST_PATH, EnginePackage, ServerCommand
from megagrpo.engines.server.engine_server import EngineServer
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.server_process import ServerProcess
from megagrpo.errors import UserError

# Serves /health, once a child of its own is up; its pid and the child's are in the file named by PIDS.
SERVER = f"""
import http.server, os, subprocess, sys
sys.path.insert(0, {str(HOST_PATH)!r})
from megagrpo.host.parent_watch import watch_parent
watch_parent()
ignore_the_first_signal = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
ignore_the_first_signal += "print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore_the_first_signal], stdout=subprocess.PIPE)
child.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
open(os.environ["PIDS"], "w").write(f"{{os.getpid()}} {{child.pid}}")
server.serve_forever()
"""


def start(code, tmp_path, **environment):
    return ServerProcess(
        lambda port: [sys.executable, "-c", code, str(port)], environment, tmp_path / "logs" / "server.log"
    )


def pids_in(path):
    deadline = time.monotonic() + 60
    while not (path.is_file() and len(path.read_text().split()) == 2):
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


def wait_until_gone(pids):
    deadline = time.monotonic() + 60
    while alive := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: no such model",
        "(Worker pid=7) ERROR 11-30 16:04:31 [core.py:15] pkg.mod.ValueError: no such model",
    ],
)
def test_a_server_that_ends_while_it_starts_is_told_with_its_last_error(tmp_path, said):
    server = start(f"print({said!r}); print('leaked nothing'); raise SystemExit(3)", tmp_path)
    with pytest.raises(
        UserError,
        match=r"ended with code 3 while it started: .*ValueError: no such model "
        r"\(log: .*server.log\)",
    ) as raised:
        server.wait_ready(lambda: False, 60)
    assert "\n" not in str(raised.value) and "Worker" not in str(raised.value)


def test_an_error_is_told_with_the_lines_that_belong_to_it(tmp_path):
    """pydantic's first line only counts the mistakes."""
    server = start(
        "print('x.ValidationError: 1 error for Model\\n  Value error, A is not supported\\nleaked'); raise "
        "SystemExit(1)",
        tmp_path,
    )
    with pytest.raises(
        UserError,
        match=r": x.ValidationError: 1 error for Model Value error, A is not "
        r"supported \(log",
    ):
        server.wait_ready(lambda: False, 60)


def test_an_older_error_in_the_log_is_not_taken_for_this_one(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("OSError: of the last start\n")
    server = start("print('bye'); raise SystemExit(1)", tmp_path)
    with pytest.raises(UserError, match="while it started: bye"):
        server.wait_ready(lambda: False, 60)


def test_a_server_that_does_not_serve_in_time_is_ended(tmp_path):
    server = start("import time; print('loading', flush=True); time.sleep(600)", tmp_path)
    with pytest.raises(UserError, match=r"did not serve within engine.server.start_timeout_seconds = 0.5"):
        server.wait_ready(lambda: False, 0.5)
    assert not server.is_alive()


def test_stopping_a_server_ends_its_children_too(tmp_path):
    server = start(SERVER, tmp_path, PIDS=str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    server.stop(grace_seconds=0.5)
    wait_until_gone(pids)
    assert "SIGTERM" in server.describe_end()


def test_a_server_ends_with_its_children_when_the_one_who_started_it_is_killed(tmp_path):
    script = f"""
    import sys, time
    from pathlib import Path
    from megagrpo.engines.server.server_process import ServerProcess
    log = Path({str(tmp_path / "log")!r})
    ServerProcess(lambda port: [sys.executable, "-c", {SERVER!r}, str(port)], {{}}, log)
    time.sleep(600)
    """
    environment = {**os.environ, "PIDS": str(tmp_path / "pids")}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    try:
        pids = pids_in(tmp_path / "pids")
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until_gone(pids)


def end_of(server):
    """How it ended: a process whose threads are still being ended is a zombie already, but can't be reaped
    yet.
    """
    deadline = time.monotonic() + 60
    while (end := server.loss) is None:
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)
    return end


class Fake:
    """Starts the server of this file as that of an engine; `first` runs in its place the first time."""

    def __init__(self, tmp_path: Path, first: str = "raise SystemExit('unused')", max_restarts: int = 1):
        self.config = build_engine_config(
            name="vllm", server={"max_restarts": max_restarts, "start_timeout_seconds": 60}
        )
        self.tmp_path, self.first, self.ports = tmp_path, first, []

    def words(self, python, port):
        self.ports.append(port)
        return [python, "-c", self.first if len(self.ports) == 1 else SERVER, str(port)]

    def start(self):
        package = EnginePackage("pytest", ("pytest",), (1, 0))  # something that this Python has
        environment = {"PIDS": str(self.tmp_path / "pids")}
        command = ServerCommand(package, "/health", Call("/alive"), self.words, lambda: environment)
        return EngineServer(command, self.config, log_file=self.tmp_path / "log")


def test_a_server_whose_port_was_taken_meanwhile_is_started_on_another(tmp_path):
    fake = Fake(tmp_path, first="raise OSError(98, 'Address already in use')")
    server = fake.start()
    try:
        assert len(set(fake.ports)) == 2 and server.address == f"http://127.0.0.1:{fake.ports[1]}"
    finally:
        server.close()


def test_another_failure_is_not_tried_again(tmp_path):
    fake = Fake(tmp_path, first="raise ValueError('no such model')")
    with pytest.raises(
        UserError,
        match=r"engine.name: vllm: the server ended with code 1 .*ValueError: no "
        r"such model",
    ):
        fake.start()
    assert len(fake.ports) == 1


def test_a_dead_server_is_started_anew_at_its_address_as_often_as_allowed(tmp_path):
    fake = Fake(tmp_path, first=SERVER, max_restarts=1)
    server = fake.start()
    try:
        address, first_pid = server.address, server.pid
        os.kill(first_pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in end_of(server)
        server.restart()
        assert server.address == address and server.pid != first_pid and server.loss is None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"engine.server.max_restarts = 1 are used up"):
            server.restart()
    finally:
        server.close()


def test_a_dead_server_whose_port_is_taken_is_started_anew_on_another(tmp_path):
    server = Fake(tmp_path, first=SERVER).start()
    listener = socket.socket()
    try:
        first = server.address
        os.kill(server.pid, signal.SIGKILL)
        end_of(server)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(first.rpartition(":")[2])))
        listener.listen()
        server.restart()
        assert server.address != first and server.loss is None
    finally:
        listener.close()
        server.close()
