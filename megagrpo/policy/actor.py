"""The model that is trained: forward, backward, and optimizer updates that are skipped on all ranks alike when not finite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megagrpo.config.schema import OptimizerConfig
from megagrpo.device.device import megatron_region
from megagrpo.device.megatron_fixes import prime_torch_adamw
from megagrpo.models.build import StageModel
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.forward import LossFunction, compute_logprobs, run_schedule


@dataclass(frozen=True)
class AppliedUpdate:
    """What became of one optimizer update."""

    grad_norm: float  # global 2-norm before clipping; not finite where the update was skipped
    applied: bool


class Actor:
    """A StageModel with gradients: Megatron's DDP and distributed optimizer around it."""

    def __init__(self, model: StageModel, optimizer: OptimizerConfig):
        self.model = model
        self.clip_grad = optimizer.clip_grad
        # Sums only: `calculate_per_token_loss` turns DDP's averaging off, and the token count that Megatron would divide by is
        # dropped here, since the token weights of the loss hold the one global denominator.
        model.config.finalize_model_grads_func = lambda modules, count, **groups: finalize_model_grads(modules, None, **groups)
        with megatron_region():
            self.module = DistributedDataParallel(
                model.config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model.module
            )
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
                [self.module],
            )
            prime_torch_adamw(self.optimizer)
        model.config.grad_scale_func = self.optimizer.scale_loss

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[torch.Tensor]:
        """Return log-probs [R] per micro-batch, without gradients; empty on stages other than the last."""
        return compute_logprobs(self.model, self.module, batches, temperature)

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Accumulate the gradients of the summed loss of `batches` and reduce them over data parallel ranks.

        Collective over all ranks. Returns what `loss` gave to collect per micro-batch; empty on stages other than the last.
        """
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        return run_schedule(self.model, self.module, batches, loss, forward_only=False)

    def apply_gradients(self, lr: float) -> AppliedUpdate:
        """Clip and step; a gradient that is not finite skips the update. The norm is global, so all ranks decide alike.

        Collective over all ranks.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with megatron_region():
            found_inf = self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            if found_inf or not math.isfinite(grad_norm):
                return AppliedUpdate(grad_norm if not found_inf else math.inf, applied=False)
            if self.clip_grad > 0:
                for chained in self.optimizer.chained_optimizers:
                    if parameters := chained.get_parameters():
                        clip_grad_by_total_norm_fp32(parameters, max_norm=self.clip_grad, total_norm=grad_norm)
            self.optimizer.step_with_ready_grads()
        return AppliedUpdate(grad_norm, applied=True)
