"""How a server is called: its command, its options as arguments, its devices."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.errors import UserError

HOST_PATH = Path(__file__).resolve().parents[2] / "host" / "importable"
"""PYTHONPATH of an engine's process: `megagrpo.host` and `megagrpo.wire` can be imported there, and no other
package of this environment.
"""


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
