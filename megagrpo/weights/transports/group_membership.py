"""Process groups of trainer ranks and engine ranks: made when they are missing, left when anything failed.

Each replica has a group of its own (gloo on CPUs, NCCL on GPUs; wire/transfer_group.py), of the trainer ranks
that have slices for it and its engine's ranks. The replica's owner holds the group's store and has the engine
join.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from urllib.parse import urlsplit

import torch
from torch import distributed as dist

from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.weights.context import PublishContext
from megagrpo.weights.publisher import agree
from megagrpo.wire.transfer_group import (
    NAME_PREFIX,
    GroupAddress,
    TransferGroup,
    hold_store,
    own_address_towards,
)


class GroupMembership:
    """This rank's groups."""

    def __init__(self, context: PublishContext):
        self.context = context
        self.senders: dict[int, list[int]] = {}  # replica -> trainer ranks in its group, by their rank there
        # replica -> this rank's membership, where it has slices for it
        self._groups: dict[int, TransferGroup] = {}
        # replica that this rank owns -> name and store of its group
        self._stores: dict[int, tuple[str, dist.TCPStore]] = {}
        self._num_groups = 0

    def connect(self, engine: BucketEngine, own_replicas: Sequence[int], version: int) -> None:
        """Make the groups that are missing. Collective over all ranks.

        Args:
            engine: this rank's.
            own_replicas: those of this publish that this rank owns.
            version: of this publish.
        """
        served = sorted({transfer.replica for sends in self.context.sends for transfer in sends})
        found = agree(
            lambda: (served, self._open_stores(engine, own_replicas)), f"weight version {version}: store"
        )
        opened = {replica: place for _, places in found for replica, place in places.items()}
        addresses = {}
        for replica, (name, host, port) in opened.items():
            self.senders[replica] = [rank for rank, (replicas, _) in enumerate(found) if replica in replicas]
            num_senders = len(self.senders[replica])
            backend = "nccl" if self.context.device.type == "cuda" else "gloo"
            addresses[replica] = GroupAddress(
                name, backend, host, port, num_senders, num_senders + self.context.plan.grid.tp
            )
            if replica in self._groups:
                self._groups.pop(replica).leave()
        with ThreadPoolExecutor(1, thread_name_prefix="join") as joining:
            pending = [
                joining.submit(engine.join_group, addresses[replica])
                for replica in own_replicas
                if replica in addresses
            ]
            for replica in sorted(addresses):  # in one order on all ranks: none waits in another's group
                if self.context.rank in self.senders[replica]:
                    store = self._stores[replica][1] if replica in own_replicas else None
                    rank = self.senders[replica].index(self.context.rank)
                    self._groups[replica] = TransferGroup(addresses[replica], rank, store=store)
            for future in pending:
                future.result()

    def name(self, replica: int) -> str:
        """Return the name of the group of a replica that this rank owns."""
        return self._stores[replica][0]

    def send(self, message: torch.Tensor, replica: int, destination: int) -> None:
        """Send a message to an engine rank."""
        self._groups[replica].send(message, destination)

    def leave(self) -> None:
        """Leave all groups: the next publish makes others."""
        for group in self._groups.values():
            group.leave()
        self._groups.clear()
        self._stores.clear()

    def _open_stores(
        self, engine: BucketEngine, own_replicas: Sequence[int]
    ) -> dict[int, tuple[str, str, int]]:
        """Open the stores of groups that must be made, of the replicas that this rank owns: (group's name,
        address, port) of each.
        """
        opened = {}
        for replica in own_replicas:
            if replica in self._stores and engine.transfer_group == self._stores[replica][0]:
                continue
            host = _shared_address(urlsplit(engine.address).hostname or "127.0.0.1")
            store, port = hold_store(host, self.context.timeout_seconds)
            self._num_groups += 1
            layout = self.context.plan.grid.layout
            name = f"{NAME_PREFIX}{self.context.token}_r{replica}_{layout}_{self._num_groups}"
            self._stores[replica] = name, store
            opened[replica] = name, host, port
        return opened


def _shared_address(engine_host: str) -> str:
    """Return this machine's address that the engine's ranks and all trainer ranks reach; a loopback one
    where all are here.
    """
    found = [own_address_towards(host) for host in (engine_host, os.environ.get("MASTER_ADDR", "127.0.0.1"))]
    return next((address for address in found if not ip_address(address).is_loopback), found[0])
