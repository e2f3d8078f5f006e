"""The embedded engine: one HF model per rank, in the rank's own process, with a decode loop of ours."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.modeling_utils import AttentionInterface

from megagrpo.config.engine_sections import EngineConfig
from megagrpo.engines.base import EmbeddedEngine, EngineError, EngineHealth, OnGroup
from megagrpo.engines.completion_rules import StopRule, check_request
from megagrpo.engines.embedded.decoding import DecodedRow, Decoder, RowRequest
from megagrpo.engines.embedded.fused_projections import fuse_query_key_value
from megagrpo.engines.embedded.in_place_weights import InPlaceWeights
from megagrpo.engines.embedded.kv_cache import RolloutCache
from megagrpo.engines.hf_model import build_model, end_token_ids, load_from_folder
from megagrpo.engines.lifecycle import Action, EngineLifecycle
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.stacked_experts import stacked_rules
from megagrpo.types import Completion, Prompt, SamplingParams

_ATTENTION = "megagrpo_rollout"


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    rollout_cache: RolloutCache,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers' AttentionInterface calls: states [1, heads, T, D] -> ([1,
    T, heads, D], None).
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise EngineError(f"layer {module.layer_idx}: attention with {name} is not supported")
    return rollout_cache.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(_ATTENTION, _attention)


class TransformersEngine(EmbeddedEngine):
    """A full replica of the model, decoded with shared prompts, a growing KV cache and counter-based
    sampling.

    Weights are overwritten in place, so nothing is generated while an update is open, and no update begins
    while something is generated (see Engine).
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: EngineConfig,
        tokenizer: Any = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        load_weights: bool = False,
    ):
        """Build the model of `model_folder` (an HF folder).

        Args:
            config: `max_batch_completions` and `max_prefill_tokens` bound the decode batch and the prefill.
            tokenizer: the folder's own if None; decodes completions and searches stop strings.
            load_weights: take the folder's weights as version 0; otherwise the engine is empty until the
                first commit.

        Raises:
            UserError: the folder can't be read, or the model's attention is not plain causal attention.
        """
        stacked = stacked_rules(read_hf_config(model_folder))
        self._config = config
        self._device = torch.device(device)
        self._tokenizer = (
            tokenizer if tokenizer is not None else load_from_folder(AutoTokenizer, model_folder)
        )
        self._model = build_model(model_folder, _ATTENTION, dtype, load_weights).to(self._device)
        fuse_query_key_value(self._model)
        self._end_token_ids = end_token_ids(model_folder, self._model.config, self._tokenizer)
        self._lifecycle = EngineLifecycle(updates_in_place=True)
        self._weights = InPlaceWeights(self._model, stacked, self._lifecycle)
        if load_weights:
            self._lifecycle.serve_from_start()
        self._aborted = False

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.version

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        completion_indices: Sequence[int],
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        with self._lifecycle.generating():
            return self._generate(prompts, sampling, completion_indices, on_group)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        completion_indices: Sequence[int],
        on_group: OnGroup | None,
    ) -> list[list[Completion]]:
        config = self._model.config
        check_request(
            prompts, sampling, completion_indices, config.vocab_size, config.max_position_embeddings
        )
        self._aborted = False
        stop_rule = StopRule(self._tokenizer, self._end_token_ids, sampling)
        decoder = Decoder(
            self._forward,
            sampling,
            stop_rule,
            self._config.max_batch_completions,
            self._config.max_prefill_tokens,
        )
        requests = _requests(prompts, completion_indices, self._config.max_batch_completions)
        group_size, version = len(completion_indices), self._lifecycle.version
        groups: list[list[Any]] = [[None] * group_size for _ in prompts]
        missing = [group_size] * len(prompts)

        def on_row(row: DecodedRow) -> None:
            group, place = divmod(row.order, group_size)
            groups[group][place] = Completion.sampled(
                prompt_id=prompts[group].id,
                index=completion_indices[place],
                token_ids=row.token_ids,
                logprobs=row.logprobs,
                finish_reason=row.finish_reason,
                weight_versions=((0, version),),
                text=self._tokenizer.decode(
                    row.token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
                ),
            )
            missing[group] -= 1
            if on_group is not None and missing[group] == 0:
                on_group(group, groups[group])

        decoder.run(requests, self._device, lambda: self._aborted, on_row)
        return groups

    def begin_update(self, version: int) -> None:
        self._weights.begin(version)

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights.load(named_tensors)

    def commit_update(self, version: int) -> None:
        self._weights.commit(version)

    def abort_update(self) -> None:
        self._lifecycle.abort()

    def sleep(self) -> None:
        self._lifecycle.sleep()
        self._move("cpu")

    def wake(self) -> None:
        self._lifecycle.require(Action.WAKE)
        self._move(self._device)
        fuse_query_key_value(self._model)
        self._lifecycle.wake()

    def abort(self) -> None:
        self._aborted = True

    def health(self) -> EngineHealth:
        return self._lifecycle.health()

    def close(self) -> None:
        if self._lifecycle.close():
            self._model = None
            self._weights.bind(torch.nn.Module())

    def _move(self, device: torch.device | str) -> None:
        self._model.to(device)
        self._weights.bind(self._model)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        cache: RolloutCache,
    ) -> torch.Tensor:
        """The model over packed tokens; see decoding.Forward."""
        return self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,  # the rollout cache takes the place of transformers' own
            logits_to_keep=0 if wanted is None else wanted,
            rollout_cache=cache,
        ).logits[0]


def _requests(
    prompts: Sequence[Prompt], completion_indices: Sequence[int], max_rows: int
) -> list[RowRequest]:
    """One request per prompt; one that asks for more completions than fit at once is split (and prefilled
    once per part).
    """
    requests = []
    for group, prompt in enumerate(prompts):
        for start in range(0, len(completion_indices), max_rows):
            part = range(start, min(start + max_rows, len(completion_indices)))
            order = tuple(group * len(completion_indices) + place for place in part)
            requests.append(RowRequest(prompt, tuple(completion_indices[place] for place in part), order))
    return requests
