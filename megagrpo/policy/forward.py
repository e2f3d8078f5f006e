"""Runs micro-batches through the pipeline: hidden states of the loss rows, log-probs, and the schedule's
plumbing.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megagrpo.device.device import megatron_region
from megagrpo.models.stage import StageModel
from megagrpo.ops.logprobs import LinearLogprobs, linear_logprobs
from megagrpo.policy.batch import MicroBatch
from megagrpo.telemetry.activity import Counts, count_nothing

LossFunction = Callable[[MicroBatch, torch.Tensor], Any]


def loss_rows(model: StageModel, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the hidden states [R, H] that predict the micro-batch's completion tokens.

    Args:
        output: what the last stage returned: [1, T, H], or [1, T / tp, H] under sequence parallelism.
    """
    hidden = output.squeeze(0)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=model.groups.tp
        )
    return hidden.index_select(0, batch.row_index)


def row_logprobs(
    model: StageModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    compute_entropy: bool = False,
) -> LinearLogprobs:
    """Return log-probs [R] (and entropies) of `targets` [R] at the sampling temperature, from hidden
    states [R, H] of `loss_rows`.
    """
    return linear_logprobs(
        hidden,
        model.output_weight,
        targets,
        vocab_size=model.hf.vocab_size,
        temperature=temperature,
        group=model.groups.tp,
        compute_entropy=compute_entropy,
        # under sp the gather's backward reduce-scatters it
        reduce_hidden_grad=not model.config.sequence_parallel,
    )


def run_schedule(
    model: StageModel,
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    loss: LossFunction,
    forward_only: bool,
    counts: Counts = count_nothing,
) -> list[Any]:
    """Run Megatron's pipeline schedule. Collective over the model parallel ranks; every rank passes as many
    micro-batches.

    Args:
        model: the stage.
        chunks: the stage's chunks as they are run: bare, or wrapped for data parallelism.
        batches: this replica's micro-batches.
        loss: on the last stage, called with each micro-batch and its output. With `forward_only` its result
            is collected; otherwise it returns (summed loss, anything to collect).
        counts: told of each micro-batch that begins.

    Returns:
        What `loss` gave to collect, per micro-batch; an empty list on other stages.
    """
    begun = itertools.count(1)

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(iterator)
        counts("micro-batches", next(begun), len(batches) * len(chunks))
        output = chunk(batch.tokens, None, None, packed_seq_params=batch.packed)
        return output, partial(_on_output, batch)

    def _on_output(batch: MicroBatch, output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return loss(batch, output)
        total, collected = loss(batch, output)
        # the count is not used: every division is in the token weights
        return total, torch.zeros((), dtype=torch.int), collected

    with megatron_region(), torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=1,  # not used: lengths vary and are sent with the activations
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def compute_logprobs(
    model: StageModel,
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    temperature: float,
    counts: Counts = count_nothing,
) -> list[torch.Tensor]:
    """Return the log-probs [R] of each micro-batch, without gradients. Empty on stages other than the
    last.
    """

    def score(batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
        return row_logprobs(model, loss_rows(model, output, batch), batch.targets, temperature).logprobs

    return run_schedule(model, chunks, batches, score, forward_only=True, counts=counts)
