"""Slices go point to point through the run's process group (gloo on CPUs, NCCL on GPUs) to the rank that hands the bucket to the engine.

For transports whose bucket lies in one place, in the hands of its owner: a file, or the memory of a GPU. A rank sends one message to each
owner that it has slices for; the owner lays the slices out in its slot.
"""

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from megagrpo.weights.boxes import sizes
from megagrpo.weights.plan import Transfer
from megagrpo.weights.transports.base import SLOTS, Transport

_MESSAGE_ALIGNMENT = 16  # bytes


class GatheringTransport(Transport):
    """Point-to-point re-sharding to the replicas' owners."""

    buckets_alive: ClassVar[int] = SLOTS + 2  # two slots, and the messages of a round

    def attach(self) -> None:
        """Do nothing: no other rank's memory is reached."""

    def write_slices(self, bucket: int, slot: int) -> None:
        """Send slices to their owners and lay out those that come. Collective over all ranks.

        In rounds, each rank sends to one owner at a time, and neighbouring ranks to different ones: no owner is crowded, and the messages
        of a round are at most a bucket each way.
        """
        self.clear_padding(bucket, slot)
        outgoing, incoming = self._by_owner(self.sends(bucket)), self._incoming(bucket)
        self.stats.planned_bytes += sum(self.plan.transfer_bytes(transfer) for transfer in self.sends(bucket))
        for transfer in outgoing.get(self.rank, []):
            self.put_own(bucket, slot, transfer)
            self.stats.written_bytes += self.plan.transfer_bytes(transfer)
        owners = sorted({self.context.owners[replica] for replica in self.chosen})
        for number in range(len(owners)):
            owner = owners[(self.rank + number) % len(owners)]
            senders = [sender for sender in incoming if owners[(sender + number) % len(owners)] == self.rank]
            transfers = outgoing.get(owner, []) if owner != self.rank else []
            self._exchange(bucket, slot, owner, transfers, {sender: incoming[sender] for sender in senders})

    def _exchange(self, bucket: int, slot: int, owner: int, transfers: list[Transfer], incoming: dict[int, list[Transfer]]) -> None:
        """Send `transfers` to `owner` while the messages of `incoming` arrive."""
        message = self._pack(transfers)
        arriving = {sender: self._empty(expected) for sender, expected in incoming.items()}
        self.note_peak(message.nbytes + sum(buffer.nbytes for buffer in arriving.values()))
        pending = [dist.P2POp(dist.irecv, buffer, sender) for sender, buffer in arriving.items()]
        if transfers:
            pending.append(dist.P2POp(dist.isend, message, owner))
        for work in dist.batch_isend_irecv(pending) if pending else []:
            work.wait(timedelta(seconds=self.context.timeout_seconds))
        for sender, buffer in arriving.items():
            self._unpack(bucket, slot, incoming[sender], buffer)
        self.stats.written_bytes += sum(self.plan.transfer_bytes(transfer) for transfer in transfers)
        self.stats.sent_bytes += message.nbytes

    def close(self) -> None:
        """Give the slots back."""
        self.memory.clear()

    # ---- messages

    def _by_owner(self, transfers: list[Transfer]) -> dict[int, list[Transfer]]:
        """Group transfers by the rank that they go to, in an order that both ends know."""
        found: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in sorted(transfers, key=lambda one: (one.replica, one.destination, one.target, one.source, one.box)):
            found[self.context.owners[transfer.replica]].append(transfer)
        return found

    def _incoming(self, bucket: int) -> dict[int, list[Transfer]]:
        """Return what other ranks send to this one, by sender."""
        expected = [
            transfer
            for replica in self.own_replicas
            for destination in range(self.plan.grid.destinations)
            for transfer in self.plan.receives(self.plan.buckets[bucket], replica, destination)
        ]
        senders: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in expected:
            senders[transfer.sender].append(transfer)
        return {sender: self._by_owner(transfers)[self.rank] for sender, transfers in senders.items() if sender != self.rank}

    def _empty(self, transfers: list[Transfer]) -> torch.Tensor:
        device = next(iter(self.context.reader.model.chunks[0].parameters())).device
        return torch.empty(sum(self._message_bytes(transfer) for transfer in transfers), dtype=torch.uint8, device=device)

    def _message_bytes(self, transfer: Transfer) -> int:
        """Return the bytes that a transfer takes in a message: the next one begins where any dtype may."""
        return -(-self.plan.transfer_bytes(transfer) // _MESSAGE_ALIGNMENT) * _MESSAGE_ALIGNMENT

    def _cut(self, transfers: list[Transfer], message: torch.Tensor) -> Iterator[tuple[Transfer, torch.Tensor]]:
        """Yield every transfer with its elements [numel] in a message."""
        position = 0
        for transfer in transfers:
            part = message[position : position + self.plan.transfer_bytes(transfer)]
            yield transfer, part.view(self.context.dtype_of(self.plan.sources[transfer.source]))
            position += self._message_bytes(transfer)

    def _pack(self, transfers: list[Transfer]) -> torch.Tensor:
        message = self._empty(transfers)
        for transfer, elements in self._cut(transfers, message):
            position = 0
            for _, tensor in self.context.reader.read(transfer):
                elements[position : position + tensor.numel()].view(tensor.shape).copy_(tensor)
                position += tensor.numel()
        return message

    def _unpack(self, bucket: int, slot: int, transfers: list[Transfer], message: torch.Tensor) -> None:
        for transfer, elements in self._cut(transfers, message):
            self.put(bucket, slot, transfer, transfer.place, elements.view(sizes(transfer.place)))
