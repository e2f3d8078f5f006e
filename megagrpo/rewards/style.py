"""Rewards of how a text is written, whatever it says: `length`, `repetition`, `language`."""

from collections import Counter

import regex

from megagrpo.errors import UserError
from megagrpo.rewards.places import find_tagged, strip_reasoning
from megagrpo.rewards.reward import REWARDS
from megagrpo.types import Completion, Prompt

# in these scripts a sign is a word
_SIGNS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}]"
_WORD = regex.compile(rf"{_SIGNS}|(?:(?!{_SIGNS})[\p{{L}}\p{{M}}\p{{N}}])+")
_NO_PROSE = regex.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\w+|https?://\S+|<[^<>\s]*>", regex.DOTALL
)


@REWARDS.register("length")
class LengthReward:
    """1.0 for a completion of `min_tokens` to `max_tokens` tokens, falling to 0.0 over `slack_tokens`.

    With a slack it is the linear penalty of DAPO (arXiv 2503.14476, Eq. 13), between 1 and 0.
    """

    def __init__(self, min_tokens: int = 1, max_tokens: int = 4096, slack_tokens: int = 0):
        if not 0 <= min_tokens <= max_tokens or slack_tokens < 0:
            raise UserError(
                f"rewards.functions: 'length': min_tokens is {min_tokens}, max_tokens {max_tokens}, "
                f"slack_tokens {slack_tokens}; 0 <= min_tokens <= max_tokens and slack_tokens >= 0 are needed"
            )
        self.min_tokens, self.max_tokens, self.slack_tokens = min_tokens, max_tokens, slack_tokens

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return a score between 0.0 and 1.0."""
        tokens = len(completion.token_ids)
        outside = max(self.min_tokens - tokens, tokens - self.max_tokens, 0)
        return max(0.0, 1.0 - outside / self.slack_tokens) if self.slack_tokens else float(outside == 0)


@REWARDS.register("repetition")
class RepetitionReward:
    """1.0 where few n-grams of words come again, 0.0 where many do, linear between.

    The share is 1 - distinct / all n-grams of the words, whatever their case; in scripts without spaces a
    sign is a word. A text of fewer than `n` words scores 1.0.

    Args:
        n: words in an n-gram.
        allowed: share that costs nothing.
        forbidden: share from which on the score is 0.0.
    """

    def __init__(self, n: int = 4, allowed: float = 0.1, forbidden: float = 0.5):
        if n < 1 or not 0 <= allowed < forbidden <= 1:
            raise UserError(
                f"rewards.functions: 'repetition': n is {n}, allowed {allowed}, forbidden "
                f"{forbidden}; n >= 1 and 0 <= allowed < forbidden <= 1 are needed"
            )
        self.n, self.allowed, self.forbidden = n, allowed, forbidden

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return a score between 0.0 and 1.0."""
        words = _WORD.findall(completion.text.casefold())
        grams = [tuple(words[start : start + self.n]) for start in range(len(words) - self.n + 1)]
        share = 1 - len(set(grams)) / len(grams) if grams else 0.0
        return min(1.0, max(0.0, (self.forbidden - share) / (self.forbidden - self.allowed)))


@REWARDS.register("language")
class LanguageReward:
    """The share of a completion's words that are written in one script (the language consistency of arXiv
    2501.12948, section 2.3.2, as far as scripts tell languages apart).

    Code, formulas, addresses, tags and numbers are no words; a text without words scores 1.0.

    Args:
        script: a Unicode script: Latin, Cyrillic, Han, Arabic, Devanagari, ... Japanese and Korean text mixes
            scripts: give several, as `Han|Hiragana|Katakana`.
        where: `all` of the text, the `reasoning` inside `<think>`, or the `answer` after it.
    """

    def __init__(self, script: str = "Latin", where: str = "all"):
        if where not in ("all", "reasoning", "answer"):
            raise UserError(
                f"rewards.functions: 'language': where is {where!r}; allowed: all, reasoning, answer"
            )
        self.where = where
        try:
            scripts = "".join(rf"\p{{Script={name.strip()}}}" for name in script.split("|"))
            self._own = regex.compile(rf"[{scripts}\p{{Script=Common}}\p{{Script=Inherited}}]+")
        except regex.error:
            raise UserError(
                f"rewards.functions: 'language': script is {script!r}; a Unicode script is needed, as Latin"
            ) from None

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return a score between 0.0 and 1.0."""
        text = completion.text
        if self.where == "reasoning":
            text = find_tagged(text, "think") or ""
        elif self.where == "answer":
            text = strip_reasoning(text, "think")
        words = Counter(word for word in _WORD.findall(_NO_PROSE.sub(" ", text)) if not word.isnumeric())
        own = sum(count for word, count in words.items() if self._own.fullmatch(word))
        return own / words.total() if words else 1.0
