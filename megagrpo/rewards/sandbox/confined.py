"""The process in which a program runs, from inside: it takes its limits, then runs the program in itself.

    python -P -B -m megagrpo.rewards.sandbox.confined

`run_program.py` starts it in a folder that holds `program.py` and `spec.json`.

No other process is started and no other program executed, so nothing outlives it. Standard library only.
"""

import json
import os
import resource
import signal
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

from megagrpo.rewards.isolation import end_with_parent, limit_memory
from megagrpo.rewards.sandbox.files import confine_files
from megagrpo.rewards.sandbox.system_calls import refuse_system_calls

# what an interpreter opens beside its own files: libraries, time zones, character sets
_SYSTEM_FILES = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero"),
)
CANNOT_CONFINE = 125  # exit status


def confine(limits: dict[str, int]) -> None:
    """Take `limits`; raises OSError where the machine does not offer one of them."""
    end_with_parent(limits["parent"], signal.SIGKILL)
    limit_memory(limits["memory_bytes"])
    for limit, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    packages = [path for path in sys.path if path.endswith("-packages")]
    interpreter = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *packages]
    confine_files([*interpreter, *_SYSTEM_FILES], [os.getcwd(), "/dev/null"])
    refuse_system_calls()


def main() -> None:
    """Confine this process, then run the program and make the calls."""
    spec = json.loads(Path("spec.json").read_text(encoding="utf-8"))
    program = Path("program.py").read_text(encoding="utf-8", errors="surrogatepass")
    try:
        confine(spec["limits"])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(CANNOT_CONFINE)
    calls = spec["calls"]
    module = types.ModuleType("program" if calls else "__main__")
    sys.modules[module.__name__], sys.argv = module, ["program.py"]
    exec(compile(program, "program.py", "exec"), module.__dict__)  # confined: this process is for that
    with open(spec["results"], "w", encoding="utf-8") as file:  # a descriptor
        for call in calls:
            print(_answer(module, call), file=file, flush=True)


def _answer(module: types.ModuleType, call: dict[str, Any]) -> str:
    """Return what a call returns as one line of JSON; nothing where it raises or is no value of JSON."""
    try:
        return json.dumps(_find(module, call["name"])(*call["arguments"], **call["keywords"]))
    except Exception:  # whatever a program of a model raises: this call alone has no result
        return ""


def _find(module: types.ModuleType, name: str) -> Any:
    """Return the function, or where there is none the method of a class `Solution` (as LeetCode asks for)."""
    if not hasattr(module, name) and hasattr(module, "Solution"):
        return getattr(module.Solution(), name)
    return getattr(module, name)


if __name__ == "__main__":
    main()
