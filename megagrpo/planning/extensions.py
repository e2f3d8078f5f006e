"""`megagrpo check-extension FILE.py:name`: which contracts a user's part meets, and where it fails."""

from megagrpo.errors import UserError
from megagrpo.planning.contract_suites import SUITES
from megagrpo.registry import load_attribute


def check_extension(place: str, contract: str | None = None) -> tuple[list[str], bool]:
    """Try a part of the user's against every contract, or against one.

    Args:
        place: `FILE.py:name` or `package.module:name`.
        contract: one of SUITES; None: all.

    Returns:
        (a line per contract met or missed, whether one is met).

    Raises:
        UserError: the code can't be loaded at all.
    """
    load_attribute(place)
    met, missed = [], []
    for kind in [contract] if contract else SUITES:
        problems = _problems(place, kind)
        if problems:
            missed += problems
        else:
            met.append(f"{place}: meets the contract of {_with_article(kind)}")
    return met + missed, bool(met)


def _problems(place: str, kind: str) -> list[str]:
    try:
        return [f"{place}: is no {kind}: {problem}" for problem in SUITES[kind](place)]
    except UserError as error:
        text = " ".join(str(error).split())
        return [text if text.startswith(f"{place}: is no") else f"{place}: is no {kind}: {text}"]
    except Exception as error:  # a user's code, called with what it may not be made for
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return [f"{place}: is no {kind}: tried out, it raised {reason}"]


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
