"""Overrides written as options, `--rollout.temperature=1`, as other trainers take them."""

import re
from collections.abc import Sequence

from megagrpo.errors import ConfigError

_DASHED = re.compile(r"--?([a-z]\w*(?:\.\w+)+)(?:=(.*))?", re.DOTALL)


def refuse_dashed_overrides(arguments: Sequence[str]) -> None:
    """Say how arguments of a command line are written that are overrides with dashes before them.

    Raises:
        ConfigError: there are some; one line each.
    """
    problems = []
    for position, argument in enumerate(arguments):
        if (found := _DASHED.fullmatch(argument)) is None:
            continue
        place, value = found.groups()
        following = arguments[position + 1 : position + 2]
        if value is None:  # --place value, or --place alone, as a flag
            value = following[0] if following and not re.match(r"-[-a-z]|.*=", following[0]) else "true"
        problems.append(f"{argument}: write {place}={value}, without dashes")
    if problems:
        raise ConfigError(problems)
