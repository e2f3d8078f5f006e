"""The model that is trained: forward, backward, and optimizer updates that are skipped on all ranks alike
when not finite.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megagrpo.config.training_sections import OptimizerConfig
from megagrpo.device.device import megatron_region
from megagrpo.device.megatron_fixes import prime_optimizer
from megagrpo.models.stage import StageModel
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.forward import LossFunction, compute_logprobs, run_schedule
from megagrpo.telemetry.activity import Counts, count_nothing


@dataclass(frozen=True)
class AppliedUpdate:
    """What became of one optimizer update."""

    grad_norm: float  # global 2-norm before clipping
    applied: bool

    @property
    def is_finite(self) -> bool:
        """Say whether the gradient was finite; an update whose gradient was not is never applied."""
        return math.isfinite(self.grad_norm)


class Actor:
    """A StageModel with gradients: Megatron's DDP around each chunk, one distributed optimizer."""

    def __init__(
        self,
        model: StageModel,
        optimizer: OptimizerConfig,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        counts: Counts = count_nothing,
        gradients_in_float32: bool = True,
    ):
        """Wrap the stage for training.

        Args:
            overlap_grad_reduce: reduce gradients bucket by bucket while the last micro-batch's backward runs.
            overlap_param_gather: gather updated weights while the next forward runs; see `gather_parameters`.
            counts: told of each micro-batch.
            gradients_in_float32: add gradients up and reduce them in float32; else in the type of the
                parameters.
        """
        self.model = model
        self.options, self.counts = optimizer, counts
        self.overlap_param_gather = overlap_param_gather
        # Sums only: `calculate_per_token_loss` turns DDP's averaging off, and the token count that Megatron
        # would divide by is
        # dropped here, since the token weights of the loss hold the one global denominator.
        model.config.finalize_model_grads_func = lambda modules, count, **groups: finalize_model_grads(
            modules, None, **groups
        )
        with megatron_region():
            ddp_config = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=gradients_in_float32,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
            )
            # As Megatron's own trainer does: later chunks are one bucket each, their reduction overlaps with
            # that of other chunks.
            self.chunks = [
                DistributedDataParallel(model.config, ddp_config, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(model.chunks)
            ]
            self.optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=optimizer.lr,
                    min_lr=0.0,
                    weight_decay=optimizer.weight_decay,
                    adam_beta1=optimizer.beta1,
                    adam_beta2=optimizer.beta2,
                    adam_eps=optimizer.eps,
                    clip_grad=optimizer.clip_grad,
                    use_distributed_optimizer=True,
                    bf16=model.config.bf16,
                    params_dtype=model.config.params_dtype,
                ),
                self.chunks,
            )
            prime_optimizer(self.optimizer)
        model.config.grad_scale_func = self.optimizer.scale_loss
        if overlap_grad_reduce:  # micro-batches before the last accumulate without reducing
            no_sync = [chunk.no_sync for chunk in self.chunks]
            model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def close(self) -> None:
        """Let go of models, gradients, optimizer and process groups, which nothing else could free.

        Each gradient accumulator holds a hook that holds the DDP wrapper, and from there the parameters, the
        optimizer and its views of the parameters lead back to the accumulator. That circle passes through
        C++, where Python's collector doesn't see it.
        """
        for chunk in self.chunks:
            chunk.grad_accs.clear()
            for parameter in chunk.parameters():
                vars(parameter).pop("main_param", None)
        config = self.model.config
        config.grad_scale_func = config.no_sync_func = config.finalize_model_grads_func = None

    @property
    def learning_rate(self) -> float:
        """Of the newest update."""
        return self.optimizer.param_groups[0]["lr"]

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[torch.Tensor]:
        """Return log-probs [R] per micro-batch, without gradients; empty on stages other than the last."""
        return compute_logprobs(self.model, self.chunks, batches, temperature, self.counts)

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Accumulate the gradients of the summed loss of `batches` and reduce them over data parallel ranks.

        Collective over all ranks. Returns what `loss` gave to collect per micro-batch; empty on stages other
        than the last.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return run_schedule(self.model, self.chunks, batches, loss, forward_only=False, counts=self.counts)

    def apply_gradients(self, lr: float, accepts: Callable[[float], bool] | None = None) -> AppliedUpdate:
        """Clip and step; a gradient that is not finite skips the update. The norm is global, so all ranks
        decide alike.

        Collective over all ranks.

        Args:
            lr: learning rate of this update.
            accepts: asked with the norm before clipping, where it is finite; False skips the update.
        """
        self._set_options(lr)
        with megatron_region():
            found_inf = self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            if found_inf or not math.isfinite(grad_norm):
                return AppliedUpdate(grad_norm if not found_inf else math.inf, applied=False)
            if accepts is not None and not accepts(grad_norm):
                return AppliedUpdate(grad_norm, applied=False)
            if self.options.clip_grad > 0:
                for chained in self.optimizer.chained_optimizers:
                    if parameters := chained.get_parameters():
                        clip_grad_by_total_norm_fp32(
                            parameters, max_norm=self.options.clip_grad, total_norm=grad_norm
                        )
            self.optimizer.step_with_ready_grads()
        return AppliedUpdate(grad_norm, applied=True)

    def _set_options(self, lr: float) -> None:
        """Give every parameter group the configured options.

        Megatron marks groups that are not decayed (biases and norm weights: all 1-D parameters) by `wd_mult`
        0, which nothing but its own scheduler reads. A checkpoint restores the options that it was saved
        with, which a resumed run may have changed.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
            group["betas"] = (self.options.beta1, self.options.beta2)
            group["eps"] = self.options.eps

    def gather_parameters(self) -> None:
        """Complete this rank's parameters after the last update of a step; whoever reads them outside a
        forward needs that.

        Collective over the ranks that hold the same parameters. With `overlap_param_gather` an update leaves
        the other ranks' parts stale until the next forward gathers them; weights that are published or saved
        before would be silently old.
        """
        if self.overlap_param_gather:
            with megatron_region():
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
