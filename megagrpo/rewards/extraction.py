"""Where the answer stands in a text. Pure string functions; each returns None where the text has no such
place.
"""

import re

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` whose braces balance; `\{` and `\}` do not count as
    braces.
    """
    start = text.rfind(r"\boxed{")
    while start >= 0:
        content = _balanced(text, start + len(r"\boxed{"))
        if content is not None:
            return content.strip()
        start = text.rfind(r"\boxed{", 0, start)
    return None


def _balanced(text: str, begin: int) -> str | None:
    depth, position = 1, begin
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped character is never a brace
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[begin:position]
        position += 1
    return None


def extract_after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`, the answer mark of GSM8K (arXiv 2110.14168)."""
    _, mark, after = text.rpartition("####")
    return after.strip().split("\n")[0].strip() if mark else None


def extract_last_number(text: str) -> str | None:
    """Return the last number of the text without thousands separators: an integer, a decimal or a fraction
    `a/b`.
    """
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def extract_tag(text: str, tag: str) -> str | None:
    """Return the content of the last complete `<tag>...</tag>`."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None
