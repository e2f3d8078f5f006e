"""Takes out of what is printed and kept what does not belong there: secrets (errors carry addresses, headers
and command lines), and what would steer the reader's terminal. No torch.
"""

import os
import re
import unicodedata

_HIDDEN = "***"
_USER_IN_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8  # characters; what is shorter occurs by chance ("1", "true")


def visible(text: str) -> str:
    """Return `text` with control characters and halves of surrogate pairs written out: a model's or a
    server's words must not move a cursor, or end what prints them.
    """
    return "".join(
        each if each in "\n\t" or unicodedata.category(each) not in ("Cc", "Cs") else ascii(each)[1:-1]
        for each in text
    )


def redact(text: str) -> str:
    """Return `text` without user names and passwords in addresses, without the values of environment
    variables whose names say that they are secret, and with control characters written out.
    """
    text = _USER_IN_ADDRESS.sub(rf"\1{_HIDDEN}@", text)
    secrets = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not value.isdigit()
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return visible(text)
