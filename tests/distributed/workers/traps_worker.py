"""Worker: each silent fault of Megatron-core gives wrong numbers with our fix taken away, and right ones with
it.

Arguments: model folder, file with the reference's result (see invariance_worker); the same two for a mixture
    of experts.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import invariance_worker as invariance
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from reported_cases import reported_case

from megagrpo.device.device import megatron_region
from megagrpo.models import stage, transformer_config
from megagrpo.models.load_stage import load_stage_model
from megagrpo.models.transformer_config import build_transformer_config
from megagrpo.parallel.groups import build_groups, destroy_groups
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.actor import Actor


def batched_p2p(layout, num_layers):
    return build_pipeline_fields(layout, num_layers) | {"overlap_p2p_comm": False, "batch_p2p_comm": True}


def mark_all_alike(model):
    """Mark what is split, but leave it to Megatron to tell experts from other parameters."""
    mark_split_parameters(model)
    for *_, parameter in model.named_rules():
        parameter.allreduce = True


@contextmanager
def unbound_name() -> Iterator[None]:
    value = moe_utils.te_general_gemm
    del moe_utils.te_general_gemm
    try:
        yield
    finally:
        moe_utils.te_general_gemm = value


build_pipeline_fields = transformer_config.pipeline_fields
mark_split_parameters = stage.mark_split_parameters
nothing = lambda *args: None  # noqa: E731


def averaging(*args, **options):
    return build_transformer_config(*args, **options, calculate_per_token_loss=False)


# Equal micro-batches: of unequal ones mixed-up shapes would raise. Case, what takes the fix away, what is
# then wrong
REMOVED = {
    "interleaving on two stages with batched p2p is refused": (
        "pp2vpp2:equal",
        {"megagrpo.models.transformer_config.pipeline_fields": batched_p2p},
        "mixes directions",
    ),
    "interleaving on two stages with batched p2p": (
        "pp2vpp2:equal",
        {
            "megagrpo.models.transformer_config.pipeline_fields": batched_p2p,
            "megagrpo.models.transformer_config.check_pipeline_flags": nothing,
        },
        "loss",
    ),
    "no tensor parallel marks": (
        "tp2:tiny",
        {"megagrpo.models.stage.mark_split_parameters": nothing},
        "norm",
    ),
    "Megatron's own division": (
        "cp2:tiny",
        {"invariance_worker.build_transformer_config": averaging},
        "brings a factor of",
    ),
    "weights read before they were gathered": (
        "dp2overlap:tiny",
        {"megagrpo.policy.actor.Actor.gather_parameters": nothing},
        "weights",
    ),
}


MOE = "megatron.core.transformer.moe"
MOVE_SPLITS = "maybe_move_tensor_to_cpu"
MAPPINGS = "megatron.core.tensor_parallel.mappings"
REMOVED_FROM_EXPERTS = {
    "experts summed over the group of the other parameters": (
        "tp2spetp1:packed",
        {"megagrpo.models.stage.mark_split_parameters": mark_all_alike},
        "norm",
    ),
    "split sizes as a tensor": (
        "ep2:packed",
        {f"{MOE}.token_dispatcher.{MOVE_SPLITS}": getattr(token_dispatcher, MOVE_SPLITS).__wrapped__},
        "all_to_all_single",
    ),
    "unequal parts gathered as equal ones": (
        "etp2:packed",
        {f"{MAPPINGS}._gather_along_first_dim": mappings._gather_along_first_dim.__wrapped__},
        "invalid tensor size",
    ),
}


def check_removed(removed: dict, folder: Path, expected: dict) -> None:
    """Run the invariance check with a fix taken away: it must fail, at the place where the fault shows."""
    for name, (layout, patches, fault) in removed.items():
        with reported_case(name), ExitStack() as stack:
            for target, replacement in patches.items():
                stack.enter_context(mock.patch(target, replacement))
            try:
                invariance.check(folder, expected, *layout.split(":"))
            except (AssertionError, RuntimeError, NameError, TypeError) as error:
                assert fault in str(error), f"{name}: failed with {error}"
            else:
                raise AssertionError(f"{name}: the numbers did not change")
        destroy_groups()


def check_unbound_name(folder: Path, expected: dict) -> None:
    """The router's product names Transformer Engine's function also where its import failed."""
    with unbound_name():
        try:
            invariance.check(folder, expected, "dp2", "packed")
        except NameError as error:
            assert "te_general_gemm" in str(error)
        else:
            raise AssertionError("the fault is gone: this Megatron needs the fix no more")
    destroy_groups()


def check_lost_all_reduce() -> None:
    """`_reduce` of a non-contiguous gradient: the sum over both ranks, not the rank's own part."""
    groups = build_groups(ParallelLayout(2, tp=2), timeout_seconds=120)
    upstream = torch.arange(6.0).reshape(2, 3).t() * (groups.tp_rank + 1)  # a transpose: not contiguous

    def gradient() -> torch.Tensor:
        leaf = torch.zeros(3, 2, requires_grad=True)
        mappings.copy_to_tensor_model_parallel_region(leaf, group=groups.tp).backward(upstream)
        return leaf.grad

    whole = torch.arange(6.0).reshape(2, 3).t() * 3
    assert torch.equal(gradient(), whole)
    with mock.patch.object(mappings, "_reduce", mappings._reduce.__wrapped__):
        assert not torch.equal(gradient(), whole), "the fault is gone: this Megatron needs the fix no more"
    destroy_groups()


def check_shared_step(folder: Path) -> None:
    """After loading, one update moves every parameter's step from 1 to 2; with one shared tensor it moves
    by the number of parameters.
    """
    groups = build_groups(ParallelLayout(2), timeout_seconds=120)
    hf = invariance.read_hf_config(folder)
    config = build_transformer_config(hf, groups, invariance.build_precision("fp32"), False)
    actor = Actor(
        load_stage_model(str(folder), hf, config, groups, invariance.DEVICE, use_te=False),
        invariance.make_config(folder, "none").optimizer,
    )

    def steps_after_a_load() -> set[float]:
        inner = actor.optimizer.chained_optimizers[0]
        for state in inner.optimizer.state.values():
            state["step"] = torch.tensor(1.0)
        inner.load_state_dict(inner.state_dict())
        with megatron_region():
            inner.optimizer.step()
        return {float(state["step"]) for state in inner.optimizer.state.values()}

    for group in actor.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    assert steps_after_a_load() == {2.0}
    with mock.patch.object(
        DistributedOptimizer, "load_state_dict", DistributedOptimizer.load_state_dict.__wrapped__
    ):
        assert max(steps_after_a_load()) > 2.0, "the fault is gone: this Megatron needs the fix no more"
    destroy_groups()


def main() -> None:
    folder, expected, moe_folder, moe_expected = (
        Path(sys.argv[1]),
        torch.load(sys.argv[2]),
        Path(sys.argv[3]),
        torch.load(sys.argv[4]),
    )
    with reported_case("a lost all-reduce"):
        check_lost_all_reduce()
    with reported_case("a shared step"):
        check_shared_step(folder)
    check_removed(REMOVED, folder, expected)
    check_removed(REMOVED_FROM_EXPERTS, moe_folder, moe_expected)
    with reported_case("an unbound name"):
        check_unbound_name(moe_folder, moe_expected)
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
