"""From a row to the token ids that the engine gets: the chat template, and what a tokenizer adds itself."""

from collections.abc import Mapping
from typing import Any

from megagrpo.config.model_folder import hf_folder_of
from megagrpo.config.rollout_sections import DataConfig
from megagrpo.config.training_sections import ModelConfig
from megagrpo.errors import UserError
from megagrpo.registry import suggestion
from megagrpo.rollout.time_limit import time_limit
from megagrpo.types import Prompt

TEMPLATE_SECONDS = 10.0  # for the messages of one row; a template takes less than a millisecond


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the run's tokenizer; whatever transformers raises for a broken folder becomes one line."""
    from transformers import AutoTokenizer  # seconds, which a dry run's other mistakes need not wait for

    folder = model.tokenizer or hf_folder_of(model.path)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # OSError, ValueError, KeyError, ... by what is broken
        raise UserError(
            f"model.tokenizer: {folder}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


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


class PromptTokeniser:
    """Turns the rows of one data set into prompts.

    A prompt begins with the tokenizer's begin token once at most, and never ends with its end token: the
    model would be asked to go on after the end. What the tokenizer adds by itself is taken out and counted;
    a row whose own text ends so is refused.

    Attributes:
        ends_removed: prompts whose end token, added by the tokenizer, was left out.
        begins_removed: prompts whose second begin token was left out.
    """

    def __init__(self, config: DataConfig, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self.ends_removed = self.begins_removed = 0

    def tokenise(self, place: str, index: int, row: Mapping[str, Any], source: str = "") -> Prompt:
        """Return the prompt of a row.

        Args:
            place: how messages name the row.
            index: of the row, which becomes the prompt's id.
            source: that the row is from, in a mixture; otherwise its column `source` says.
            row: its columns; all but the prompt's go with it.

        Raises:
            UserError: the row can't be used.
        """
        text = self._text_of(place, row)
        token_ids = self._token_ids(place, text)
        columns = {name: value for name, value in row.items() if name != self.config.prompt_field}
        told = columns.get("source")
        return Prompt(index, text, token_ids, columns, source or (told if isinstance(told, str) else ""))

    def notes(self) -> list[str]:
        """Return what was taken out of prompts, one line for each kind."""
        tokenizer, notes = self.tokenizer, []
        if self.ends_removed:
            notes.append(
                f"the tokenizer ends prompts with its end token {tokenizer.eos_token}, after which nothing "
                f"follows; it was left out of {self.ends_removed} prompts"
            )
        if self.begins_removed:
            notes.append(
                f"the text begins with {tokenizer.bos_token}, which the tokenizer adds too; one of the two "
                f"was left out of {self.begins_removed} prompts"
            )
        return notes

    def _text_of(self, place: str, row: Mapping[str, Any]) -> str:
        field = self.config.prompt_field
        if field not in row:
            columns = ", ".join(map(str, row)) or "none"
            near = suggestion(field, list(map(str, row)))
            raise UserError(f"{place}: no column {field!r} (data.prompt_field){near}; it has {columns}")
        content = row[field]
        if self.config.chat_template:
            return render_chat(place, self.tokenizer, content)
        if isinstance(content, str):
            return content
        hint = "; chat messages need data.chat_template=true" if isinstance(content, list) else ""
        raise UserError(f"{place}: column {field!r} is a {type(content).__name__}, not a string{hint}")

    def _token_ids(self, place: str, text: str) -> tuple[int, ...]:
        tokenizer, begin, end = self.tokenizer, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        adds = not self.config.chat_template  # a template writes the special tokens itself
        token_ids = tokenizer(text, add_special_tokens=adds)["input_ids"]
        if begin is not None and token_ids[:2] == [begin, begin]:
            token_ids = token_ids[1:]
            self.begins_removed += 1
        if adds and token_ids and token_ids[-1] == end:
            own = tokenizer(text, add_special_tokens=False)["input_ids"]
            if own[-1:] != [end] or token_ids[-2:] == [end, end]:
                token_ids = token_ids[:-1]
                self.ends_removed += 1
        if not token_ids:
            raise UserError(f"{place}: the prompt has no tokens")
        # some tokenizers begin and end texts with the same token, and a prompt may be that one alone
        if token_ids[-1] == end and token_ids != [begin]:
            raise UserError(
                f"{place}: the prompt ends with the end token {tokenizer.eos_token}, and a completion would "
                "begin after the end; "
                + (
                    "the chat template must open the assistant's turn (add_generation_prompt)"
                    if self.config.chat_template
                    else "take it out of the text"
                )
            )
        return tuple(token_ids)


def render_chat(place: str, tokenizer: Any, content: Any) -> str:
    """Return a prompt's text by the tokenizer's chat template: messages, or a string as the user's one.

    The assistant's turn is opened after them; where the last message is the assistant's, it is the beginning
    of that turn and is gone on with. A template is code that comes with a model: transformers renders it in
    jinja's sandbox, and its time is limited here.

    Raises:
        UserError: it is neither, there is no template, or the template refuses the messages or does not end.
    """
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(each, Mapping) and "role" in each for each in messages)
    ):
        raise UserError(f"{place}: the prompt is neither a string nor a list of messages with a role each")
    if not tokenizer.chat_template:
        raise UserError(f"data.chat_template: the tokenizer {tokenizer.name_or_path!r} has no chat template")
    is_begun = messages[-1]["role"] == "assistant"
    try:
        with time_limit(TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
            )
    except TimeoutError as error:
        raise UserError(f"{place}: the chat template {error} for the messages of one row") from error
    except Exception as error:  # jinja and transformers raise a dozen types for malformed messages
        raise UserError(
            f"{place}: the chat template refuses the messages: {' '.join(str(error).split())}"
        ) from error
