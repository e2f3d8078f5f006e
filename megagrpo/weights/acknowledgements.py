"""Compares the parameters that engines hold with those that were planned."""


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
