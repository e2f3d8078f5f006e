"""Prompts: rows of a data source, tokenised and checked once; then drawn in an order that
can be resumed.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagrpo.config.rollout_sections import DataConfig, EvaluationSetConfig, MixtureSourceConfig
from megagrpo.errors import UserError
from megagrpo.rollout.curriculum import Curriculum
from megagrpo.rollout.data_sources import read_rows
from megagrpo.rollout.mixture import MixtureCycle
from megagrpo.rollout.tokenisation import PromptTokeniser
from megagrpo.types import Prompt
from megagrpo.wire.counter_sampling import shuffled

SHOWN_CHARACTERS = 1000  # from each end of a long prompt, where tokens are doubled or missing


@dataclass(frozen=True)
class SourcePart:
    """One source's prompts among those of a data set."""

    place: str  # the field that names it
    name: str
    first: int
    count: int


class PromptSource:
    """The prompts of one data set, tokenised: its sources one after the other, each in row order.

    Attributes:
        prompts: those that are kept; `Prompt.id` is the row's number, from the first row of the first source
            on, also where rows before it were dropped.
        parts: the sources.
        dropped: number of rows left out for being longer than `max_prompt_tokens`.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        max_new_tokens: int,
        context_tokens: int | None = None,
        place: str = "data.source",
    ):
        """Load, tokenise and check every row.

        Args:
            config: the `data:` section; for a held-out set, a copy of it with that set's `source` and
                `limit`.
            tokenizer: an HF tokenizer. A string prompt gets the tokenizer's own special tokens; a chat
                template brings its own.
            max_new_tokens: length limit of a completion.
            context_tokens: most tokens that the model takes, prompt and completion together; None = not
                checked.
            place: the field that names the set, for messages.

        Raises:
            UserError: on the first row (it is named) that can't be used, or if no row is left.
        """
        self.config = config
        self.place = f"{place}: {config.description}"
        self.prompts: list[Prompt] = []
        self.dropped, self._notes = 0, []
        self.parts: list[SourcePart] = []
        self._max_new_tokens, self._context_tokens = max_new_tokens, context_tokens
        first_id = 0
        for own_place, part in config.parts:
            first = len(self.prompts)
            where = own_place if config.mixture else place
            num_rows = self._read(where, part, PromptTokeniser(config, tokenizer), first_id)
            first_id += num_rows
            self.parts.append(SourcePart(where, part.name, first, len(self.prompts) - first))

    def _read(self, place: str, part: MixtureSourceConfig, tokeniser: PromptTokeniser, first_id: int) -> int:
        """Take in the rows of a source; return how many they are, dropped ones too."""
        config, place_of_field = self.config, place
        place = f"{place}: {part.source}"
        max_new_tokens = part.max_new_tokens or self._max_new_tokens
        first, dropped, longest, index = len(self.prompts), 0, 0, -1
        for index, row in enumerate(read_rows(place_of_field, part.source, config.limit)):
            prompt = tokeniser.tokenise(f"{place}, row {index}", first_id + index, row, part.name)
            length = len(prompt.token_ids)
            if length > config.max_prompt_tokens:
                if config.overlong_prompts == "error":
                    raise UserError(
                        f"{place}, row {index}: the prompt has {length} tokens, data.max_prompt_tokens is "
                        f"{config.max_prompt_tokens}; raise it, or set data.overlong_prompts=drop"
                    )
                dropped, longest = dropped + 1, max(longest, length)
                continue
            if self._context_tokens is not None and length + max_new_tokens > self._context_tokens:
                raise UserError(
                    f"{place}, row {index}: {length} prompt tokens + {max_new_tokens} new tokens = "
                    f"{length + max_new_tokens}, the model's context is {self._context_tokens}"
                )
            self.prompts.append(prompt)
        kept = len(self.prompts) - first
        if not kept:
            over = f": all {dropped} rows are over data.max_prompt_tokens={config.max_prompt_tokens}"
            raise UserError(f"{place}: no prompts{over if dropped else ''}")
        self._notes += [f"warning: {place}: {note}" for note in tokeniser.notes()]
        if repeated := kept - len({prompt.token_ids for prompt in self.prompts[first:]}):
            self._notes.append(
                f"warning: {place}: {repeated} of {kept} prompts are the same as one before; an epoch has "
                "them that often"
            )
        if dropped:
            self._notes.append(
                f"warning: {place}: {dropped} of {dropped + kept} rows are dropped: over "
                f"data.max_prompt_tokens={config.max_prompt_tokens}, the longest has {longest} tokens "
                "(data.overlong_prompts=drop)"
            )
        self.dropped += dropped
        return index + 1

    def notes(self) -> list[str]:
        """Return what was done to rows beyond reading them, one line each that names the set."""
        return list(self._notes)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]

    def with_id(self, prompt_id: int) -> Prompt:
        """Return the prompt of a row; raises UserError where the row is gone or dropped."""
        position = bisect_left(self.prompts, prompt_id, key=lambda prompt: prompt.id)
        if position == len(self.prompts) or self.prompts[position].id != prompt_id:
            raise UserError(f"{self.place}: no prompt of row {prompt_id}, which a checkpoint has rollouts of")
        return self.prompts[position]


class PromptSampler:
    """Draws prompts for ever, each once per epoch; its whole state is one integer.

    The order of an epoch is a function of (seed, epoch, number of prompts) alone, so a resumed run, on any
    number of ranks, goes on with the prompts that the first one would have drawn. The sources of a mixture
    with weights take turns, each with epochs of its own. What the curriculum passes over counts as drawn.

    Example:
        >>> sampler = PromptSampler(source, seed=0)
        >>> sampler.next(32)        # 32 prompts; sampler.state() is now 32
    """

    def __init__(self, source: PromptSource, seed: int, shuffle: bool | None = None):
        """`shuffle=None` takes the source's `data.shuffle`; False draws in row order in every epoch."""
        self.source, self.seed = source, seed
        self.shuffle = source.config.shuffle if shuffle is None else shuffle
        self.curriculum = Curriculum(source.config.curriculum, source.prompts, seed)
        weights = [part.weight for part in source.config.mixture if part.weight is not None]
        self._cycle = MixtureCycle(weights) if weights else None
        self._position = 0
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # by source, the last epoch and its order

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, over the epoch's end where need be, and advance.

        A prompt comes twice in one call only where `count` reaches over an epoch's end. The curriculum passes
        over as many prompts in a row as there are, never over the next one.
        """
        drawn: list[Prompt] = []
        last = self._position + len(self.source)
        while len(drawn) < count:
            prompt = self._prompt_at(self._position)
            is_taken = self._position >= last or not self.curriculum.passes_over(prompt, self._position)
            self._position += 1
            if is_taken:
                drawn.append(prompt)
                last = self._position + len(self.source)
        return drawn

    def state(self) -> int:
        """Return the number of prompts drawn so far."""
        return self._position

    def load_state(self, position: int) -> None:
        """Go on as if `position` prompts had been drawn."""
        if position < 0:
            raise ValueError(f"prompt position {position} is negative")
        self._position = position

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._position / len(self.source)

    def _prompt_at(self, position: int) -> Prompt:
        if self._cycle is None:
            return self.source[self._place(0, len(self.source), position)]
        number, draw = self._cycle.locate(position)
        part = self.source.parts[number]
        return self.source[part.first + self._place(number, part.count, draw)]

    def _place(self, number: int, count: int, draw: int) -> int:
        """Return the place of a source's `draw`-th prompt among its `count`."""
        epoch, offset = divmod(draw, count)
        if not self.shuffle:
            return offset
        if number not in self._orders or self._orders[number][0] != epoch:
            self._orders[number] = (epoch, shuffled(count, self.seed + number, epoch))
        return int(self._orders[number][1][offset])


def load_prompts(
    training: DataConfig,
    held_out_sets: Sequence[EvaluationSetConfig],
    max_new_tokens: int,
    tokenizer: Any,
    context_tokens: int | None,
    note: Callable[[str], None],
) -> tuple[PromptSource, list[tuple[EvaluationSetConfig, list[Prompt]]]]:
    """Load and check the training prompts and all held-out sets.

    Args:
        training: the training prompts; held-out sets are read in the same way.
        max_new_tokens: length limit of a completion.
        tokenizer: the run's.
        context_tokens: most tokens that the model takes; None = not checked.
        note: told, line by line, the first training prompt as the engine gets it and what was done to rows.
    """

    def load(data: DataConfig, place: str, new_tokens: int = max_new_tokens) -> PromptSource:
        source = PromptSource(data, tokenizer, new_tokens, context_tokens, place)
        for line in source.notes():
            note(line)
        return source

    source = load(training, "data.source")
    held_out = []
    for number, evaluation in enumerate(held_out_sets):
        changes = {"source": evaluation.source, "limit": evaluation.limit, "mixture": ()}
        data = training.model_copy(update=changes)
        new_tokens = evaluation.max_new_tokens or max_new_tokens
        held_out.append((evaluation, load(data, f"evaluation.sets.{number}.source", new_tokens).prompts))
    note(f"first of {len(source)} prompts: {describe_prompt(source[0], tokenizer)}")
    return source, held_out


def prompts_by_field(
    source: PromptSource, held_out: Sequence[tuple[EvaluationSetConfig, list[Prompt]]]
) -> dict[str, Sequence[Prompt]]:
    """Return the prompts of each data set, by the field that names the set."""
    return {part.place: source.prompts[part.first : part.first + part.count] for part in source.parts} | {
        f"evaluation.sets.{number}.source": prompts for number, (_, prompts) in enumerate(held_out)
    }


def describe_prompt(prompt: Prompt, tokenizer: Any) -> str:
    """Return one line: the prompt's token ids decoded, special tokens too, and how many they are."""
    text = json.dumps(tokenizer.decode(prompt.token_ids), ensure_ascii=False)
    if len(text) > 2 * SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}"
    return f"{text} ({len(prompt.token_ids)} tokens)"
