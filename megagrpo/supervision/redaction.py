"""Takes secrets out of what is printed and kept: errors carry addresses, headers and command lines. No
torch.
"""

import os
import re

_HIDDEN = "***"
_USER_IN_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8  # characters; what is shorter occurs by chance ("1", "true")


def redact(text: str) -> str:
    """Return `text` without user names and passwords in addresses, and without the values of environment
    variables whose names say that they are secret.
    """
    text = _USER_IN_ADDRESS.sub(rf"\1{_HIDDEN}@", text)
    secrets = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not value.isdigit()
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text
