"""Worker: each silent fault of Megatron-core gives wrong numbers with our fix taken away, and right ones with it.

Arguments: model folder, file with the reference's result (see invariance_worker).
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import invariance_worker as invariance
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import mappings

from megagrpo.device.device import megatron_region
from megagrpo.models import build
from megagrpo.models.build import build_transformer_config
from megagrpo.parallel.groups import build_groups, destroy_groups
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.actor import Actor


def batched_p2p(layout, num_layers):
    return build_pipeline_fields(layout, num_layers) | {"overlap_p2p_comm": False, "batch_p2p_comm": True}


build_pipeline_fields = build.pipeline_fields
nothing = lambda *args: None  # noqa: E731
averaging = lambda *args, **options: build_transformer_config(*args, **options, calculate_per_token_loss=False)  # noqa: E731
# Equal micro-batches: of unequal ones mixed-up shapes would raise. Case, what takes the fix away, what is then wrong
REMOVED = {
    "interleaving on two stages with batched p2p is refused": (
        "pp2vpp2:equal",
        {"models.build.pipeline_fields": batched_p2p},
        "mixes directions",
    ),
    "interleaving on two stages with batched p2p": (
        "pp2vpp2:equal",
        {"models.build.pipeline_fields": batched_p2p, "models.build.check_pipeline_flags": nothing},
        "loss",
    ),
    "no tensor parallel marks": ("tp2:tiny", {"models.build.mark_split_parameters": nothing}, "norm"),
    "Megatron's own division": ("cp2:tiny", {"": averaging}, "brings a factor of"),
    "weights read before they were gathered": ("dp2overlap:tiny", {"policy.actor.Actor.gather_parameters": nothing}, "weights"),
}


def check_removed(folder: Path, expected: dict) -> None:
    """Run the invariance check with a fix taken away: it must fail, at the place where the fault shows."""
    for name, (layout, patches, fault) in REMOVED.items():
        with ExitStack() as stack:
            for target, replacement in patches.items():
                target = f"megagrpo.{target}" if target else "invariance_worker.build_transformer_config"
                stack.enter_context(mock.patch(target, replacement))
            try:
                invariance.check(folder, expected, *layout.split(":"))
            except (AssertionError, RuntimeError) as error:
                assert fault in str(error), f"{name}: failed with {error}"
            else:
                raise AssertionError(f"{name}: the numbers did not change")
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
    """After loading, one update moves every parameter's step from 1 to 2; with one shared tensor it moves by the number of parameters."""
    groups = build_groups(ParallelLayout(2), timeout_seconds=120)
    hf = invariance.read_hf_config(folder)
    config = build_transformer_config(hf, groups, invariance.build_precision("fp32"), False)
    actor = Actor(
        build.load_stage_model(str(folder), hf, config, groups, invariance.DEVICE, use_te=False),
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
    with mock.patch.object(DistributedOptimizer, "load_state_dict", DistributedOptimizer.load_state_dict.__wrapped__):
        assert max(steps_after_a_load()) > 2.0, "the fault is gone: this Megatron needs the fix no more"
    destroy_groups()


def main() -> None:
    folder, expected = Path(sys.argv[1]), torch.load(sys.argv[2])
    check_lost_all_reduce()
    check_shared_step(folder)
    check_removed(folder, expected)
    assert not dist.is_initialized()
    print("TRAPS SHOWN")


if __name__ == "__main__":
    main()
