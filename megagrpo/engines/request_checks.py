"""What every engine checks before it generates, and the seeds of engines that draw by themselves."""

from collections.abc import Sequence

from megagrpo.engines.base import EngineError
from megagrpo.errors import UserError
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.counter_sampling import row_keys

_SEED_BITS = 62  # servers take signed 64-bit seeds; the sum with a completion index must stay one


def check_request(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    completion_indices: Sequence[int],
    vocab_size: int,
    context_tokens: int,
) -> None:
    """Refuse what no engine could generate; see Engine.generate.

    Args:
        vocab_size: the model's token ids are 0 to this, exclusive. A server may die of an id beyond it.
        context_tokens: prompt and completion together.
    """
    if sampling.max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {sampling.max_new_tokens} is not at least 1")
    if len(set(completion_indices)) != len(completion_indices):
        raise EngineError(f"completion_indices {list(completion_indices)} are not distinct")
    for prompt in prompts:
        total = len(prompt.token_ids) + sampling.max_new_tokens
        if total > context_tokens:
            raise UserError(
                f"prompt {prompt.id}: {len(prompt.token_ids)} tokens + {sampling.max_new_tokens} new tokens "
                f"= {total}, "
                f"the model's context is {context_tokens}"
            )
        if not prompt.token_ids:
            raise UserError(f"prompt {prompt.id}: has no tokens")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
            raise UserError(
                f"prompt {prompt.id}: token ids must lie in 0 to {vocab_size - 1}, the model's vocabulary"
            )


def prompt_seed(sampling: SamplingParams, prompt: Prompt) -> int:
    """Return the seed of a prompt's completions in this step, below 2**62: completion i draws from this + i.

    Two prompts' seeds are nearer than their number of completions with a probability of about 2**-50 only.
    """
    return int(row_keys(sampling.seed, sampling.step, [prompt.id], [0])[0]) >> (64 - _SEED_BITS)


def consecutive_runs(completion_indices: Sequence[int], longest: int) -> list[range]:
    """Split indices into runs of at most `longest` consecutive ones, in order: a server draws each run's
    completions in one request.
    """
    runs: list[range] = []
    for index in completion_indices:
        if runs and index == runs[-1].stop and len(runs[-1]) < longest:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
