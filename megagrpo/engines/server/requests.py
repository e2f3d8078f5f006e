"""The requests of one `generate()` to a server, and the groups that its answers make."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from megagrpo.engines.base import EngineError, OnGroup
from megagrpo.engines.completion_rules import StopRule, check_request, consecutive_runs
from megagrpo.engines.lifecycle import EngineLifecycle
from megagrpo.engines.server.answers import Asked, Sample, SampleError, check_samples
from megagrpo.engines.server.build_completion import build_completion
from megagrpo.engines.server.engine_server import EngineServer
from megagrpo.engines.server.http_client import NO_ANSWER, Call
from megagrpo.engines.server.protocol import ServerProtocol
from megagrpo.types import Completion, Prompt, SamplingParams

_ANSWER_BYTES = 2**20  # bytes of an answer beside its tokens


class CompletionRequests:
    """Asks a server for completions, whatever the engine's state.

    Args:
        lifecycle: tells the newest version that a completion can be of.
        version: of the weights that serve, or are to be verified.
        name_request: turns a unique name into a request's id.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        server: EngineServer,
        lifecycle: EngineLifecycle,
        version: int,
        name_request: Callable[[str], str] = str,
    ):
        self._protocol, self._server, self._model = protocol, server, protocol.model
        self._lifecycle, self._version, self._name_request = lifecycle, version, name_request

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        completion_indices: Sequence[int],
        on_group: OnGroup | None = None,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """Do what `Engine.generate` says.

        Args:
            is_aborted: polled; once it returns true, unfinished completions end as "abort".
        """
        model, config = self._model, self._model.config
        check_request(prompts, sampling, completion_indices, model.vocab_size, model.context_tokens)
        stop_rule = StopRule(model.tokenizer, set(model.end_token_ids), sampling)
        runs = consecutive_runs(completion_indices, config.max_batch_completions)
        requests = [
            (prompt, position, run, self._name_request(uuid.uuid4().hex))
            for position, prompt in enumerate(prompts)
            for run in runs
        ]
        groups: list[dict[int, Completion]] = [{} for _ in prompts]

        def on_answer(number: int, answer: Any) -> None:
            prompt, position, run, _ = requests[number]
            samples = self._read(answer, prompt, run, sampling)
            for index, sample in zip(run, samples, strict=True):
                groups[position][index] = build_completion(
                    prompt, index, sample, self._version, stop_rule, model.tokenizer
                )
            if on_group is not None and len(groups[position]) == len(completion_indices):
                on_group(position, [groups[position][index] for index in completion_indices])

        self._protocol.prepare(prompts, len(completion_indices), is_aborted)
        self._server.call_all(
            [self._call(request_id, prompt, sampling, run) for prompt, _, run, request_id in requests],
            on_answer,
            # Twice what the server decodes at once: it is never short of requests, and an abort has few to
            # end.
            max_pending=max(
                1, 2 * config.max_batch_completions // max((len(run) for run in runs), default=1)
            ),
            is_aborted=is_aborted,
            abort_calls=self._protocol.abort_calls(
                {request_id: len(run) for _, _, run, request_id in requests}
            ),
        )
        return [[group[index] for index in completion_indices] for group in groups]

    def _call(self, request_id: str, prompt: Prompt, sampling: SamplingParams, run: range) -> Call:
        path, body = self._protocol.generate_call(request_id, prompt, sampling, run)
        num_tokens = len(run) * (len(prompt.token_ids) + sampling.max_new_tokens)
        return Call(path, body, _ANSWER_BYTES + num_tokens * self._protocol.token_bytes(), _name(prompt, run))

    def _read(self, answer: Any, prompt: Prompt, run: range, sampling: SamplingParams) -> list[Sample]:
        """Return the completions `run` of an answer, checked."""
        if answer is NO_ANSWER:
            return [Sample([], [], "abort", ())] * len(run)
        where = f"{self._server.address}: {_name(prompt, run)}"
        asked = Asked(len(run), sampling.max_new_tokens, self._model.vocab_size)
        try:
            samples = self._protocol.read_samples(answer)
            check_samples(samples, asked, self._lifecycle.newest_version)
        except SampleError as error:
            name = f"prompt {prompt.id}: completion {run[error.place]}"
            raise EngineError(f"{self._server.address}: {name}: {error.problem}") from None
        except EngineError as error:
            raise EngineError(f"{where}: {error}") from None
        return samples


def _name(prompt: Prompt, run: range) -> str:
    indices = str(run.start) if len(run) == 1 else f"{run.start} to {run.stop - 1}"
    return f"prompt {prompt.id}: completion {indices}"
