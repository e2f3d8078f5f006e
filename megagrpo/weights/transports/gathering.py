"""Slices go point to point through the run's process group (gloo on CPUs, NCCL on GPUs) to the rank that
hands the bucket to the engine.

For transports whose bucket lies in one place, in the hands of its owner: a file, or the memory of a GPU. A
rank sends one message to each owner that it has slices for; the owner lays the slices out in its slot.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from megagrpo.weights.plan.boxes import sizes
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.weights.selection.base import SelectedBlocks, SelectedBucket
from megagrpo.weights.transports.base import SLOTS
from megagrpo.weights.transports.slots import SlotTransport

_MESSAGE_ALIGNMENT = 16  # bytes


class GatheringTransport(SlotTransport):
    """Point-to-point re-sharding to the replicas' owners."""

    buckets_alive: ClassVar[int] = SLOTS + 2  # two slots, and the messages of a round

    def _write_slices(self, bucket: SelectedBucket, slot: int) -> None:
        """Send slices to their owners and lay out those that come. Collective over all ranks.

        In rounds, each rank sends to one owner at a time, and neighbouring ranks to different ones: no owner
        is crowded, and the messages of a round are at most a bucket each way.
        """
        self._clear_padding(bucket.number, slot)
        outgoing, incoming = self._by_owner(bucket.sends), self._incoming(bucket)
        for transfer in outgoing.get(self.rank, []):
            self._put_own(bucket.number, slot, transfer)
        for owner, senders in self._rounds(incoming):
            transfers = outgoing.get(owner, []) if owner != self.rank else []
            arriving = {
                sender: self._empty(sum(map(self._message_bytes, incoming[sender]))) for sender in senders
            }
            self._exchange(owner, self._pack(transfers), arriving)
            for sender, message in arriving.items():
                self._unpack(bucket.number, slot, incoming[sender], message)

    def _write_blocks(self, blocks: SelectedBlocks, slot: int) -> None:
        """Send blocks to their owners, in rounds too, and lay out those that come. Collective over all
        ranks.
        """
        owner_of, runs = self.context.owners, blocks.runs
        incoming = {
            sender: [run for run in sent if owner_of[run.replica] == self.rank]
            for sender, sent in enumerate(runs)
        }
        own = [
            (run, tensor)
            for run, tensor in zip(runs[self.rank], blocks.blocks, strict=True)
            if owner_of[run.replica] == self.rank
        ]
        self._put_runs(slot, [run for run, _ in own], [tensor for _, tensor in own])
        for owner, senders in self._rounds(
            {sender: coming for sender, coming in incoming.items() if coming and sender != self.rank}
        ):
            is_mine = owner == self.rank
            parts = [
                part
                for run, part in zip(runs[self.rank], blocks.blocks, strict=True)
                if owner_of[run.replica] == owner and not is_mine
            ]
            message = torch.cat([self._empty(0), *(part.reshape(-1).view(torch.uint8) for part in parts)])
            arriving = {
                sender: self._empty(sum(run.nbytes for run in incoming[sender])) for sender in senders
            }
            self._exchange(owner, message, arriving)
            for sender, found in arriving.items():
                self._put_runs(slot, incoming[sender], found.split([run.nbytes for run in incoming[sender]]))

    def _rounds(self, senders: Collection[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield, for each round, the owner that this rank sends to and those of `senders` that send to
        this rank.
        """
        owners = sorted({self.context.owners[replica] for replica in self.chosen})
        for number in range(len(owners)):
            owner = owners[(self.rank + number) % len(owners)]
            yield (
                owner,
                [sender for sender in senders if owners[(sender + number) % len(owners)] == self.rank],
            )

    def _exchange(self, owner: int, message: torch.Tensor, arriving: dict[int, torch.Tensor]) -> None:
        """Send a message to `owner`, if it is not empty, while those of other ranks arrive."""
        self._note_peak(message.nbytes + sum(buffer.nbytes for buffer in arriving.values()))
        pending = [dist.P2POp(dist.irecv, buffer, sender) for sender, buffer in arriving.items()]
        if len(message):
            pending.append(dist.P2POp(dist.isend, message, owner))
        for work in dist.batch_isend_irecv(pending) if pending else []:
            work.wait(timedelta(seconds=self.context.timeout_seconds))
        self.stats.sent_bytes += message.nbytes

    # ---- messages

    def _by_owner(self, transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
        """Group transfers by the rank that they go to, in an order that both ends know."""
        found: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in sorted(
            transfers, key=lambda one: (one.replica, one.destination, one.target, one.source, one.box)
        ):
            found[self.context.owners[transfer.replica]].append(transfer)
        return found

    def _incoming(self, bucket: SelectedBucket) -> dict[int, list[Transfer]]:
        """Return what other ranks send to this one, by sender."""
        expected = [
            transfer
            for replica in self._own_replicas
            for destination in range(self.plan.grid.destinations)
            for transfer in self._receives(bucket, replica, destination)
        ]
        senders: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in expected:
            senders[transfer.sender].append(transfer)
        return {
            sender: self._by_owner(transfers)[self.rank]
            for sender, transfers in senders.items()
            if sender != self.rank
        }

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.context.device)

    def _message_bytes(self, transfer: Transfer) -> int:
        """Return the bytes that a transfer takes in a message: the next one begins where any dtype may."""
        return -(-self.plan.transfer_bytes(transfer) // _MESSAGE_ALIGNMENT) * _MESSAGE_ALIGNMENT

    def _cut(
        self, transfers: list[Transfer], message: torch.Tensor
    ) -> Iterator[tuple[Transfer, torch.Tensor]]:
        """Yield every transfer with its elements [numel] in a message."""
        position = 0
        for transfer in transfers:
            part = message[position : position + self.plan.transfer_bytes(transfer)]
            yield transfer, part.view(self.context.dtype_of(self.plan.sources[transfer.source]))
            position += self._message_bytes(transfer)

    def _pack(self, transfers: list[Transfer]) -> torch.Tensor:
        message = self._empty(sum(map(self._message_bytes, transfers)))
        for transfer, elements in self._cut(transfers, message):
            position = 0
            for _, tensor in self.context.reader.read(transfer):
                elements[position : position + tensor.numel()].view(tensor.shape).copy_(tensor)
                position += tensor.numel()
        return message

    def _unpack(self, bucket: int, slot: int, transfers: list[Transfer], message: torch.Tensor) -> None:
        for transfer, elements in self._cut(transfers, message):
            self._put(bucket, slot, transfer, transfer.place, elements.view(sizes(transfer.place)))
