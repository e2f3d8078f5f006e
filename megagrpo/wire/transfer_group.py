"""A process group of trainer ranks and an engine's ranks, through which the weights of a bucket come slice by
slice.

This file runs on both sides: it imports torch and the standard library, nothing of ours but the manifest. A
group stands beside whatever groups its processes have (torch's default group is not touched): it has a store
of its own, which a trainer rank holds at a free port, and a backend object made directly. The trainer ranks
that send come first in it, the engine's ranks after them.

Nothing waits longer than the time that the store's holder wrote into it. A group in which a wait has failed
is broken: both sides leave it, and a new one is made for the next publish.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import distributed as dist

from megagrpo.wire.bucket_manifest import BucketError, BucketManifest, TensorEntry

NAME_PREFIX = "megagrpo_"  # tells our groups from those that an engine has beside them
_STORE_SECONDS = 60.0  # to reach the store, before the time-out that it holds is known
_TIMEOUT_KEY = "timeout_seconds"


@dataclass(frozen=True)
class GroupAddress:
    """What a process must know to join. The fields are those of vLLM's and SGLang's own requests."""

    group_name: str
    backend: str  # gloo, nccl
    master_address: str
    master_port: int
    rank_offset: int  # the first engine rank's in the group: the number of trainer ranks
    world_size: int


def hold_store(address: str, timeout_seconds: float, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Open a store that listens on `address` alone; return it with its port. It lives as long as the
    object.

    Args:
        address: of this machine.
        timeout_seconds: that a request may take.
        port: 0 takes a free one.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    with socket.create_server((address, port), family=_family_of(address), backlog=4096) as listener:
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=timeout_seconds)
        handle = listener.detach()
        store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=handle
        )
    store.set(_TIMEOUT_KEY, str(timeout_seconds))
    return store, port


def own_address_towards(host: str) -> str:
    """Return this machine's address on the way to `host`; for a loopback address that one. No packet is
    sent.
    """
    family, kind, _, _, peer = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)
        return probe.getsockname()[0]


def _family_of(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]


class TransferGroup:
    """This process's membership."""

    def __init__(
        self,
        address: GroupAddress,
        rank: int,
        device: torch.device | str = "cpu",
        store: dist.TCPStore | None = None,
    ):
        """Join as `rank` of the group. Collective over its processes.

        Args:
            device: where what is received is put.
            store: by its holder; None: it is reached at the address.

        Raises:
            RuntimeError (of torch): not all have joined in time.
            BucketError: trainer and engine have different versions of NCCL, which would not connect.
        """
        self.address, self.rank, self.device = address, rank, torch.device(device)
        joined = store or dist.TCPStore(
            address.master_address,
            address.master_port,
            is_master=False,
            timeout=timedelta(seconds=_STORE_SECONDS),
        )
        self._store: dist.TCPStore | None = joined
        self.timeout_seconds = float(joined.get(_TIMEOUT_KEY))
        joined.set_timeout(timedelta(seconds=self.timeout_seconds))
        _compare_libraries(joined, address, rank)
        self._all = self._build("all", rank, address.world_size)
        engine_ranks = address.world_size - address.rank_offset
        self._engine = (
            self._build("engine", self.engine_rank, engine_ranks)
            if engine_ranks > 1 and self.engine_rank >= 0
            else None
        )

    @property
    def engine_rank(self) -> int:
        """This process's rank of the engine; negative in the trainer."""
        return self.rank - self.address.rank_offset

    def send(self, message: torch.Tensor, engine_rank: int) -> None:
        """Send bytes to a rank of the engine, and wait until it has them. Raises RuntimeError (of torch)
        when that takes too long.
        """
        self._all.send([message], self.address.rank_offset + engine_rank, 0).wait(
            timedelta(seconds=self.timeout_seconds)
        )

    def receive(self, manifest: BucketManifest) -> torch.Tensor:
        """Receive the slices of this engine rank's part of a bucket; return its memory, uint8 [bytes].

        Under `sharded` all of it comes from the trainer. Under `full` the first engine rank receives, and the
        others have it from there: a tensor crosses from trainer to engine once.

        Raises:
            BucketError: the bucket belongs to another group, a message did not come in time (the trainer's
                rank is named), or a piece lies outside its tensor.
        """
        if manifest.location.get("group") != self.address.group_name:
            raise BucketError(
                f"bucket of group {manifest.location.get('group')}: this engine rank has "
                f"joined {self.address.group_name}"
            )
        entries = manifest.entries_for(self.engine_rank)
        memory = torch.zeros(
            max((entry.offset + entry.nbytes for entry in entries), default=0),
            dtype=torch.uint8,
            device=self.device,
        )
        messages = manifest.location["messages"]
        if manifest.layout == "sharded" or self.engine_rank == 0:
            self._receive_messages(
                manifest, messages[self.engine_rank if manifest.layout == "sharded" else 0], memory
            )
        if manifest.layout == "full" and self._engine is not None:
            options = dist.BroadcastOptions()
            # the first one may have waited as long
            options.rootRank, options.timeout = 0, timedelta(seconds=2 * self.timeout_seconds)
            with _naming(f"bucket of version {manifest.version}: engine rank 0 passed nothing on"):
                self._engine.broadcast([memory], options).wait(options.timeout)
        return memory

    def _receive_messages(
        self, manifest: BucketManifest, messages: list[dict[str, Any]], memory: torch.Tensor
    ) -> None:
        arriving = []
        for message in messages:
            pieces = [(manifest.tensors[number], place) for number, place in message["pieces"]]
            nbytes = sum(_piece_bytes(entry, place) for entry, place in pieces)
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            what = (
                f"bucket of version {manifest.version}: trainer rank {message['trainer_rank']} sent nothing"
            )
            with _naming(what):
                arriving.append((what, pieces, buffer, self._all.recv([buffer], message["sender"], 0)))
        while arriving:
            what, pieces, buffer, work = arriving.pop(0)
            with _naming(what):
                work.wait(timedelta(seconds=self.timeout_seconds))
            position = 0
            for entry, place in pieces:
                nbytes = _piece_bytes(entry, place)
                _lay_out(entry, place, buffer[position : position + nbytes], memory)
                position += nbytes

    def _build(self, name: str, rank: int, size: int) -> Any:
        timeout = timedelta(seconds=self.timeout_seconds)
        assert self._store is not None, "the group was left"
        store = dist.PrefixStore(name, self._store)
        if self.address.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 10 * timeout  # NCCL's watchdog would end the process; the waits end before
            return dist.ProcessGroupNCCL(store, rank, size, options)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._timeout = timeout
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=own_address_towards(self.address.master_address))
        ]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def leave(self) -> None:
        """End the connections; others that wait for this process see an error."""
        if self.address.backend == "nccl":
            for backend in filter(None, (self._all, self._engine)):
                backend.abort()
        self._all = self._engine = self._store = None


def _library_version(backend: str) -> str:
    """Return the version that all members of a group must share; gloo has none."""
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""


def _compare_libraries(store: dist.Store, address: GroupAddress, rank: int) -> None:
    """Compare the versions before anything connects: NCCL itself would end with an error that names neither
    side, or wait. Collective over the group's processes.
    """
    store.set(f"library/{rank}", _library_version(address.backend))
    versions = [store.get(f"library/{member}").decode() for member in range(address.world_size)]
    if len(set(versions)) > 1:
        sides = {"trainer": versions[: address.rank_offset], "engine": versions[address.rank_offset :]}
        told = "; ".join(f"{side}: {', '.join(sorted(set(side_has)))}" for side, side_has in sides.items())
        raise BucketError(
            f"weights.transport.kind: group: NCCL must be of one version ({told}): install one torch in both "
            "environments, or take ipc, shared_memory or disk"
        )


def _piece_bytes(entry: TensorEntry, place: list[list[int]]) -> int:
    return prod(stop - start for start, stop in place) * entry.torch_dtype.itemsize


def _lay_out(entry: TensorEntry, place: list[list[int]], piece: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy a piece, uint8 [bytes], to its place in its tensor's memory."""
    flat = memory[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype)
    # where only changes are sent, the place is a stretch of their blocks
    tensor = flat.view(entry.shape) if entry.patches is None else flat
    if len(place) != tensor.dim() or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(place, tensor.shape, strict=True)
    ):
        raise BucketError(
            f"weight {entry.name!r}: a piece at {place} of a tensor of shape {list(entry.shape)}"
        )
    target = tensor[tuple(slice(start, stop) for start, stop in place)]
    target.copy_(piece.view(entry.torch_dtype).view(target.shape))


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say what torch could not do, in one line."""
    try:
        yield
    except RuntimeError as error:
        raise BucketError(f"{what}: {' '.join(str(error).split())[:300]}") from None
