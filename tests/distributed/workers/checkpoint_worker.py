"""Worker: checkpoints of one tiny model in many layouts, as two ranks. Arguments: HF folder (dense),
folder for checkpoints.
"""

import errno
import sys
import threading
from pathlib import Path
from unittest import mock

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from reported_cases import reported_case  # noqa: E402

from megagrpo.checkpoint import manager as manager_module  # noqa: E402
from megagrpo.checkpoint import plan as plan_module  # noqa: E402
from megagrpo.checkpoint import writer as writer_module  # noqa: E402
from megagrpo.checkpoint.commit import Contents  # noqa: E402
from megagrpo.checkpoint.folder import Retention, list_complete  # noqa: E402
from megagrpo.checkpoint.manager import CheckpointManager, SaveError  # noqa: E402
from megagrpo.checkpoint.manifest import Manifest, read_manifest  # noqa: E402
from megagrpo.checkpoint.shards import ShardCollector, load_shards  # noqa: E402
from megagrpo.config.training_sections import OptimizerConfig  # noqa: E402
from megagrpo.device.device import megatron_region  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.groups import all_gather_metadata, build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.policy.actor import Actor  # noqa: E402

FOLDER, ROOT = Path(sys.argv[1]), Path(sys.argv[2])
LAYOUTS = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}


def build(layout, recipe):
    """An actor whose optimizer state is a function of the rank, so that a piece from the wrong rank shows."""
    groups = build_groups(ParallelLayout(2, **LAYOUTS[layout]), timeout_seconds=60)
    hf = read_hf_config(FOLDER)
    config = build_transformer_config(hf, groups, build_precision(recipe), sp=False)
    actor = Actor(load_stage_model(str(FOLDER), hf, config, groups, DEVICE, use_te=False), OptimizerConfig())
    return groups, actor


def states_of(actor):
    """Main parameters and moments of this rank's part, in order."""
    found = []
    for chained in actor.optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                found += [
                    parameter.detach(),
                    *(chained.optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")),
                ]
    return found


def fill(actor, seed):
    """Give weights and moments new values, equal on ranks that hold the same parameters where they are the
    same tensor.
    """
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for tensor in states_of(actor):
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    with megatron_region():
        for chained in actor.optimizer.chained_optimizers:
            chained._copy_main_params_to_model_params()
        for chunk in actor.chunks:
            chunk.start_param_sync(force_sync=True)
    for chunk in actor.model.chunks:  # replicated over tp: made equal, as training keeps them
        for parameter in chunk.parameters():
            if not getattr(parameter, "tensor_model_parallel", False) and actor.model.groups.tp.size() > 1:
                dist.broadcast(parameter.data, 0)


def halve(actor):
    """Change every value, alike on ranks that hold the same."""
    for tensor in states_of(actor):
        tensor.mul_(0.5)
    with megatron_region():
        for chained in actor.optimizer.chained_optimizers:
            chained._copy_main_params_to_model_params()
        for chunk in actor.chunks:
            chunk.start_param_sync(force_sync=True)


def refuse_to_plan(sharded):
    """The second save of a structure writes by the plan of the first."""
    raise AssertionError("planned again")


def weights_of(actor):
    return [parameter.detach() for chunk in actor.model.chunks for parameter in chunk.parameters()]


def new_manager(actor, name, asynchronous=True, keep_last=9):
    return CheckpointManager(ROOT / name, ShardCollector(actor), Retention(keep_last), asynchronous)


def contents(step):
    return Contents(Manifest(step, step, {}, {}, {}, {}, ()), {}, {f"carried/own.{dist.get_rank()}": b"mine"})


def copies(actor):
    return [tensor.clone() for tensor in (*weights_of(actor), *states_of(actor))]


def restore_is_exact(actor, path, before):
    fill(actor, 999)
    load_shards(path, actor)
    after = copies(actor)
    # Moments of parameters that both tp ranks hold are written by the first; the test filled them by rank.
    wrong = [number for number, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]
    return wrong


def check_values(layout, recipe):
    """What a background save holds is what was there when it began, whatever training does meanwhile."""
    groups, actor = build(layout, recipe)
    fill(actor, 7)
    synchronous = new_manager(actor, f"{layout}_{recipe}_sync", asynchronous=False)
    saved = synchronous.save(contents(1))
    load_shards(saved.path, actor)  # now equal on all ranks that hold the same, as a run's state is
    before = copies(actor)
    manager = new_manager(actor, f"{layout}_{recipe}")
    hold = threading.Event()
    write = writer_module.ShardWriter.write

    def held_back(self):
        hold.wait(30)
        write(self)

    with mock.patch.object(writer_module.ShardWriter, "write", held_back):
        assert manager.save(contents(1)) is None and manager.poll() is None
        fill(actor, 8)  # training goes on
        hold.set()
        saved = manager.finish()
    wrong = restore_is_exact(actor, saved.path, before)
    assert not wrong, f"{layout} {recipe}: tensors {wrong} differ"
    files = {record.name: record for record in read_manifest(saved.path).files}
    mine = sum(record.size for name, record in files.items() if name.startswith(f"__{groups.rank}_"))
    assert mine == 0 or manager.collector.staging.num_bytes <= mine, (
        layout,
        recipe,
        manager.collector.staging.num_bytes,
        mine,
    )
    assert {"carried/own.0", "carried/own.1", ".metadata", "metadata.json"} <= files.keys()
    total = sum(record.size for name, record in files.items() if name.startswith("__"))
    fair = total / 2
    # the embedding is a third of all
    assert mine <= 1.35 * fair, f"{layout} {recipe}: rank {groups.rank} wrote {mine} of {total} bytes"
    halve(actor)
    before = copies(actor)
    with mock.patch.object(plan_module, "_find", refuse_to_plan):
        manager.save(contents(2))
        saved = manager.finish()
    wrong = restore_is_exact(actor, saved.path, before)
    assert not wrong, f"{layout} {recipe}: tensors {wrong} of the second save differ"
    assert [path.name for path in list_complete(ROOT / f"{layout}_{recipe}")] == [
        "step_000001",
        "step_000002",
    ]
    destroy_groups()


def refused(action, *parts):
    """Every rank gets the same SaveError."""
    try:
        action()
    except SaveError as error:
        told = all_gather_metadata(str(error))
        assert len(set(told)) == 1 and all(part in told[0] for part in parts), told
        return
    raise AssertionError("not refused")


def check_failures():
    """Whatever fails, on whatever rank: all ranks hear of it, nothing is left over, and the checkpoint
    before stays.
    """
    groups, actor = build("dp2", "fp32")
    folder = ROOT / "failures"
    manager = new_manager(actor, "failures")
    manager.save(contents(1))
    manager.finish()
    kept = sorted(path.name for path in folder.iterdir())
    write_file = writer_module.write_file

    def full_disk(*arguments):
        if groups.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_file(*arguments)

    def save(step):
        manager.save(contents(step))
        manager.finish()

    with mock.patch.object(writer_module, "write_file", full_disk):
        refused(lambda: save(2), "rank 1", "No space left on device")
    first_only = lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system"))  # noqa: E731
    for place in ("commit.write_manifest", "commit.names.publish", "manager.names.remove_leftovers"):
        with mock.patch(f"megagrpo.checkpoint.{place}", first_only):
            refused(lambda: save(2), "Read-only file system")
    with mock.patch("torch.distributed.checkpoint.FileSystemWriter.finish", first_only):
        refused(lambda: save(2), "Read-only file system")
    usage = mock.Mock(free=1000)
    with mock.patch.object(manager_module.shutil, "disk_usage", lambda _: usage):
        refused(lambda: save(2), "the checkpoint needs", "are free")
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == kept == ["latest", "step_000001"]
    save(2)
    assert [path.name for path in list_complete(folder)] == ["step_000001", "step_000002"]
    dist.barrier()
    # One byte of a shard, on a rank that does not read that file: all ranks hear of it.
    if groups.rank == 0:
        shard = folder / "step_000002" / "__1_0.distcp"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    manifest, problems = manager.examine(folder / "step_000002")
    assert manifest is not None and len(problems) == 1 and "__1_0.distcp: checksum" in problems[0], problems
    assert manager.examine(folder / "step_000001")[1] == []
    destroy_groups()


def main():
    for layout, recipe in (*((layout, "fp32") for layout in LAYOUTS), ("dp2", "bf16"), ("tp2", "bf16")):
        with reported_case(f"{layout} {recipe}"):
            check_values(layout, recipe)
    with reported_case("failures"):
        check_failures()


if __name__ == "__main__":
    main()
