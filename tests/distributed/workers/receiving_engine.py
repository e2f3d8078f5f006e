"""A stand-in for an engine that is a server, the publisher to it, and what must have reached it. Imported
after the device is set up.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import distributed as dist

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import check_acks
from megagrpo.models.stage import StageModel
from megagrpo.weights.export import WeightExporter
from megagrpo.weights.from_config import build_transport
from megagrpo.weights.plan.targets import EngineGrid
from megagrpo.weights.publisher import PublishError
from megagrpo.weights.remote_publisher import RemotePublisher
from megagrpo.weights.selection.base import Everything
from megagrpo.weights.selection.changed_weights import Changes
from megagrpo.wire.bucket_manifest import build_ack, open_tensors
from megagrpo.wire.held_version import HeldVersion
from megagrpo.wire.transfer_group import TransferGroup

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit" / "weights"))

from labelled_models import kept_by

BUCKET_BYTES = 60_000  # several buckets, some with a parameter larger than this


class ReceivingEngine:
    """Reads buckets as an engine's ranks do, keeps copies and acknowledges; can be told to misbehave at a
    bucket.
    """

    address = "http://127.0.0.1:0"  # of no server: the engine's ranks are threads of this process

    def __init__(self, is_owner: bool, engine_ranks: int):
        self.is_owner, self.engine_ranks = is_owner, engine_ranks
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(engine_ranks)]
        self.calls: list[str] = []
        self.fault: tuple[int, str] | None = None
        self.weight_version: int | None = None
        self.transfer_group: str | None = None
        self.members: list[TransferGroup] = []
        self.held = [HeldVersion() for _ in range(engine_ranks)]

    def join_group(self, address) -> None:
        self.calls.append("join")
        self.transfer_group = None
        for member in self.members:
            member.leave()
        self.members = self._on_all_ranks(lambda rank: TransferGroup(address, address.rank_offset + rank))
        self.transfer_group = address.group_name

    def _on_all_ranks(self, step) -> list:
        with ThreadPoolExecutor(self.engine_ranks) as ranks:
            return list(ranks.map(step, range(self.engine_ranks)))

    def begin_update(self, version: int) -> None:
        self.calls.append(f"begin {version}")
        self.weight_version = None
        self.buckets = 0

    def receive(self, manifest) -> list[dict]:
        if not self.is_owner:
            return []
        self.buckets += 1
        fault = self.fault[1] if self.fault and self.fault[0] == self.buckets else None
        if fault == "raises":
            raise EngineError("the server went away")
        memories = [None] * self.engine_ranks
        if manifest.transport == "group":
            memories = self._on_all_ranks(lambda rank: self.members[rank].receive(manifest))
        for rank, tensors in enumerate(self.received):
            self.held[rank].check(manifest)
            for name, tensor in open_tensors(manifest, rank, dict(tensors), memories[rank]):
                tensors[name] = tensor.clone()
            self.held[rank].begin(manifest.version)
        acks = [build_ack(manifest, rank) for rank in range(self.engine_ranks)]
        if fault == "checksum":
            name = next(iter(acks[0]["tensors"]))
            acks[0]["tensors"][name] = "0badc0de"
        check_acks(manifest, acks, self.engine_ranks)
        return acks

    def complete_update(self, version: int) -> None:
        self.calls.append(f"complete {version}")
        for held in self.held:
            held.commit(version)

    def serve_update(self, version: int) -> None:
        self.calls.append(f"serve {version}")
        self.weight_version = version

    def abort_update(self) -> None:
        self.calls.append("abort")


def owner_of(replica: int, world: int, replicas: int) -> int:
    return -(-replica * world // replicas)


def publisher_of(
    model: StageModel,
    grid: EngineGrid,
    transport: str,
    dtype: torch.dtype,
    folder: Path,
    delta: bool = False,
    quantize: bool = False,
    timeout_seconds: float = 60.0,
) -> RemotePublisher:
    groups = model.groups
    owners = [owner_of(replica, groups.world_size, grid.replicas) for replica in range(grid.replicas)]
    replica = groups.rank * grid.replicas // groups.world_size
    built = build_transport(
        transport, model, grid, owners, dtype, BUCKET_BYTES, timeout_seconds, folder, quantize
    )
    engine = ReceivingEngine(owners[replica] == groups.rank, grid.tp)
    selection = Changes if delta else Everything
    return RemotePublisher(WeightExporter(model), engine, replica, built, selection)


def check_received(
    publisher: RemotePublisher,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    what: str,
    bits: bool = False,
) -> None:
    """Compare all tensors of this rank's engine, if it owns one, with what is cut from full tensors;
    `bits`: -0.0 is not 0.0.
    """
    grid, engine, hf = publisher.transport.plan.grid, publisher.engine, publisher.exporter.model.hf
    if not engine.is_owner:
        return
    checkpoint = {name: tensor.to(dtype).float().numpy() for name, tensor in tensors.items()}
    for rank, received in enumerate(engine.received):
        expected = checkpoint if grid.layout == "full" else kept_by(hf, checkpoint, grid.tp, grid.ep, rank)
        assert received.keys() == expected.keys(), f"{what}: {received.keys() ^ expected.keys()}"
        for name, array in expected.items():
            array = torch.from_numpy(array)
            if grid.layout == "sharded" and ("embed_tokens" in name or "lm_head" in name):
                # the reference marks padding with -2; engines hold zeros there
                array = torch.where(array == -2, 0, array)
            assert received[name].dtype == dtype and torch.equal(received[name].float(), array), (
                f"{what}: {name} of engine rank {rank}"
            )
            if bits:
                assert torch.equal(torch.signbit(received[name]), torch.signbit(array)), (
                    f"{what}: {name} of engine rank {rank}"
                )


def publish_in_vain(publisher: RemotePublisher, version: int, pattern: str) -> None:
    """Publish, and require that it fails on this rank as `pattern` says, with the version not served."""
    try:
        publisher.publish(version)
    except PublishError as error:
        assert re.search(pattern, str(error)), f"{pattern} not in: {error}"
    else:
        raise AssertionError(f"{pattern}: nothing was raised on rank {dist.get_rank()}")
    assert f"serve {version}" not in publisher.engine.calls, publisher.engine.calls
