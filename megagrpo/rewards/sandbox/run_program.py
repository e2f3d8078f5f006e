"""Runs one program in a confined process of its own, and says what became of it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from megagrpo.rewards.sandbox.confined import CANNOT_CONFINE

_PACKAGE_ROOT = str(Path(__file__).parents[3])


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20  # address space
    file_bytes: int = 1 << 20  # for each file that it writes, standard output too


@dataclass(frozen=True)
class FunctionCall:
    """A function of the program and what it is called with."""

    name: str
    arguments: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


NO_RESULT = object()


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    kind: Literal["ok", "timeout", "error"]  # error: it raised, or ended with a status other than 0
    output: str = ""  # what it printed, cut at Limits.file_bytes
    # one for each call, through JSON; NO_RESULT where it raised or was not reached
    results: Sequence[Any] = ()
    detail: str = ""  # the last line of its standard error


class SandboxUnavailableError(Exception):
    """The machine does not offer what confines a program."""


def check_sandbox() -> None:
    """Raise SandboxUnavailableError where this machine offers no Landlock or no seccomp."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as nothing:
        if _run("", "", (), Limits(wall_seconds=30.0), nothing, nothing, errors) == CANNOT_CONFINE:
            raise SandboxUnavailableError(_read(errors).strip())


def run_program(program: str, limits: Limits, stdin: str = "", calls: Sequence[FunctionCall] = ()) -> Outcome:
    """Run `program` with `stdin`, then the calls in their order, in a folder of its own that is removed.

    The program reads its interpreter and writes its folder; it starts no process and reaches no network. What
    it prints and returns is data: the caller compares it, so that the program never sees what is expected.
    """
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryFile() as errors,
    ):
        status = _run(program, stdin, calls, limits, output, result, errors)
        results = _read_results(_read(result), len(calls))
        if status is None:
            return Outcome("timeout", results=results, detail=f"took over {limits.wall_seconds:g} s")
        if status != 0:
            lines = _read(errors).strip().splitlines()
            detail = lines[-1][:200] if lines else f"ended with status {status}"
            return Outcome("error", results=results, detail=detail)
        return Outcome("ok", output=_read(output), results=results)


def _run(
    program: str,
    stdin: str,
    calls: Sequence[FunctionCall],
    limits: Limits,
    output: IO[bytes],
    result: IO[bytes],
    errors: IO[bytes],
) -> int | None:
    """Return the exit status, or None where the time was over."""
    with tempfile.TemporaryDirectory(prefix="megagrpo-program-") as folder, tempfile.TemporaryFile() as given:
        given.write(stdin.encode("utf-8", "surrogatepass"))
        given.seek(0)
        spec = {
            "limits": {"parent": os.getpid(), **asdict(limits)},
            "calls": [asdict(call) for call in calls],
            "results": result.fileno(),
        }
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        Path(folder, "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        environment |= {"PYTHONPATH": _PACKAGE_ROOT, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", "megagrpo.rewards.sandbox.confined"],
            stdin=given,
            stdout=output,
            stderr=errors,
            pass_fds=(result.fileno(),),
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            return process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()  # it has no descendants: it can't start any
            process.wait()


def _read_results(text: str, count: int) -> list[Any]:
    results: list[Any] = []
    for line in text.split("\n")[:count]:
        try:
            results.append(json.loads(line))
        except (ValueError, RecursionError):
            results.append(NO_RESULT)
    return results + [NO_RESULT] * (count - len(results))


def _read(file: IO[bytes]) -> str:
    """Return what the program wrote; RLIMIT_FSIZE has bounded it."""
    file.seek(0)
    return file.read().decode("utf-8", "replace")
