"""Keys of the board that the launcher looks at too, which imports no torch."""

PREFIX = "supervision/attempt"  # _N is added: the number of the start


def left_key(rank: int) -> str:
    """Return the key that a rank sets when it leaves without a failure."""
    return f"left/{rank}"
