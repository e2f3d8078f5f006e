"""Prompts: rows of a data source, tokenised and checked once; then drawn in an order that
can be resumed.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

from megagrpo.config.schema import DataConfig
from megagrpo.errors import UserError
from megagrpo.rollout.data_sources import read_rows
from megagrpo.types import Prompt
from megagrpo.wire.counter_sampling import shuffled


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raise UserError if the tokenizer can produce ids that the model's `vocab_size` embeddings do not
    cover.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise UserError(
            f"model.tokenizer: {tokenizer.name_or_path!r} has token ids up to {largest}, the model's "
            f"vocab_size is {vocab_size}; "
            "use the tokenizer that belongs to the model"
        )


class PromptSource:
    """The prompts of one data set, tokenised, in row order.

    Attributes:
        prompts: those that are kept; `Prompt.id` is the row's index in the source, also where rows before it
            were dropped.
        dropped: number of rows left out for being longer than `max_prompt_tokens`.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Any, max_new_tokens: int, context_tokens: int | None = None
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

        Raises:
            UserError: on the first row (it is named) that can't be used, or if no row is left.
        """
        self.config = config
        self.prompts: list[Prompt] = []
        self.dropped = 0
        for index, row in enumerate(read_rows("data.source", config.source, config.limit)):
            prompt = _tokenise(config, tokenizer, index, row)
            length = len(prompt.token_ids)
            if length > config.max_prompt_tokens:
                if config.overlong_prompts == "error":
                    raise UserError(
                        f"data.source: {config.source}, row {index}: the prompt has {length} tokens, "
                        "data.max_prompt_tokens is "
                        f"{config.max_prompt_tokens}; raise it, or set data.overlong_prompts=drop"
                    )
                self.dropped += 1
                continue
            if context_tokens is not None and length + max_new_tokens > context_tokens:
                raise UserError(
                    f"data.source: {config.source}, row {index}: {length} prompt tokens + {max_new_tokens} "
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
            raise UserError(f"data.source: {config.source}: no prompts{dropped}")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]

    def with_id(self, prompt_id: int) -> Prompt:
        """Return the prompt of a row; raises UserError where the row is gone or dropped."""
        position = bisect_left(self.prompts, prompt_id, key=lambda prompt: prompt.id)
        if position == len(self.prompts) or self.prompts[position].id != prompt_id:
            raise UserError(
                f"data.source: {self.config.source}: no prompt of row {prompt_id}, which a "
                "checkpoint has rollouts of"
            )
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


def _tokenise(config: DataConfig, tokenizer: Any, index: int, row: Mapping[str, Any]) -> Prompt:
    place = f"data.source: {config.source}, row {index}"
    if config.prompt_field not in row:
        raise UserError(
            f"{place}: no column {config.prompt_field!r} (data.prompt_field); it has "
            f"{', '.join(map(str, row)) or 'none'}"
        )
    content = row[config.prompt_field]
    if config.chat_template:
        text = _render_chat(place, tokenizer, content)
    elif isinstance(content, str):
        text = content
    else:
        hint = "; chat messages need data.chat_template=true" if isinstance(content, list) else ""
        raise UserError(
            f"{place}: column {config.prompt_field!r} is a {type(content).__name__}, not a string{hint}"
        )
    token_ids = tuple(tokenizer(text, add_special_tokens=not config.chat_template)["input_ids"])
    if not token_ids:
        raise UserError(f"{place}: the prompt has no tokens")
    columns = {name: value for name, value in row.items() if name != config.prompt_field}
    return Prompt(id=index, text=text, token_ids=token_ids, columns=columns)


def _render_chat(place: str, tokenizer: Any, content: Any) -> str:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(each, Mapping) and "role" in each for each in messages)
    ):
        raise UserError(f"{place}: the prompt is neither a string nor a list of messages with a role each")
    if not tokenizer.chat_template:
        raise UserError(f"data.chat_template: the tokenizer {tokenizer.name_or_path!r} has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja and transformers raise a dozen types for malformed messages
        raise UserError(
            f"{place}: the chat template refuses the messages: {' '.join(str(error).split())}"
        ) from error
