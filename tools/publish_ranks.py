"""The ranks of `bench_publish.py`: publishes a model again and again, by each method, and prints one JSON row
a method on rank 0.

Started by torchrun: publish_ranks.py MODEL TP PP ENGINE REPEATS PYTHON.
"""

import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch  # noqa: E402

from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.groups import all_gather_metadata, build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.weights.export import WeightExporter  # noqa: E402
from megagrpo.weights.from_config import build_transport  # noqa: E402
from megagrpo.weights.plan.targets import EngineGrid  # noqa: E402
from megagrpo.weights.publisher import agree  # noqa: E402
from megagrpo.weights.remote_publisher import RemotePublisher  # noqa: E402
from megagrpo.weights.transports.disk import lay_out_safetensors  # noqa: E402
from megagrpo.wire.bucket_manifest import (  # noqa: E402
    BucketManifest,
    TensorEntry,
    build_ack,
    checksum_of,
    open_tensors,
)
from megagrpo.wire.transfer_group import GroupAddress, TransferGroup  # noqa: E402

BUCKET_BYTES = 64 * 2**20
TIMEOUT_SECONDS = 300.0


def serve_buckets(connection) -> None:
    """The receiving process of `--engine stub`: verifies buckets and copies them into tensors of its own,
    as an engine's worker does.
    """
    torch.set_num_threads(1)
    parameters: dict[str, torch.Tensor] = {}
    group = None
    while (message := connection.recv()) is not None:
        if isinstance(message, GroupAddress):
            group = TransferGroup(message, message.rank_offset)
            connection.send("joined")
            continue
        manifest = BucketManifest.from_json(message)
        memory = group.receive(manifest) if manifest.transport == "group" else None
        for name, tensor in open_tensors(manifest, memory=memory):
            parameters.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        connection.send(build_ack(manifest))


class StubEngine:
    """A process that receives buckets, in place of an engine."""

    engine_ranks, dtype, weight_version, transfer_group = 1, torch.float32, None, None
    address = "http://127.0.0.1:0"

    def __init__(self, is_owner: bool):
        self.is_owner = is_owner
        if is_owner:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve_buckets, args=(theirs,), daemon=True)
            self.process.start()

    def begin_update(self, version: int) -> None:
        """Do nothing."""

    def join_group(self, address: GroupAddress) -> None:
        """Have the process join."""
        self._ask(address)
        self.transfer_group = address.group_name

    def receive(self, manifest: BucketManifest) -> list[dict]:
        """Send the manifest over and wait for the acknowledgement."""
        return [self._ask(manifest.to_json())] if self.is_owner else []

    def _ask(self, message: GroupAddress | str) -> object:
        self.connection.send(message)
        if not self.connection.poll(TIMEOUT_SECONDS):
            raise TimeoutError("the receiving process does not answer")
        return self.connection.recv()

    complete_update = serve_update = commit_update = begin_update

    def abort_update(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the process."""
        if self.is_owner:
            self.connection.send(None)
            self.process.join(30)


def start_engine(name: str, model: str, python: str, groups):
    """Return this rank's engine: one replica, owned by rank 0."""
    if name == "stub":
        return StubEngine(groups.rank == 0)
    from megagrpo.config.engine_sections import build_engine_config
    from megagrpo.engines import ENGINES

    config = build_engine_config(name=name, server={"python": python or None, "max_model_len": 256})

    def build(**options):
        return ENGINES.get(name)(
            model, config, device=DEVICE, dtype=torch.float32, load_weights=False, **options
        )

    engine = build() if groups.rank == 0 else None
    address = all_gather_metadata(engine.address if engine else None)[0]
    return engine or build(address=address, is_owner=False)


def by_files(exporter: WeightExporter, engine, version: int, folder: Path) -> dict[str, float]:
    """Gather full tensors on every rank, save a safetensors file, have the engine read it: what is
    compared with.
    """
    started = time.perf_counter()
    tensors = {
        name: tensor.to("cpu", copy=True) if engine.is_owner else None for name, tensor in exporter.tensors()
    }
    gathered = time.perf_counter()
    stats = exporter.stats
    path, saved, load_seconds = folder / "full.safetensors", gathered, 0.0
    if engine.is_owner:
        header, entries = lay_out_safetensors(
            [TensorEntry(n, "float32", tuple(t.shape), 0, t.nbytes, "") for n, t in tensors.items()]
        )
        with open(path, "wb") as file:
            file.write(header)
            for tensor in tensors.values():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        saved = time.perf_counter()
        # Our engines ask for checksums: they are made outside the times of a method that has none.
        entries = tuple(replace(entry, checksum=checksum_of(tensors[entry.name])) for entry in entries)
        load_started = time.perf_counter()
        engine.begin_update(version)
        engine.receive(BucketManifest(version, "disk", {"path": str(path)}, "full", entries))
        engine.commit_update(version)
        load_seconds = time.perf_counter() - load_started
    moved = stats.gathered_bytes + stats.broadcast_bytes + (path.stat().st_size if engine.is_owner else 0)
    peak = (path.stat().st_size if engine.is_owner else 0) + sum(
        t.nbytes for t in tensors.values() if t is not None
    )
    rows = agree(lambda: (gathered - started, saved - gathered, load_seconds, moved, peak), "numbers")
    if not engine.is_owner:  # as a follower: it knows what is served
        engine.begin_update(version)
        engine.abort_update()
    path.unlink(missing_ok=True)
    return {
        "gather_seconds": max(row[0] for row in rows),
        "transfer_seconds": max(row[1] for row in rows),
        "load_seconds": max(row[2] for row in rows),
        "total_seconds": sum(max(row[k] for row in rows) for k in range(3)),
        "moved_bytes": sum(row[3] for row in rows),
        "peak_extra_bytes": max(row[4] for row in rows),
    }


def by_slices(publisher: RemotePublisher, version: int) -> dict[str, float]:
    """Publish our way; nothing is gathered, the conversion is part of the copy."""
    started = time.perf_counter()
    metrics = publisher.publish(version).metrics
    total = max(agree(lambda: time.perf_counter() - started, "numbers"))
    return {
        "gather_seconds": 0.0,
        "transfer_seconds": metrics["publish/write_seconds"],
        "load_seconds": metrics["publish/load_seconds"],
        "total_seconds": total,
        "moved_bytes": metrics["publish/written_bytes"],
        "peak_extra_bytes": metrics["publish/peak_bytes"],
    }


def main() -> None:
    """Measure every method."""
    folder, tp, pp, engine_name, repeats, python = sys.argv[1:]
    groups = build_groups(
        ParallelLayout(int(os.environ["WORLD_SIZE"]), tp=int(tp), pp=int(pp)), timeout_seconds=900
    )
    hf = read_hf_config(folder)
    config = build_transformer_config(hf, groups, build_precision("fp32"), sp=False)
    model = load_stage_model(folder, hf, config, groups, DEVICE, use_te=False)
    engine = start_engine(engine_name, folder, python, groups)
    exporter = WeightExporter(model)
    version = 0
    try:
        for method in ("slices, sharded", "slices, full", "group, sharded", "gather and safetensors"):
            started = time.perf_counter()
            if method == "gather and safetensors":
                publish = lambda number: by_files(exporter, engine, number, Path("/dev/shm"))  # noqa: E731
            else:
                way, layout = method.split(", ")
                kind = "group" if way == "group" else "shared_memory"
                transport = build_transport(
                    kind,
                    model,
                    EngineGrid(1, 1, 1, layout),
                    [0],
                    torch.float32,
                    BUCKET_BYTES,
                    TIMEOUT_SECONDS,
                )
                publisher = RemotePublisher(exporter, engine, 0, transport)
                publish = lambda number, publisher=publisher: by_slices(publisher, number)  # noqa: E731
            plan_seconds = time.perf_counter() - started
            rows = []
            for _ in range(int(repeats) + 1):  # the first one is not counted
                version += 1
                rows.append(publish(version))
            row = {
                "model": Path(folder).name,
                "trainer": f"tp {tp} pp {pp}",
                "engine": engine_name,
                "method": method,
            }
            row |= {"plan_seconds": plan_seconds} | {
                name: median(r[name] for r in rows[1:]) for name in rows[0]
            }
            row["gigabytes_per_second"] = hf_bytes(exporter) / row["total_seconds"] / 1e9
            if groups.rank == 0:
                print("ROW " + json.dumps(row), flush=True)
    finally:
        engine.close()
    destroy_groups()


def hf_bytes(exporter: WeightExporter) -> int:
    """Bytes of the model's full tensors."""
    return sum(tensor.nbytes for _, tensor in exporter.tensors())


if __name__ == "__main__":
    main()
