"""Corrections of Megatron-core, each with the upstream fault it works around. They hold on every device.

Each is silent without the fix (wrong numbers, no exception) or breaks a run without Transformer Engine and
Apex. `tests/distributed` has a case for each that fails without it.
"""

import functools
import queue
from typing import Any

import torch
import torch.distributed as dist

_applied = False


def apply() -> None:
    """Apply all fixes. Does nothing the second time; called by `device.setup` once megatron.core can be
    imported.
    """
    global _applied
    if _applied:
        return
    _applied = True
    _fix_lost_all_reduce()
    _fix_torch_adamw_state()
    _fix_router_without_te()
    _fix_latent_attention_without_te()
    _fix_recompute_without_te()
    _fix_checkpoint_writers_that_die()


def _fix_latent_attention_without_te() -> None:
    """Megatron's latent attention (0.16.1) takes Transformer Engine for installed where its own wrappers can
    be imported, and asks `isinstance` with what stands for their classes: TypeError.
    """
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _fix_recompute_without_te() -> None:
    """`CheckpointWithoutOutput` (0.16.1, of recompute `layernorm`) asks Transformer Engine for its FP8 state
    unless it is built with fp8=None, and its default is False: NameError where that is not installed.
    """
    from megatron.core.tensor_parallel import random

    if random.HAVE_TE:
        return
    original = random.CheckpointWithoutOutput.__init__

    def initialise(self: Any, fp8: Any = None) -> None:
        original(self, fp8=None)

    random.CheckpointWithoutOutput.__init__ = initialise


def _fix_checkpoint_writers_that_die() -> None:
    """The checkpoint writer (0.16.1) forks a process per file and waits without a time-out until each has
    reported.

    A writer that dies before it reports (a missing psutil is enough: it is used outside the writer's own try)
    leaves the rank waiting for ever, without a word. Saves are synchronous here, so each rank writes its
    files itself and an error is an error; later versions write in threads. The queue of the results need then
    not be a manager process either, whose start costs seconds in the first save.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    if not hasattr(writer, "write_preloaded_data_multiproc"):
        return

    def write_in_this_process(
        transforms: list, use_msc: bool, rank: int, write_buckets: list, global_results_queue: Any
    ) -> None:
        results: dict[int, Any] = {}
        for index, bucket in enumerate(write_buckets):
            reported, counted = queue.Queue(), queue.Queue()
            counted.put(index)
            writer.write_preloaded_data(
                transforms, index, bucket, reported, counted, use_fsync=True, use_msc=use_msc
            )
            _, outcome = reported.get_nowait()
            if isinstance(outcome, Exception):
                global_results_queue.put(outcome)
                return
            results[index] = outcome
        global_results_queue.put(results)

    writer.write_preloaded_data_multiproc = staticmethod(write_in_this_process)
    filesystem_async._results_queue = queue.Queue()


def _fix_lost_all_reduce() -> None:
    """`mappings._reduce` (0.16.1) reduces `x.contiguous()` and returns `x`: the sum is lost for a
    non-contiguous gradient.
    """
    import megatron.core.tensor_parallel.mappings as mappings

    @functools.wraps(mappings._reduce)
    def reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if group.size() == 1:
            return tensor
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
        return tensor

    mappings._reduce = reduce


def _fix_torch_adamw_state() -> None:
    """DistributedOptimizer with torch's AdamW (no Transformer Engine, no Apex): loading shares ONE `step`
    tensor among all parameters.

    The step then grows by the number of parameters at each update and bias correction is wrong after a
    resume. And the `step` is missing from what `_set_main_param_and_optimizer_states` is given, which raises
    KeyError.
    """
    import megatron.core.optimizer.distrib_optimizer as module

    optimizer_class = module.DistributedOptimizer
    original_set = optimizer_class._set_main_param_and_optimizer_states
    original_load = optimizer_class.load_state_dict

    @functools.wraps(original_set)
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict) -> None:
        group_index, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original_set(self, model_param, tensors)

    @functools.wraps(original_load)
    def load_state_dict(self: Any, state_dict: dict) -> None:
        result = original_load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    optimizer_class._set_main_param_and_optimizer_states = set_states
    optimizer_class.load_state_dict = load_state_dict


def _fix_router_without_te() -> None:
    """`moe_utils.RouterGatingLinearFunction` (0.16.1) tests a name that its failed import of Transformer
    Engine never bound: NameError.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def prime_optimizer(optimizer: Any) -> None:
    """Give a never-stepped optimizer its zero state: checkpoints collect it before the first update too.

    torch's AdamW, Transformer Engine's and Apex's FusedAdam all make their state in the first `step`.

    Args:
        optimizer: Megatron's, a chained one or not.
    """
    for inner in (chained.optimizer for chained in getattr(optimizer, "chained_optimizers", [optimizer])):
        for param in (param for group in inner.param_groups for param in group["params"]):
            if not inner.state[param]:
                _prime_parameter(inner, param)


def _prime_parameter(inner: Any, param: torch.nn.Parameter) -> None:
    if hasattr(inner, "initialize_state"):  # Transformer Engine: knows the types of its moments
        inner.initialize_state(param, False)
        return
    inner.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
    if isinstance(inner, torch.optim.AdamW | torch.optim.Adam):  # a FusedAdam counts steps by group
        inner.state[param]["step"] = torch.tensor(0.0)


def check_pipeline_flags(config: Any) -> None:
    """Assert that the interleaved schedule on two stages does not batch p2p: both directions pair up wrongly
    and gradients are garbage.

    With two stages the previous and the next rank are the same one, and a batch sends both directions over
    one group: what was meant as an activation is received as a gradient (p2p_communication._batched_p2p_ops).
    Unbatched, one direction goes over another group.

    Args:
        config: TransformerConfig.
    """
    two_interleaved = (
        config.virtual_pipeline_model_parallel_size is not None and config.pipeline_model_parallel_size == 2
    )
    assert not (two_interleaved and config.batch_p2p_comm), (
        "vpp on two stages needs batch_p2p_comm=False: batched p2p mixes directions up"
    )
