"""Finds secrets in a configuration, which is written to the run folder, checkpoints and reports as it is."""

import re
from collections.abc import Iterator
from typing import Any

# whole words: `max_tokens`, `eos_token` and `tokenizer` are none
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:password|passwd|secret|credentials?|(?:api|access|secret|private)[_-]?key)$"
    r"|^(?:.*[_-])?(?:auth|access|api|bearer|hf|hub|secret)[_-]?token$|^token$|^authorization$",
    re.IGNORECASE,
)
_USER_IN_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s@'\"]+:[^/\s@'\"]+@", re.IGNORECASE)
_KEPT = "and a configuration is kept in the run folder as it is"
_INSTEAD = "use an environment variable (rewards.environment names those that rewards may read)"


def find_secrets(raw: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each text under a name that says it is secret, and for each password in an address.

    Args:
        raw: values of JSON: a configuration, or a part of one.
        place: where it stands.
    """
    if isinstance(raw, dict):
        for key, value in raw.items():
            inside = f"{place}.{key}" if place else str(key)
            if isinstance(value, str) and value and _SECRET_NAME.search(str(key)):
                yield f"{inside}: looks like a secret, {_KEPT}; {_INSTEAD}"
            else:
                yield from find_secrets(value, inside)
    elif isinstance(raw, list):
        for number, value in enumerate(raw):
            yield from find_secrets(value, f"{place}.{number}")
    elif isinstance(raw, str) and _USER_IN_ADDRESS.search(raw):
        yield f"{place}: holds a password in an address, {_KEPT}"
