"""Prompts: rows of a data source, tokenised and checked once; then drawn in an order that
can be resumed.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megagrpo.config.rollout_sections import DataConfig, EvaluationSetConfig
from megagrpo.errors import UserError
from megagrpo.rollout.data_sources import read_rows
from megagrpo.rollout.tokenisation import PromptTokeniser
from megagrpo.types import Prompt
from megagrpo.wire.counter_sampling import shuffled

SHOWN_CHARACTERS = 1000  # from each end of a long prompt, where tokens are doubled or missing


class PromptSource:
    """The prompts of one data set, tokenised, in row order.

    Attributes:
        prompts: those that are kept; `Prompt.id` is the row's index in the source, also where rows before it
            were dropped.
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
        self.place = f"{place}: {config.source}"
        self.prompts: list[Prompt] = []
        self.dropped = longest = 0
        tokeniser = PromptTokeniser(config, tokenizer)
        for index, row in enumerate(read_rows(place, config.source, config.limit)):
            prompt = tokeniser.tokenise(f"{self.place}, row {index}", index, row)
            length = len(prompt.token_ids)
            if length > config.max_prompt_tokens:
                if config.overlong_prompts == "error":
                    raise UserError(
                        f"{self.place}, row {index}: the prompt has {length} tokens, "
                        "data.max_prompt_tokens is "
                        f"{config.max_prompt_tokens}; raise it, or set data.overlong_prompts=drop"
                    )
                self.dropped += 1
                longest = max(longest, length)
                continue
            if context_tokens is not None and length + max_new_tokens > context_tokens:
                raise UserError(
                    f"{self.place}, row {index}: {length} prompt tokens + {max_new_tokens} "
                    "new tokens = "
                    f"{length + max_new_tokens}, the model's context is {context_tokens}"
                )
            self.prompts.append(prompt)
        if not self.prompts:
            dropped = (
                (f": all {self.dropped} rows are over data.max_prompt_tokens={config.max_prompt_tokens}")
                if self.dropped
                else ""
            )
            raise UserError(f"{self.place}: no prompts{dropped}")
        self._notes = tokeniser.notes()
        if self.dropped:
            self._notes.append(
                f"{self.dropped} of {self.dropped + len(self)} rows are dropped: over data.max_prompt_tokens="
                f"{config.max_prompt_tokens}, the longest has {longest} tokens (data.overlong_prompts=drop)"
            )

    def notes(self) -> list[str]:
        """Return what was done to rows beyond reading them, one line each that names the set."""
        return [f"warning: {self.place}: {note}" for note in self._notes]

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
    number of ranks, goes on with the prompts that the first one would have drawn.

    Example:
        >>> sampler = PromptSampler(source, seed=0)
        >>> sampler.next(32)        # 32 prompts; sampler.state() is now 32
    """

    def __init__(self, source: PromptSource, seed: int, shuffle: bool | None = None):
        """`shuffle=None` takes the source's `data.shuffle`; False draws in row order in every epoch."""
        self.source = source
        self.seed = seed
        self.shuffle = source.config.shuffle if shuffle is None else shuffle
        self._position = 0
        self._epoch_order: tuple[int, np.ndarray] | None = None  # the last epoch drawn from, and its order

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, over the epoch's end where need be, and advance.

        A prompt comes twice in one call only where `count` reaches over an epoch's end.
        """
        drawn = [self._prompt_at(position) for position in range(self._position, self._position + count)]
        self._position += count
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
        epoch, offset = divmod(position, len(self.source))
        if not self.shuffle:
            return self.source[offset]
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, shuffled(len(self.source), self.seed, epoch))
        return self.source[int(self._epoch_order[1][offset])]


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

    def load(data: DataConfig, place: str) -> PromptSource:
        source = PromptSource(data, tokenizer, max_new_tokens, context_tokens, place)
        for line in source.notes():
            note(line)
        return source

    source = load(training, "data.source")
    held_out = []
    for number, evaluation in enumerate(held_out_sets):
        data = training.model_copy(update={"source": evaluation.source, "limit": evaluation.limit})
        held_out.append((evaluation, load(data, f"evaluation.sets.{number}.source").prompts))
    note(f"first of {len(source)} prompts: {describe_prompt(source[0], tokenizer)}")
    return source, held_out


def prompts_by_field(
    source: PromptSource, held_out: Sequence[tuple[EvaluationSetConfig, list[Prompt]]]
) -> dict[str, Sequence[Prompt]]:
    """Return the prompts of each data set, by the field that names the set."""
    return {"data.source": source.prompts} | {
        f"evaluation.sets.{number}.source": prompts for number, (_, prompts) in enumerate(held_out)
    }


def describe_prompt(prompt: Prompt, tokenizer: Any) -> str:
    """Return one line: the prompt's token ids decoded, special tokens too, and how many they are."""
    text = json.dumps(tokenizer.decode(prompt.token_ids), ensure_ascii=False)
    if len(text) > 2 * SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}"
    return f"{text} ({len(prompt.token_ids)} tokens)"
