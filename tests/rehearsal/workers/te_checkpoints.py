"""Checkpoints that the layers of one spec write and those of the other read, with the optimizer."""

import tempfile
from pathlib import Path

import te.install

te.install.install()
import torch  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy  # noqa: E402
from rehearse import case, run_cases  # noqa: E402
from small_models import BF16, DENSE, FP32, MOE, Rehearsed, on  # noqa: E402

from megagrpo.checkpoint.shards import ShardCollector, load_shards  # noqa: E402
from megagrpo.models.precision import FP8_RECIPES, Precision  # noqa: E402

DELAYED = Precision(torch.bfloat16, *FP8_RECIPES["fp8_delayed"])


def _tensors(it: Rehearsed) -> dict[str, torch.Tensor]:
    """Every parameter and optimizer tensor by its canonical name."""
    found = {}
    for chained in it.actor.optimizer.chained_optimizers:
        for name, *_, parameter in it.actor.model.named_rules():
            if parameter in chained.model_param_group_index_map:
                states = chained._get_main_param_and_optimizer_states(parameter)
                found |= {f"{name} {key}": value.clone() for key, value in states.items() if value.ndim}
    found |= {name: parameter.detach().clone() for name, *_, parameter in it.actor.model.named_rules()}
    return found


def _cross(model, precision, written_with: bool, read_with: bool, read_as: Precision | None = None):
    folder = Path(tempfile.mkdtemp())

    def write(it: Rehearsed) -> dict[str, torch.Tensor]:
        it.update()
        state = ShardCollector(it.actor).collect()
        dist_checkpointing.save(state, str(folder), get_default_save_sharded_strategy())
        return _tensors(it)

    def read(it: Rehearsed) -> dict[str, torch.Tensor]:
        load_shards(folder, it.actor)
        loaded = _tensors(it)
        it.update()
        return loaded

    wrote = on(write, model, precision, written_with, alignment=16)
    loaded = on(read, model, read_as or precision, read_with, alignment=16)
    assert wrote.keys() == loaded.keys(), wrote.keys() ^ loaded.keys()
    different = [name for name, tensor in wrote.items() if not torch.equal(tensor, loaded[name])]
    return {"tensors": len(wrote), "different": different}


@case
def dense_te_to_local():
    return _cross(DENSE, BF16, True, False)


@case
def dense_local_to_te():
    return _cross(DENSE, BF16, False, True)


@case
def moe_te_to_local():
    return _cross(MOE, FP32, True, False)


@case
def moe_local_to_te():
    return _cross(MOE, FP32, False, True)


@case
def te_to_te():
    return _cross(DENSE, BF16, True, True)


@case
def fp8_to_fp8():
    return _cross(DENSE, DELAYED, True, True)


@case
def fp8_to_bf16_local():
    return _cross(DENSE, DELAYED, True, False, BF16)


@case
def bf16_local_to_fp8():
    return _cross(DENSE, BF16, False, True, DELAYED)


@case
def fp8_history_is_kept():
    """Delayed scaling's largest values after a resume, and before."""
    folder = Path(tempfile.mkdtemp())

    def history(it: Rehearsed) -> list[float]:
        linear = it.actor.model.chunks[0].decoder.layers[0].self_attention.linear_qkv
        return [float(scale) for scale in linear.fp8_meta["scaling_fwd"].scale]

    def write(it: Rehearsed) -> list[float]:
        it.update()
        state = ShardCollector(it.actor).collect()
        dist_checkpointing.save(state, str(folder), get_default_save_sharded_strategy())
        return history(it)

    def read(it: Rehearsed) -> list[float]:
        load_shards(folder, it.actor)
        return history(it)

    return [on(write, DENSE, DELAYED, True, alignment=16), on(read, DENSE, DELAYED, True, alignment=16)]


if __name__ == "__main__":
    run_cases()
