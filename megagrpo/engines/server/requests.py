"""The requests of one `generate()` to a server, and the groups that its answers make."""

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megagrpo.engines.base import EngineError, OnGroup
from megagrpo.engines.completions import Sample, build_completion
from megagrpo.engines.embedded.stopping import StopRule
from megagrpo.engines.request_checks import check_request, consecutive_runs
from megagrpo.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from megagrpo.engines.server.engine import RemoteEngine


def request_completions(
    engine: "RemoteEngine",
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    completion_indices: Sequence[int],
    on_group: OnGroup | None = None,
    is_aborted: Callable[[], bool] = lambda: False,
    name_request: Callable[[str], str] = str,
) -> list[list[Completion]]:
    """Do what `Engine.generate` says, whatever the engine's state.

    Args:
        is_aborted: asked again and again; from when it says so on, what is not finished ends as "abort".
        name_request: makes a request's id of a unique name.
    """
    check_request(prompts, sampling, completion_indices, engine.vocab_size, engine.context_tokens)
    stop_rule = StopRule(engine.tokenizer, engine.end_token_ids, sampling)
    runs = consecutive_runs(completion_indices, engine.config.max_batch_completions)
    requests = [
        (position, run, name_request(uuid.uuid4().hex)) for position in range(len(prompts)) for run in runs
    ]
    unsent = Sample([], [], "abort", ((0, engine.weight_version or 0),))
    groups: list[dict[int, Completion]] = [{} for _ in prompts]

    def on_answer(number: int, answer: Any) -> None:
        position, run, _ = requests[number]
        samples = [unsent] * len(run) if answer is None else engine.read_samples(answer)
        if len(samples) != len(run):
            raise EngineError(
                f"{engine.address}: prompt {prompts[position].id}: {len(samples)} completions came, "
                f"{len(run)} were asked for"
            )
        for index, sample in zip(run, samples, strict=True):
            groups[position][index] = build_completion(
                prompts[position], index, sample, stop_rule, engine.tokenizer
            )
        if on_group is not None and len(groups[position]) == len(completion_indices):
            on_group(position, [groups[position][index] for index in completion_indices])

    engine.prepare(prompts, len(completion_indices))
    engine.client.call_all(
        [
            engine.generate_call(request_id, prompts[position], sampling, run)
            for position, run, request_id in requests
        ],
        on_answer,
        # Twice what the server decodes at once: it is never short of requests, and an abort has few to end.
        max_pending=max(
            1, 2 * engine.config.max_batch_completions // max((len(run) for run in runs), default=1)
        ),
        is_aborted=is_aborted,
        abort_calls=engine.abort_calls({request_id: len(run) for _, run, request_id in requests}),
    )
    return [[group[index] for index in completion_indices] for group in groups]
