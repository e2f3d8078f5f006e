"""A user's own reward: a function named by `FILE.py:function` or `package.module:function`."""

import inspect
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megagrpo.errors import UserError
from megagrpo.registry import load_callable
from megagrpo.rewards.messages import Score
from megagrpo.rewards.returned import read_scores
from megagrpo.rewards.signature import GIVEN, read_signature
from megagrpo.rewards.texts import CompletionText, PromptText
from megagrpo.types import Completion, Prompt

if TYPE_CHECKING:
    import asyncio


class CustomReward:
    """A user's function, called with all completions of one prompt."""

    def __init__(self, spec: str, options: Mapping[str, Any]):
        """Load the function and check its parameters.

        Args:
            spec: its name in the configuration.
            options: keyword arguments of every call.

        Raises:
            UserError: it can't be loaded, or not be called as the contract says.
        """
        self._spec, self._options = spec, dict(options)
        self._function = load_callable(spec)
        self._form = read_signature(spec, self._function, options)
        # one event loop for all calls, so that a client of a judge keeps its connections
        self._runner: asyncio.Runner | None = None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise UserError where a parameter is neither an option nor a column."""
        for name in self._form.required:
            if name not in GIVEN and name not in columns:
                raise UserError(
                    f"reward {self._spec!r}: its parameter {name!r} is neither an option nor a column; the "
                    f"columns: {', '.join(columns) or 'none'}"
                )

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        """Return one score per completion.

        Args:
            prompts: the prompt, once per completion.
            completions: its completions.

        Raises:
            UserError: the function raised, or returned something else than the contract allows. The message
                names the function, the prompt and the line.
            TimeoutError, ConnectionError, MemoryError: the function raised it; counted, the run goes on.
        """
        place = f"reward {self._spec!r}, prompt {prompts[0].id}"
        arguments = self._arguments(prompts, completions)
        try:
            returned = self._function(**arguments, **self._options)
            if inspect.isawaitable(returned):
                returned = self._await(returned)
        except (TimeoutError, ConnectionError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            # user code may raise anything; all of it becomes one line that names where
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{place}: raised {reason} ({frame.filename}, line {frame.lineno}: {frame.line})"
            ) from error
        return read_scores(place, returned, [completion.index for completion in completions])

    def _arguments(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> dict[str, Any]:
        texts = [CompletionText(completion) for completion in completions]
        given = {
            "prompts": [PromptText(prompt) for prompt in prompts],
            "completions": texts,
            "completion_ids": [list(text.token_ids) for text in texts],
        }
        known = prompts[0].columns
        self.check_columns(known)
        columns = {
            name: [prompt.columns[name] for prompt in prompts] for name in known if name not in self._options
        }
        return self._form.arguments(given, columns)

    def _await(self, awaitable: Any) -> Any:
        import asyncio  # a tenth of a second, for those who use it

        async def wait() -> Any:
            return await awaitable

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(wait())
