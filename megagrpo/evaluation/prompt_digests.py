"""Prompts by a hash of their text: to find training prompts in a held-out set, and the same prompt in two
evaluations.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence

from megagrpo.types import Prompt


def prompt_digest(text: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a prompt's text: equal where two texts differ in case,
    white space or the form of their Unicode characters (NFKC) alone.
    """
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def find_contamination(training: Iterable[Prompt], held_out: Sequence[Prompt]) -> list[int]:
    """Return the ids of the held-out prompts that are training prompts too."""
    wanted: dict[str, list[int]] = {}
    for prompt in held_out:
        wanted.setdefault(prompt_digest(prompt.text), []).append(prompt.id)
    found = {digest for prompt in training if (digest := prompt_digest(prompt.text)) in wanted}
    return sorted(prompt_id for digest in found for prompt_id in wanted[digest])
