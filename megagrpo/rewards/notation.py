"""One notation for what people and models write: Unicode signs and LaTeX decoration become plain LaTeX."""

import re
import unicodedata

MAX_ANSWER_CHARACTERS = 1000  # longer texts are no answers, and reading them is expensive

_VULGAR = {
    character: tuple(unicodedata.normalize("NFKC", character).split("\u2044"))
    for character in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_DASHES = (
    "\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{FIGURE DASH}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
)
_TIMES = "\N{MULTIPLICATION SIGN}\N{MULTIPLICATION X}\N{VECTOR OR CROSS PRODUCT}"
_SIGNS = str.maketrans(
    {
        **dict.fromkeys(_DASHES, "-"),
        **dict.fromkeys(_TIMES, r"\times "),
        **dict.fromkeys("\N{MIDDLE DOT}\N{DOT OPERATOR}\N{BULLET OPERATOR}", r"\cdot "),
        **dict.fromkeys("\N{DIVISION SLASH}\N{FRACTION SLASH}\N{DIVISION SIGN}", "/"),
        **dict.fromkeys("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}", "'"),
        **dict.fromkeys("\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}", '"'),
        "π": r"\pi ",
        "∞": r"\infty ",
        "±": r"\pm ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "\N{UNION}": r"\cup ",
        "\N{ELEMENT OF}": r"\in ",
        "\N{DOUBLE-STRUCK CAPITAL R}": r"\mathbb{R}",
    }
)
_ROOT = re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:,?\\[,;:! ]|\{,\}|[\u00a0\u2009\u202f]|~)\s*(?=\d{3}(?!\d))")
_COMMA_IN_NUMBER = re.compile(r"(?<=\d)\{,\}(?=\d)")
_SPACING = re.compile(r"(?<!\\)\\(?:[,;:!> ]|quad\b|qquad\b|displaystyle\b|limits\b|big[lr]?\b|Big[lr]?\b)|~")
_SIZED = re.compile(r"\\(?:left|right)(?=[^A-Za-z])")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boldsymbol)\s*\{([^{}]*)\}"
)
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)\s*(\d)|(\d)\s*(\{[^{}]*\})|(\{[^{}]*\})\s*(\d))")
_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*|\*\*(?![\w(\\-])")
_CHOICE = re.compile(r"^\([A-H]\)\s*(?=[-+\\$\d])")  # the label of a choice, before its value
_DELIMITED = re.compile(r"^(?:\$+(?P<a>[^$]*)\$+|\\\((?P<b>.*)\\\)|\\\[(?P<c>.*)\\\])$", re.DOTALL)


def normalise(text: str) -> str:
    r"""Return `text` in plain LaTeX: ASCII signs, no spacing commands, no font commands, `\frac{a}{b}`,
    no delimiters and no punctuation around it. It costs time linear in its length.
    """
    for character, (above, below) in _VULGAR.items():
        if character in text:
            text = text.replace(character, rf"\frac{{{above}}}{{{below}}}")
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = text.translate(_SIGNS)
    text = _SPACE_IN_NUMBER.sub(",", text)
    text = unicodedata.normalize("NFKC", text)
    text = _COMMA_IN_NUMBER.sub(",", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = _SIZED.sub("", text)
    text = _TEXT.sub(r" \1 ", text)
    text = text.replace(r"\%", "%").replace(r"\$", "$").replace(r"^\circ", "°").replace(r"^{\circ}", "°")
    text = text.replace(r"\degree", "°")
    text = _EMPHASIS.sub("", _SPACING.sub(" ", text))
    text = _SHORT_FRACTION.sub(_lengthen, text)
    return _CHOICE.sub("", undecorate(text))


def undecorate(text: str) -> str:
    """Return `text` without emphasis, quotes, dollar signs and final punctuation around it."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip("*_`\"'").strip()
        # a factorial's sign ends no sentence
        text = text.rstrip(".,;:?" if re.search(r"[\w)}]!$", text) and " " not in text else ".,;:!?").strip()
        if match := _DELIMITED.match(text):
            text = next(group for group in match.groups() if group is not None)
    return text


def _lengthen(match: re.Match[str]) -> str:
    above, below = (group.strip("{}") for group in match.groups() if group is not None)
    return rf"\frac{{{above}}}{{{below}}}"
