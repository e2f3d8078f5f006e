"""Slices go from the trainer ranks that hold them straight to the engine ranks that keep them, through a
process group of both.

For engines on any machine: no memory or folder is shared. A group (group_membership.py) stays from publish to
    publish. All members leave a group in which anything failed, and the group of an engine that was
    restarted; the next publish makes a new one.

No rank ever has a whole parameter: each computes the shares of its slices in the parameters' checksums
(partial_checksums.py) when it writes a bucket, and reads them once more when it sends them, one message at a
time. So it holds a message and a piece, however many engine ranks there are; an engine rank holds the
messages of a bucket and the parameters that they make.
"""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.weights.context import PublishContext
from megagrpo.weights.partial_checksums import combine_shares, compute_share
from megagrpo.weights.plan.boxes import Box
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.weights.publisher import agree
from megagrpo.weights.read.slice_reader import SliceReader
from megagrpo.weights.selection.base import SelectedBlocks, SelectedBucket
from megagrpo.weights.transports.base import SLOTS, Transport
from megagrpo.weights.transports.group_membership import GroupMembership
from megagrpo.wire.bucket_manifest import BucketManifest

# what makes the message to each (replica, engine rank)
Messages = dict[tuple[int, int], Callable[[], torch.Tensor]]


class GroupTransport(Transport):
    """Point-to-point re-sharding to the engines' ranks."""

    name: ClassVar[str] = "group"

    def __init__(self, context: PublishContext):
        super().__init__(context)
        self._groups = GroupMembership(context)
        self._is_whole = False  # the last publish was committed, so the groups can serve the next one
        # (replica, number in the layout) -> shares of all ranks, of one bucket
        self._shares: dict[tuple[int, int], list[int]] = {}
        self._largest_piece = 0
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._sending: Future[None] | None = None
        self._has_ended = False  # no further publish: the sending thread has ended
        # One reader for each bucket in flight: it prepares a bucket when the bucket is written, and needs the
        # result again when the bucket is sent.
        self._readers = [
            type(context.reader)(context.reader.model, context.plan, context.rank) for _ in range(SLOTS)
        ]

    def connect(self, engine: BucketEngine) -> None:
        """Make the groups that are missing. Collective over all ranks."""
        self._groups.connect(engine, self._own_replicas, self.version)

    def deliver(self, slot: int) -> None:
        """Begin to send what this rank has of a slot, in a thread."""
        self._sending = self._sender.submit(self._send, self._written[slot], slot)

    def wait_delivered(self) -> None:
        """Wait for the thread; raise what failed in it."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result()

    def committed(self, version: int) -> None:
        """Keep the groups for the next publish."""
        self._is_whole = True

    def close(self) -> None:
        """Leave the groups, unless the publish was committed: then only a second call leaves them."""
        if self._is_whole:
            self._is_whole = False
            return
        if not self._has_ended:  # the send that was under way has ended, at the latest by its time-out
            self._sender.submit(lambda: None).result()
        self._sending = None
        for reader in self._readers:
            reader.forget()
        self._groups.leave()

    def end(self) -> None:
        """Leave the groups and end the thread that sends."""
        self._is_whole = False
        self.close()
        self._has_ended = True
        self._sender.shutdown()

    # ---- buckets

    def _write(self, bucket: SelectedBucket, slot: int) -> SelectedBucket:
        """Make a bucket ready to be sent: blocks are kept until then; what slices contribute to the checksums
        is computed, and told to all ranks.
        """
        if bucket.blocks is None:
            self._readers[slot].forget()
            self._readers[slot].prepare(self.plan.buckets[bucket.number])
            self._share_checksums(bucket, slot)
        return bucket

    def _share_checksums(self, bucket: SelectedBucket, slot: int) -> None:
        layout = self.context.layouts[bucket.number]

        def compute() -> dict[tuple[int, int], int]:
            shares: dict[tuple[int, int], int] = defaultdict(int)
            for transfer in bucket.sends:
                number = layout.numbers[transfer.destination, transfer.target]
                for place, tensor in self._readers[slot].read(transfer):
                    piece = tensor.to(self.context.dtype_of(layout.tensors[number].target))
                    self._largest_piece = max(self._largest_piece, piece.nbytes)
                    shares[transfer.replica, number] ^= compute_share(
                        piece, place, layout.tensors[number].target.grid
                    )
            return dict(shares)

        self._shares = defaultdict(list)
        for part in agree(compute, f"weight version {self.version}: bucket {bucket.number}: checksums"):
            for key, share in part.items():
                self._shares[key].append(share)

    def _checksums(self, bucket: SelectedBucket, slot: int) -> dict[tuple[int, int], str]:
        return {
            (replica, number): combine_shares(self._shares[replica, number], placed.nbytes)
            for replica in self._own_replicas
            for number, placed in enumerate(self.context.layouts[bucket.number].tensors)
        }

    def _location(self, slot: int, replica: int) -> dict[str, Any]:
        return {
            "group": self._groups.name(replica),
            "messages": self._describe_messages(self._written[slot], replica),
        }

    def _hand_out(self, described: BucketManifest, slot: int, replica: int) -> BucketManifest:
        """Count offsets from the first byte of each engine rank's part."""
        begins: dict[int | None, int] = {}
        for entry in described.tensors:
            if entry.nbytes:
                begins[entry.rank] = min(begins.get(entry.rank, entry.offset), entry.offset)
        moved = (
            replace(entry, offset=entry.offset - begins[entry.rank]) if entry.nbytes else entry
            for entry in described.tensors
        )
        return replace(described, tensors=tuple(moved))

    # ---- messages

    def _send(self, bucket: SelectedBucket, slot: int) -> None:
        """Send a message to every engine rank that this rank has slices for; neighbouring ranks begin with
        different ones.
        """
        messages = (
            self._group_blocks(bucket.blocks)
            if bucket.blocks is not None
            else self._group_transfers(bucket, self._readers[slot])
        )
        receivers = sorted(messages)
        first = self.rank % max(len(receivers), 1)
        try:
            for replica, destination in receivers[first:] + receivers[:first]:
                message = messages[replica, destination]()
                self.stats.peak_bytes = max(self.stats.peak_bytes, message.nbytes + self._largest_piece)
                self._groups.send(message, replica, destination)
                self.stats.sent_bytes += message.nbytes
        finally:
            self._readers[slot].forget()

    def _group_transfers(self, bucket: SelectedBucket, reader: SliceReader) -> Messages:
        found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in bucket.sends:
            found[transfer.replica, transfer.destination].append(transfer)
        return {receiver: partial(self._pack, transfers, reader) for receiver, transfers in found.items()}

    def _group_blocks(self, blocks: SelectedBlocks) -> Messages:
        found: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for run, part in zip(blocks.runs[self.rank], blocks.blocks, strict=True):
            found[run.replica, run.destination].append(part.reshape(-1).view(torch.uint8))
        return {receiver: partial(torch.cat, parts) for receiver, parts in found.items()}

    def _pack(self, transfers: list[Transfer], reader: SliceReader) -> torch.Tensor:
        """Return the bytes of a message: the pieces without gaps, those of larger elements first, so that
        all lie where their dtype may.
        """
        nbytes = sum(map(self.plan.transfer_bytes, transfers))
        message = torch.empty(nbytes, dtype=torch.uint8, device=self.context.device)
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

    def _describe_messages(self, bucket: SelectedBucket, replica: int) -> list[list[dict[str, Any]]]:
        """Return, for each engine rank that receives, the messages that come: from which rank, and the
        pieces in their order.
        """
        layout, senders = self.context.layouts[bucket.number], self._groups.senders[replica]
        described = []
        for destination in range(self.plan.grid.destinations):
            pieces: dict[int, list[tuple[int, Box]]] = defaultdict(list)
            for rank, runs in enumerate(bucket.blocks.runs if bucket.blocks else ()):
                for run in runs:
                    if (run.replica, run.destination) == (replica, destination):
                        pieces[rank].append((run.number, ((run.start, run.start + run.elements),)))
            for transfer in sorted(self._receives(bucket, replica, destination), key=self._before):
                number = layout.numbers[destination, transfer.target]
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
