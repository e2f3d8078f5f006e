r"""Where the answer stands in a text.

Looked for in this order; the first that is there decides:

    1. reasoning is cut off: all up to the last `</think>`; after a `<think>` that never ends nothing is left
    2. the last `<answer>...</answer>`: what follows looks inside it alone
    3. the last `\boxed{...}` that is closed and not empty (several, divided by commas or `and`: a list)
    4. the last line `#### ...` that is not a heading; under `#### Final Answer` the next line
    5. the last `answer is ...`, `Answer: ...`
    6. the whole text, where it is one value; as an option, the last number

Every search is linear in the length of the text.
"""

import re
from collections import deque
from typing import NamedTuple

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[^A-Za-z]|[{}]")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\]+)")
_BETWEEN_BOXES = re.compile(r"[\s$.]*(?:,|;|and|or|, *and|, *or|\\text\{\s*(?:and|or)\s*\})[\s$]*")
_PHRASE = re.compile(
    r"\banswers?\b\**(?:[^\n.:=]{0,60}?\b(?:is|are|equals|be)\b[^\S\n]{0,4}:?"
    r"|[^\S\n]{0,4}(?:\([^()\n]{0,40}\)[^\S\n]{0,4})?[:=])"
    r"|^[#*\s]{0,8}(?:final )?answer\**[^\S\n]*$",  # a heading
    re.IGNORECASE | re.MULTILINE,
)
_HEADING = re.compile(r"[A-Za-z]{2,}")
_MATH_WORD = re.compile(r"(?:pi|sqrt|infinity|inf|log|ln|sin|cos|tan|no|yes)\b", re.IGNORECASE)


def strip_reasoning(text: str, tag: str) -> str:
    """Return what follows the reasoning between `<tag>` and `</tag>`; nothing where it never ends."""
    before, closed, after = text.rpartition(f"</{tag}>")
    answer = after if closed else before + after
    return answer.partition(f"<{tag}>")[0] if f"<{tag}>" in answer else answer


def find_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last complete `<tag>...</tag>`."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` that is not empty, without boxes inside it.

    Boxes that are divided by a comma or `and` alone are one answer, a list.
    """
    boxes = _closed_boxes(text)
    if not boxes:
        bare = _BARE_BOX.findall(text)
        return bare[-1].strip() if bare else None
    parts = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if _BETWEEN_BOXES.fullmatch(text, box.end, parts[0].start) is None:
            break
        parts.insert(0, box)
    return ", ".join(text[box.inside_start : box.inside_end].strip() for box in parts)


class _Box(NamedTuple):
    start: int
    inside_start: int
    inside_end: int
    end: int


def _closed_boxes(text: str) -> list[_Box]:
    """Return every innermost closed box with content, from left to right, in one pass."""
    opened: list[re.Match[str] | None] = []  # for each open brace the box that it begins, or None
    boxes: list[_Box] = []
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] == "}":
            box = opened.pop() if opened else None
            if box is None:
                continue
            is_outer = bool(boxes) and boxes[-1].start > box.start()
            if not is_outer and text[box.end() : match.start()].strip():
                boxes.append(_Box(box.start(), box.end(), match.start(), match.end()))
        elif match[0] == "{":
            opened.append(None)
        elif match[0].endswith("{") and len(match[0]) > 2:  # not an escaped brace
            opened.append(match)
    return boxes


def find_after_hashes(text: str) -> str | None:
    """Return the answer after the last `####` that is not a heading (arXiv 2110.14168's mark)."""
    lines = text.split("\n")
    for number in range(len(lines) - 1, -1, -1):
        _, mark, after = lines[number].rpartition("####")
        content = after.strip().strip("*").strip()
        if not mark or not content:
            continue
        phrase = find_phrase(content)
        if phrase is not None:
            return phrase
        if re.fullmatch(r"(?:the\s+)?(?:final\s+)?answer\W*", content, re.IGNORECASE):
            following = [line.strip() for line in lines[number + 1 :] if line.strip()]
            return following[0] if following else None
        if _HEADING.match(content) is None or _MATH_WORD.match(content):
            return content
    return None


def find_phrase(text: str) -> str | None:
    """Return what follows the last `answer is`, `Answer:` and the like, to the end of its line."""
    last = deque(_PHRASE.finditer(text), maxlen=1)
    if not last:
        return None
    line, _, rest = text[last[0].end() :].partition("\n")
    if line.strip(" *:"):
        return line.strip().removeprefix("**").strip(" :!")  # an exclamation, not a factorial
    return next((line.strip(" !") for line in rest.split("\n") if line.strip()), None)
