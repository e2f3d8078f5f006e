"""What engines say that they hold, compared with what was sent or planned."""

from typing import Any

from megagrpo.weights.publisher import PublishError
from megagrpo.wire.manifest import BucketManifest

Ack = dict[str, Any]


def check_acks(manifest: BucketManifest, acks: list[Ack], engine_ranks: int, plan_hash: str) -> None:
    """Compare what engine ranks acknowledge with what was sent.

    Raises:
        PublishError: names the engine rank, the tensor and both values.
    """
    where = f"weight version {manifest.version}, plan {plan_hash}"
    by_rank = {ack["rank"]: ack for ack in acks}
    for rank in range(engine_ranks):
        if rank not in by_rank:
            raise PublishError(f"{where}: engine rank {rank} acknowledged nothing")
        ack, entries = by_rank[rank], manifest.entries_for(rank)
        if ack["version"] != manifest.version:
            raise PublishError(f"{where}: engine rank {rank} acknowledged version {ack['version']}")
        for entry in entries:
            found = ack["tensors"].get(entry.name)
            if found != entry.checksum:
                raise PublishError(
                    f"{where}: engine rank {rank}: {entry.name}: checksum {found}, sent was {entry.checksum}"
                )
        expected = sum(entry.nbytes for entry in entries)
        if ack["bytes"] != expected:
            raise PublishError(
                f"{where}: engine rank {rank} acknowledged {ack['bytes']} bytes, sent were {expected}"
            )


def describe_difference(expected: dict[tuple[int, str], str], kept: list[dict[str, str]] | str) -> str | None:
    """Return the first difference between planned parameters, by (engine rank, name), and an engine's own;
    None where there is none.
    """
    if isinstance(kept, str):
        return kept
    found = {
        (rank, name): checksum
        for rank, parameters in enumerate(kept)
        for name, checksum in parameters.items()
    }
    for rank, name in sorted(expected.keys() | found.keys()):
        planned, own = expected.get((rank, name)), found.get((rank, name))
        if planned != own:
            return (
                f"engine rank {rank}: {name}: planned {planned or 'nothing'}, the loader made "
                f"{own or 'nothing'}"
            )
    return None
