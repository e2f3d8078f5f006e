"""Options of a server as command-line arguments."""

import json
from collections.abc import Mapping
from typing import Any


def command_line_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return `--name value` for every option: underscores become dashes, true a bare --name, mappings and lists JSON; null is left out.

    false leaves the option out as well: servers differ in how they say no, so a --no-name is given as an option of its own.
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
