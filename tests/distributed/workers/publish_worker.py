"""Worker: what reaches every engine rank, from every trainer layout and by every transport, equals the HF
checkpoint's slices to the bit.

Arguments: folder with one HF model per sub-folder, scratch folder, then layouts such as tp2pp2sp. The engines
are stand-ins that read buckets with the module that engine processes read them with; what they must have
received is computed from the checkpoint file.
"""

import os
import re
import sys
import time
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from delta_publishes import DELTAS, check_delta  # noqa: E402
from probed_publishes import check_probe  # noqa: E402
from receiving_engine import BUCKET_BYTES, check_received, publish_in_vain, publisher_of  # noqa: E402
from reported_cases import reported_case  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.groups import build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.weights.plan.targets import EngineGrid  # noqa: E402
from megagrpo.weights.publisher import PublishError  # noqa: E402


def check_model(folder: Path, layout: str, groups, scratch: Path) -> None:
    hf = read_hf_config(folder)
    sp = groups.tp.size() > 1 and hf.num_experts is not None
    model = load_stage_model(
        str(folder),
        hf,
        build_transformer_config(hf, groups, build_precision("fp32"), sp),
        groups,
        DEVICE,
        use_te=False,
    )
    grids = [
        ("shared_memory", EngineGrid(2, 2, 1, "sharded")),
        ("group", EngineGrid(1, 4, 4 if hf.num_experts else 1, "sharded")),
    ]
    grids += [
        ("shared_memory", EngineGrid(1, 2, 1, "full")),
        ("disk", EngineGrid(3, 1, 1, "full")),
        ("group", EngineGrid(4, 1)),
        ("group", EngineGrid(2, 2)),
    ]
    for transport, grid in grids:
        for dtype in (torch.float32, torch.bfloat16) if transport == "shared_memory" else (torch.float32,):
            what = f"{folder.name} {layout} {transport} {grid} {dtype}"
            publisher = publisher_of(model, grid, transport, dtype, scratch)
            metrics = publisher.publish(1).metrics
            check_received(publisher, load_file(folder / "model.safetensors"), dtype, what)
            assert metrics["publish/kept_ratio"] == 1.0, what
            kept = (
                sum(target.numel for targets in publisher.transport.plan.targets for target in targets)
                * dtype.itemsize
            )
            padding = sum(
                placed.padding_rows * placed.target.numel // max(placed.target.shape[0], 1)
                for bucket in publisher.transport.context.layouts
                for placed in bucket.tensors
            )
            assert metrics["publish/written_bytes"] == (kept - padding * dtype.itemsize) * grid.replicas, what
            limit = max(
                2 * BUCKET_BYTES, publisher.transport.buckets_alive * publisher.transport.context.slot_bytes
            )
            assert metrics["publish/peak_bytes"] <= limit * (grid.tp if grid.layout == "sharded" else 1), what


def quantize_dense(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole weight as float8 and scales, by DeepGEMM's `per_block_cast_to_fp8` (deep_gemm/utils/math.py)
    with scales of any value.
    """
    rows, columns = tensor.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = tensor
    blocks = padded.view(-1, 128, padded.shape[1] // 128, 128)
    scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    quantized = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    return quantized.view_as(padded)[:rows, :columns].contiguous(), scales.view(
        blocks.shape[0], blocks.shape[2]
    )


def check_quantized(folder: Path, layout: str, groups, scratch: Path) -> None:
    """Engines receive the tensors of a blockwise float8 checkpoint, to the bit, wherever the blocks lie:
    here most span tp ranks.
    """
    hf = read_hf_config(folder)
    sp = groups.tp.size() > 1 and hf.num_experts is not None
    config = build_transformer_config(hf, groups, build_precision("fp32"), sp)
    model = load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False)
    expected = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if re.search(r"\.([qkvo]|gate|up|down)_proj\.weight$", name):
            expected[name], expected[f"{name}_scale_inv"] = quantize_dense(tensor)
        else:
            expected[name] = tensor.to(torch.bfloat16)
    for transport, grid in (
        ("shared_memory", EngineGrid(2, 2)),
        ("group", EngineGrid(2, 2)),
        ("disk", EngineGrid(3, 1)),
    ):
        publisher = publisher_of(model, grid, transport, torch.bfloat16, scratch, quantize=True)
        metrics = publisher.publish(1).metrics
        what = f"{folder.name} {layout} {transport} quantised"
        assert metrics["publish/kept_ratio"] == 1.0, what
        assert metrics["publish/written_bytes"] == grid.replicas * sum(
            tensor.nbytes for tensor in expected.values()
        ), what
        for received in publisher.engine.received if publisher.engine.is_owner else []:
            assert received.keys() == expected.keys(), f"{what}: {received.keys() ^ expected.keys()}"
            for name, tensor in expected.items():
                assert received[name].dtype == tensor.dtype, f"{what}: {name}"
                assert torch.equal(received[name].view(torch.uint8), tensor.view(torch.uint8)), (
                    f"{what}: {name}"
                )


def check_faults(folder: Path, groups, scratch: Path) -> None:
    """A failure at any rank ends the publish on all of them with one reason, and nothing is left behind."""
    hf = read_hf_config(folder)
    config = build_transformer_config(hf, groups, build_precision("fp32"), False)
    model = load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False)
    publisher = publisher_of(model, EngineGrid(2, 1, 1, "sharded"), "shared_memory", torch.float32, scratch)
    engine = publisher.engine

    def fails_with(pattern: str, version: int) -> None:
        engine.calls.clear()
        publish_in_vain(publisher, version, pattern)
        assert engine.calls[-1] == "abort", engine.calls
        dist.barrier()  # each rank removes its own files
        left = list(Path("/dev/shm").glob(f"megagrpo_{publisher.transport.context.token}*"))
        dist.barrier()  # before the next publish makes some
        assert not left

    for bucket in (1, 2):
        engine.fault = (bucket, "raises") if publisher.replica == 1 else None
        fails_with(r"rank 2: weight version \d+: the server went away", 10 + bucket)
        engine.fault = (bucket, "checksum") if publisher.replica == 1 else None
        fails_with(r"rank 2: .*engine rank 0: \S+: checksum 0badc0de, sent was [0-9a-f]{8}", 20 + bucket)
    engine.fault = None
    parameter = next(
        parameter for name, parameter in model.chunks[0].named_parameters() if "layernorm" in name
    )
    kept = parameter.detach().clone()
    if groups.rank == 3:
        parameter.data[0] = float("nan")
    fails_with(r"rank \d: .*norm.weight.*not finite", 31)
    parameter.data.copy_(kept)

    def disagree(version: int, replicas: list[int]) -> dict[str, float]:
        assert engine.calls[-1] == f"complete {version}", engine.calls  # asked before the version serves
        raise PublishError(f"weight version {version}: probe: replica 0")

    publisher.probe = disagree
    fails_with("weight version 32: probe: replica 0", 32)
    publisher.probe = None
    publisher.publish(40)
    assert engine.calls[-2:] == ["complete 40", "serve 40"]
    check_received(publisher, load_file(folder / "model.safetensors"), torch.float32, "after faults")
    engine.calls.clear()
    publisher.publish(41, replicas=[1])  # one that was started anew, while the other serves on
    assert bool(engine.calls) == (publisher.replica == 1)


def check_group(folder: Path, groups, scratch: Path) -> None:
    """A group stays while publishes go well; whatever fails ends in time, leaves no group, and the next
    publish makes another.
    """
    hf = read_hf_config(folder)
    config = build_transformer_config(hf, groups, build_precision("fp32"), False)
    model = load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False)
    publisher = publisher_of(
        model, EngineGrid(2, 1, 1, "sharded"), "group", torch.float32, scratch, timeout_seconds=3.0
    )
    engine, transport = publisher.engine, publisher.transport
    tensors = load_file(folder / "model.safetensors")

    def fails_with(pattern: str, version: int, repair=lambda: None) -> None:
        started = time.monotonic()
        publish_in_vain(publisher, version, pattern)
        assert time.monotonic() - started < 15
        engine.fault = None
        repair()
        engine.calls.clear()
        publisher.publish(version + 1)
        assert "join" in engine.calls or not engine.is_owner
        check_received(publisher, tensors, torch.float32, f"after {pattern}")

    for version in (1, 2):
        publisher.publish(version)
    assert engine.calls.count("join") == int(engine.is_owner)
    check_received(publisher, tensors, torch.float32, "second publish through a group")
    for number, fault in enumerate(("raises", "checksum")):
        engine.fault = (2, fault) if publisher.replica == 1 else None
        pattern = {
            "raises": r"rank 2: .*the server went away",
            "checksum": r"rank 2: .*checksum 0badc0de, "
            r"sent was",
        }[fault]
        fails_with(pattern, 10 + 10 * number)
    send, pack = transport._send, transport._pack
    if groups.rank == 3:
        transport._send = lambda bucket, slot: None
    fails_with(r"trainer rank 3 sent nothing: .*Timed out", 40, lambda: setattr(transport, "_send", send))
    if groups.rank == 1:  # what is sent is not what the checksums are of
        transport._pack = lambda transfers, reader: pack(transfers, reader) + 1
    fails_with(r"checksum [0-9a-f]{8}, the sender's is", 50, lambda: setattr(transport, "_pack", pack))
    if publisher.replica == 1:
        engine.transfer_group = None  # as after a restart
    engine.calls.clear()
    publisher.publish(60, replicas=[1])
    assert ("join" in engine.calls) == (engine.is_owner and publisher.replica == 1)
    check_received(publisher, tensors, torch.float32, "to a replica that was started anew")
    engine.calls.clear()
    publisher.publish(61)
    assert "join" not in engine.calls
    publisher.close()


def main() -> None:
    models, scratch, *layouts = sys.argv[1:]
    for layout in layouts:
        sizes = {name: int(size) for name, size in re.findall(r"(etp|ep|tp|cp|vpp|pp)(\d+)", layout)}
        groups = build_groups(ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes), timeout_seconds=120)
        for folder in [
            Path(models) / name for name in ("llama_tied_llama3_rope", "qwen2", "qwen3", "qwen3_moe")
        ]:
            if read_hf_config(folder).num_experts is None and {"ep", "etp"} & sizes.keys():
                continue
            with reported_case(f"{layout}:{folder.name}"):
                check_model(folder, layout, groups, Path(scratch))
            if folder.name in ("qwen2", "qwen3_moe"):
                with reported_case(f"{layout}:{folder.name} quantised"):
                    check_quantized(folder, layout, groups, Path(scratch))
            if folder.name in ("qwen2", "qwen3_moe") and "vpp" not in sizes:
                with reported_case(f"{layout}:{folder.name} probed"):
                    check_probe(folder, layout, groups, sizes)
        if layout == layouts[0]:
            with reported_case("faults are shared"):
                check_faults(Path(models) / "qwen3", groups, Path(scratch))
            with reported_case("a process group"):
                check_group(Path(models) / "qwen3", groups, Path(scratch))
            with reported_case("changes alone"):
                check_delta(Path(models) / "llama_tied_llama3_rope", groups, Path(scratch))
        if layout == layouts[-1]:
            with reported_case("changes alone, of experts"):
                check_delta(Path(models) / "qwen3_moe", groups, Path(scratch), DELTAS[1:5:2])
        destroy_groups()


if __name__ == "__main__":
    main()
