"""Breaks a rank at a named point. Installed before the training starts; the product knows nothing of it.

A fault is a dict:
    point   where: `PHASE.enter`, `PHASE.leave` of the trainer's phases (rollout, update, publish, evaluate,
            checkpoint, ...); the name of a wrapped function (see FUNCTIONS) with `.enter` or `.leave`;
            `files`: any change in the checkpoints' folder; `files.open`: a file there is opened to be written
    action  what: see ACTIONS
    step    in which step; None: in any
    rank    on which rank; None: on all
    skip    passes through the point that are left alone first
    times   passes that are hit; default 1, None: all of them
    only    attempt (TORCHELASTIC_RESTART_COUNT) that is hit; default 0

Actions on servers are those of the rank that started them.
"""

import builtins
import ctypes
import errno
import functools
import importlib
import io
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import server_faults

_results: dict[str, object] = {}  # the newest one of each wrapped function

FUNCTIONS = {
    "generate": "megagrpo.engines.embedded.transformers_engine:TransformersEngine.generate",
    "decode": "megagrpo.engines.embedded.transformers_engine:TransformersEngine._forward",
    "score": "megagrpo.rewards.dispatch:Dispatcher.run",
    "exchange": "megagrpo.policy.mini_batches:exchange_completions",
    "logprobs": "megagrpo.policy.actor:Actor.logprobs",
    "forward_backward": "megagrpo.policy.actor:Actor.forward_backward",
    "apply": "megagrpo.policy.actor:Actor.apply_gradients",
    "requests": "megagrpo.engines.server.http_client:EngineClient.call_all",
    "bucket": "megagrpo.engines.server.engine:ServerEngine.receive",
    "server_commit": "megagrpo.engines.server.engine:ServerEngine.complete_update",
    "server_serve": "megagrpo.engines.server.engine:ServerEngine.serve_update",
    "server_start": "megagrpo.engines.server.server_process:ServerProcess.wait_ready",
    "port": "megagrpo.engines.server.server_process:free_port",
    "load_weights": "megagrpo.engines.embedded.transformers_engine:TransformersEngine.load",
    "commit_weights": "megagrpo.engines.embedded.transformers_engine:TransformersEngine.commit_update",
    "build": "megagrpo.run:build_session",
    "groups": "megagrpo.session:build_groups",
    "load_checkpoint": "megagrpo.checkpoint.run_checkpoints:load_shards",
    "write_row": "megagrpo.telemetry.writers:JsonlWriter.write",
    "append": "megagrpo.telemetry.patient_file:append",
    "export": "megagrpo.run:write_hf_folder",
}


def _os_error(code: int):
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def _raise(error: Exception):
    def act() -> None:
        raise error

    return act


def _signal(number: int):
    def act() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # delivered to the thread that waits for signals

    return act


def _signal_launcher(number: int):
    def act() -> None:
        os.kill(os.getppid(), number)
        time.sleep(1.0)  # it passes the signal on

    return act


def _kill_children() -> None:
    import psutil

    children = psutil.Process().children()
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=5)


def _die_soon() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _take_port() -> None:
    """The port that the rank has just found free."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", _results["port"]))
    listener.listen()
    _results["listener"] = listener  # for as long as the rank lives


def _user_error() -> None:
    from megagrpo.errors import UserError

    raise UserError("a mistake of the user's")


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(7),
    "raise": _raise(RuntimeError("injected")),
    "out_of_memory": _raise(MemoryError("injected")),
    "user_error": _user_error,
    "term": _signal(signal.SIGTERM),
    "usr1": _signal(signal.SIGUSR1),
    "interrupt": _signal(signal.SIGINT),
    # the second one ends the rank, which must not have agreed on the stop by then
    "interrupt_twice": lambda: (_signal(signal.SIGINT)(), _signal(signal.SIGINT)(), time.sleep(10)),
    "kill_workers": _kill_children,
    "kill_server": server_faults.kill_server,
    "kill_server_soon": server_faults.kill_server_soon,
    "kill_server_workers": server_faults.kill_server_workers,
    "freeze_server": server_faults.freeze_server,
    "await_server": server_faults.await_server,
    "take_port": _take_port,
    "die_soon": _die_soon,
    "hang": lambda: time.sleep(1000),
    "spin": lambda: [None for _ in iter(int, 1)],
    "slow": lambda: time.sleep(3),
    "no_space": _os_error(errno.ENOSPC),
    "read_only": _os_error(errno.EROFS),
    "io_error": _os_error(errno.EIO),
    "kill_launcher": _signal_launcher(signal.SIGKILL),
    "term_launcher": _signal_launcher(signal.SIGTERM),
    "usr1_launcher": _signal_launcher(signal.SIGUSR1),
}


class Injector:
    """The faults of this rank, and when each was met."""

    def __init__(self, faults: list[dict], log: Path):
        self.rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.log, self.step = log, None
        self.faults = [dict(fault, passed=0) for fault in faults if fault.get("only", 0) in (attempt, None)]

    def hit(self, point: str) -> None:
        """Do what is to be done at this point."""
        for fault in self.faults:
            if fault["point"] != point or fault.get("rank", self.rank) not in (self.rank, None):
                continue
            if fault.get("step") not in (self.step, None):
                continue
            fault["passed"] += 1
            times = fault.get("times", 1)
            number = fault["passed"] - fault.get("skip", 0)
            if number >= 1 and (times is None or number <= times):
                self.note("fault", point=point, action=fault["action"])
                ACTIONS[fault["action"]]()

    def note(self, kind: str, **more: object) -> None:
        """Append a line to the log that the harness reads; written with the unpatched calls."""
        line = (
            json.dumps({"kind": kind, "time": time.time(), "rank": self.rank, "step": self.step, **more})
            + "\n"
        )
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def install(faults: list[dict], log: Path, run_dir: Path) -> None:
    """Wrap what can be hit; every rank, before the training starts."""
    from megagrpo.supervision.supervisor import Supervisor
    from megagrpo.telemetry.recorder import Recorder
    from megagrpo.telemetry.timers import PhaseTimers

    injector = Injector(faults, log)
    for name, place in FUNCTIONS.items():
        module, _, path = place.partition(":")
        owner = importlib.import_module(module)
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part)
        attribute = path.rpartition(".")[2]
        setattr(owner, attribute, _around(getattr(owner, attribute), name, injector))
    _watch_phases(PhaseTimers, Supervisor, Recorder, injector)
    if any(fault["point"].startswith("files") for fault in injector.faults):
        _watch_files(str(run_dir / "checkpoints"), injector)


def _around(function, name: str, injector: Injector):
    @functools.wraps(function)
    def wrapped(*arguments, **options):
        injector.hit(f"{name}.enter")
        result = _results[name] = function(*arguments, **options)
        injector.hit(f"{name}.leave")
        return result

    return wrapped


def _watch_phases(timers, supervisor, recorder, injector: Injector) -> None:
    build, enter, record = timers.__init__, supervisor.enter, recorder.step

    def build_with_listeners(self, *arguments, **options) -> None:
        build(self, *arguments, **options)
        self.on_enter.append(lambda name: injector.hit(f"{name}.enter"))
        self.on_leave.append(lambda name, seconds: injector.hit(f"{name}.leave"))

    def enter_and_look(self, name: str) -> None:
        enter(self, name)
        if self.step != injector.step:
            injector.step = self.step

    def record_and_note(self, step: int, metrics) -> None:
        record(self, step, metrics)
        injector.note("row", row=step)

    timers.__init__, supervisor.enter, recorder.step = build_with_listeners, enter_and_look, record_and_note


def _watch_files(folder: str, injector: Injector) -> None:
    """Count every operation that changes something under the checkpoints' folder."""

    def opens_to_write(mode="r", *_arguments, **_options) -> bool:
        return any(letter in mode for letter in "wax+")

    def guard(function, writes):
        @functools.wraps(function)
        def wrapped(path, *arguments, **options):
            if (
                isinstance(path, (str, os.PathLike))
                and os.fspath(path).startswith(folder)
                and writes(*arguments, **options)
            ):
                injector.hit("files")
                if writes is opens_to_write:
                    injector.hit("files.open")
            return function(path, *arguments, **options)

        return wrapped

    def always(*_arguments, **_options) -> bool:
        return True

    builtins.open = guard(builtins.open, opens_to_write)
    io.open = guard(io.open, opens_to_write)
    for name in ("rename", "replace", "mkdir"):
        setattr(os, name, guard(getattr(os, name), always))
    shutil.rmtree = guard(shutil.rmtree, always)
