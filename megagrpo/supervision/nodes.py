"""Where this machine stands among several that make one run, each with a launcher of its own."""

from dataclasses import dataclass

from megagrpo.errors import UserError


@dataclass(frozen=True)
class Nodes:
    """The machines of a run. The first one holds the store that all ranks meet in."""

    count: int = 1
    rank: int = 0  # this machine's
    host: str = ""  # where the store is: an address of the first machine that the others reach
    port: int = 0

    @property
    def holds_store(self) -> bool:
        """Whether it is this machine's launcher that holds it."""
        return self.rank == 0

    def environment(self, ranks_a_node: int) -> dict[str, str]:
        """Return what tells a rank of this machine where it meets the others."""
        return {
            "WORLD_SIZE": str(self.count * ranks_a_node),
            "LOCAL_WORLD_SIZE": str(ranks_a_node),
            "GROUP_RANK": str(self.rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def read_nodes(count: int, rank: int | None, rendezvous: str | None) -> Nodes | None:
    """Return what the options of `megagrpo run` say; None for one machine.

    Raises:
        UserError: an option is missing, or what it says does not fit the others.
    """
    if count == 1:
        if rank or rendezvous:
            raise UserError("--node-rank and --rendezvous are for --nnodes 2 and more")
        return None
    if rank is None or rendezvous is None:
        given = {"--node-rank": rank, "--rendezvous": rendezvous}
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise UserError(
            f"{missing}: missing; --nnodes {count} needs --node-rank K (0 to {count - 1}) and, alike on all "
            "machines, --rendezvous HOST:PORT of the first one"
        )
    if not 0 <= rank < count:
        raise UserError(f"--node-rank {rank}: must be 0 to {count - 1} with --nnodes {count}")
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {rendezvous}: must be HOST:PORT, as node0:29400")
    return Nodes(count, rank, host.strip("[]"), int(port))
