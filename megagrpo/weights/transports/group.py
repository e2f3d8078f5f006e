"""Slices go from the trainer ranks that hold them straight to the engine ranks that keep them, through a
process group of both.

For engines on any machine: no memory or folder is shared. Each replica has a group of its own (gloo on CPUs,
    NCCL on GPUs;
host/transfer_group.py), of the trainer ranks that have slices for it and its engine's ranks. The replica's
owner holds the group's store and has the engine join. A group stays from publish to publish; one in which
anything failed is left by all, and made anew for the next one, as is that of an engine that was started anew.

No rank ever has a whole parameter: each computes the shares of its slices in the parameters' checksums
    (partial_checksums.py) when it
writes a bucket, and reads them once more when it sends them, one message at a time. So it holds a message and
a piece, however many engine ranks there are; an engine rank holds the messages of a bucket and the parameters
that they make.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch import distributed as dist

from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.weights.partial_checksums import combine_shares, compute_share
from megagrpo.weights.plan.boxes import Box
from megagrpo.weights.plan.bucket_layout import BucketLayout
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.weights.publisher import agree
from megagrpo.weights.read.slice_reader import SliceReader
from megagrpo.weights.transports.base import SLOTS, Run, Transport, TransportContext
from megagrpo.wire.manifest import BucketManifest
from megagrpo.wire.transfer_group import (
    NAME_PREFIX,
    GroupAddress,
    TransferGroup,
    hold_store,
    own_address_towards,
)


class GroupTransport(Transport):
    """Point-to-point re-sharding to the engines' ranks."""

    name: ClassVar[str] = "group"

    def __init__(self, context: TransportContext):
        super().__init__(context)
        # replica -> this rank's membership, where it has slices for it
        self._groups: dict[int, TransferGroup] = {}
        # replica that this rank owns -> name and store of its group
        self._stores: dict[int, tuple[str, dist.TCPStore]] = {}
        self._senders: dict[int, list[int]] = {}  # replica -> trainer ranks in its group, by their rank there
        self._num_groups = 0
        self._is_whole = False  # the last publish was committed: the groups are
        # (replica, position in the layout) -> shares of all ranks, of one bucket
        self._shares: dict[tuple[int, int], list[int]] = {}
        self._largest_piece = 0
        # Changes that a slot's bucket holds, of all ranks and this one's blocks; None: it holds slices.
        self._carried: list[tuple[Sequence[Sequence[Run]], Sequence[torch.Tensor]] | None] = [None] * SLOTS
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._sending: Future[None] | None = None
        self._has_ended = False  # for good: its thread is gone
        # One for each bucket on its way: what it made of a bucket when that was written is needed again when
        # it is sent.
        self._readers = [
            type(context.reader)(context.reader.model, context.plan, context.rank) for _ in range(SLOTS)
        ]

    def make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Return no memory."""
        return torch.empty(0, dtype=torch.uint8)

    def attach(self) -> None:
        """Do nothing: no memory is shared."""

    # ---- groups

    def connect(self, engine: BucketEngine) -> None:
        """Make the groups that are missing. Collective over all ranks."""
        served = sorted({transfer.replica for sends in self._all_sends for transfer in sends})
        found = agree(lambda: (served, self._open_stores(engine)), f"weight version {self.version}: store")
        opened = {replica: place for _, places in found for replica, place in places.items()}
        addresses = {}
        for replica, (name, host, port) in opened.items():
            self._senders[replica] = [rank for rank, (replicas, _) in enumerate(found) if replica in replicas]
            num_senders = len(self._senders[replica])
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            addresses[replica] = GroupAddress(
                name, backend, host, port, num_senders, num_senders + self.plan.grid.tp
            )
            if replica in self._groups:
                self._groups.pop(replica).leave()
        with ThreadPoolExecutor(1, thread_name_prefix="join") as joining:
            pending = [
                joining.submit(engine.join_group, addresses[replica])
                for replica in self.own_replicas
                if replica in addresses
            ]
            for replica in sorted(addresses):  # in one order on all ranks: none waits in another's group
                if self.rank in self._senders[replica]:
                    store = self._stores[replica][1] if replica in self.own_replicas else None
                    rank = self._senders[replica].index(self.rank)
                    self._groups[replica] = TransferGroup(addresses[replica], rank, store=store)
            for future in pending:
                future.result()

    def _open_stores(self, engine: BucketEngine) -> dict[int, tuple[str, str, int]]:
        """Open the stores of groups that must be made, of the replicas that this rank owns: (group's name,
        address, port) of each.
        """
        opened = {}
        for replica in self.own_replicas:
            if replica in self._stores and engine.transfer_group == self._stores[replica][0]:
                continue
            host = _shared_address(urlsplit(engine.address).hostname or "127.0.0.1")
            store, port = hold_store(host, self.context.timeout_seconds)
            self._num_groups += 1
            name = f"{NAME_PREFIX}{self.context.token}_r{replica}_{self.plan.grid.layout}_{self._num_groups}"
            self._stores[replica] = name, store
            opened[replica] = name, host, port
        return opened

    # ---- buckets

    def write(self, bucket: int, slot: int) -> None:
        """Make a bucket ready to be sent. Collective over all ranks."""
        self._carried[slot] = None
        self._readers[slot].forget()
        self._readers[slot].prepare(self.plan.buckets[bucket])
        self.write_slices(bucket, slot)

    def write_slices(self, bucket: int, slot: int) -> None:
        """Compute what this rank's slices contribute to the checksums, and tell all ranks. Collective over
        all ranks.
        """
        layout = self.layouts[bucket]
        numbers = _numbers(layout)

        def compute() -> dict[tuple[int, int], int]:
            shares: dict[tuple[int, int], int] = defaultdict(int)
            for transfer in self.sends(bucket):
                number = numbers[transfer.destination, transfer.target]
                for place, tensor in self._readers[slot].read(transfer):
                    piece = tensor.to(self.context.dtype_of(layout.tensors[number].target))
                    self._largest_piece = max(self._largest_piece, piece.nbytes)
                    shares[transfer.replica, number] ^= compute_share(
                        piece, place, layout.tensors[number].target.grid
                    )
                self.stats.planned_bytes += self.plan.transfer_bytes(transfer)
            return dict(shares)

        self._shares = defaultdict(list)
        for part in agree(compute, f"weight version {self.version}: bucket {bucket}: checksums"):
            for key, share in part.items():
                self._shares[key].append(share)

    def carry(
        self, bucket: int, slot: int, runs: Sequence[Sequence[Run]], blocks: Sequence[torch.Tensor]
    ) -> None:
        """Keep the blocks until they are sent. Not collective."""
        self._carried[slot] = runs, blocks

    def checksums(self, bucket: int, slot: int) -> dict[tuple[int, int], str]:
        """Return the checksums of the parameters of the replicas that this rank owns."""
        return {
            (replica, number): combine_shares(self._shares[replica, number], placed.nbytes)
            for replica in self.own_replicas
            for number, placed in enumerate(self.layouts[bucket].tensors)
        }

    def deliver(self, bucket: int, slot: int) -> None:
        """Begin to send this rank's slices, in a thread."""
        self._sending = self._sender.submit(self._send, bucket, slot)

    def wait_delivered(self) -> None:
        """Wait for the thread; raise what failed in it."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result()

    def hand_out(self, described: BucketManifest, bucket: int, slot: int, replica: int) -> BucketManifest:
        """Describe the messages that a bucket comes in; offsets count from the first byte of each engine
        rank's part.
        """
        location = described.location | {"messages": self._describe_messages(bucket, slot, replica)}
        begins: dict[int | None, int] = {}
        for entry in described.tensors:
            if entry.nbytes:
                begins[entry.rank] = min(begins.get(entry.rank, entry.offset), entry.offset)
        moved = (
            replace(entry, offset=entry.offset - begins[entry.rank]) if entry.nbytes else entry
            for entry in described.tensors
        )
        return replace(described, location=location, tensors=tuple(moved))

    def location(self, replica: int, slot: int) -> dict[str, Any]:
        """Return the group's name."""
        return {"group": self._stores[replica][0]}

    def committed(self, version: int) -> None:
        """Keep the groups for the next publish."""
        self._is_whole = True

    def close(self) -> None:
        """Leave the groups, but after a publish that was committed; called once more, leave them then too."""
        if self._is_whole:
            self._is_whole = False
            return
        if not self._has_ended:  # what was being sent has ended, at the latest with its time-out
            self._sender.submit(lambda: None).result()
        self._sending = None
        for reader in self._readers:
            reader.forget()
        for group in self._groups.values():
            group.leave()
        self._groups.clear()
        self._stores.clear()

    def end(self) -> None:
        """Leave the groups and end the thread that sends."""
        self._is_whole = False
        self.close()
        self._has_ended = True
        self._sender.shutdown()

    # ---- messages

    @property
    def _device(self) -> torch.device:
        return next(iter(self.context.reader.model.chunks[0].parameters())).device

    def _send(self, bucket: int, slot: int) -> None:
        """Send a message to every engine rank that this rank has slices for; neighbouring ranks begin with
        different ones.
        """
        messages = self._group_blocks(slot) if self._carried[slot] else self._group_transfers(bucket, slot)
        receivers = sorted(messages)
        first = self.rank % max(len(receivers), 1)
        try:
            for replica, destination in receivers[first:] + receivers[:first]:
                message = messages[replica, destination]()
                self.note_peak(message.nbytes + self._largest_piece)
                self._groups[replica].send(message, destination)
                # changes are counted where they are found
                self.stats.written_bytes += message.nbytes if self._carried[slot] is None else 0
                self.stats.sent_bytes += message.nbytes
        finally:
            self._readers[slot].forget()

    def _group_transfers(self, bucket: int, slot: int) -> dict[tuple[int, int], Callable[[], torch.Tensor]]:
        """Return what makes the message to each (replica, engine rank) that this rank has slices for."""
        found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in self.sends(bucket):
            found[transfer.replica, transfer.destination].append(transfer)
        return {
            receiver: partial(self._pack, transfers, self._readers[slot])
            for receiver, transfers in found.items()
        }

    def _group_blocks(self, slot: int) -> dict[tuple[int, int], Callable[[], torch.Tensor]]:
        """Return what makes the message to each (replica, engine rank) that this rank has changes for."""
        found: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        runs, blocks = self._carried[slot] or ((), ())
        for run, part in zip(runs[self.rank], blocks, strict=True):
            found[run.replica, run.destination].append(part.reshape(-1).view(torch.uint8))
        return {receiver: partial(torch.cat, parts) for receiver, parts in found.items()}

    def _pack(self, transfers: list[Transfer], reader: SliceReader) -> torch.Tensor:
        """Return the bytes of a message: the pieces without gaps, those of larger elements first, so that
        all lie where their dtype may.
        """
        message = torch.empty(
            sum(map(self.plan.transfer_bytes, transfers)), dtype=torch.uint8, device=self._device
        )
        position = 0
        for transfer in sorted(transfers, key=self._before):
            dtype = self._dtype_of(transfer)
            for _, tensor in reader.read(transfer):
                nbytes = tensor.numel() * dtype.itemsize
                message[position : position + nbytes].view(dtype).view(tensor.shape).copy_(tensor)
                position += nbytes
        return message

    def _dtype_of(self, transfer: Transfer) -> torch.dtype:
        return self.context.dtype_of(self.plan.sources[transfer.source])

    def _before(self, transfer: Transfer) -> int:
        return -self._dtype_of(transfer).itemsize

    def _describe_messages(self, bucket: int, slot: int, replica: int) -> list[list[dict[str, Any]]]:
        """Return, for each engine rank that receives, the messages that come: from which rank, and the
        pieces in their order.
        """
        layout, senders = self.layouts[bucket], self._senders[replica]
        numbers = _numbers(layout)
        described = []
        carried = self._carried[slot]
        for destination in range(self.plan.grid.destinations):
            pieces: dict[int, list[tuple[int, Box]]] = defaultdict(list)
            for rank, runs in enumerate(carried[0] if carried else ()):
                for run in runs:
                    if (run.replica, run.destination) == (replica, destination):
                        pieces[rank].append((run.number, ((run.start, run.start + run.elements),)))
            for transfer in sorted(
                self.receives(bucket, replica, destination) if carried is None else (), key=self._before
            ):
                number = numbers[destination, transfer.target]
                # without the expert's own dimension, if there is one
                place = transfer.place[-len(layout.tensors[number].target.shape) :]
                pieces[transfer.sender].append((number, place))
            described.append(
                [
                    {"sender": senders.index(rank), "trainer_rank": rank, "pieces": part}
                    for rank, part in pieces.items()
                ]
            )
        return described


def _numbers(layout: BucketLayout) -> dict[tuple[int, int], int]:
    """Return the place in a layout of each (destination, position)."""
    return {(placed.destination, placed.position): number for number, placed in enumerate(layout.tensors)}


def _shared_address(engine_host: str) -> str:
    """Return this machine's address that the engine's ranks and all trainer ranks reach; a loopback one
    where all are here.
    """
    found = [own_address_towards(host) for host in (engine_host, os.environ.get("MASTER_ADDR", "127.0.0.1"))]
    return next((address for address in found if not ip_address(address).is_loopback), found[0])
