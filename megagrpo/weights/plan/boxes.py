"""Hyper-rectangles of tensor indices: one half-open interval per dimension. Pure arithmetic."""

from math import prod

Box = tuple[tuple[int, int], ...]

# A box is cut along its first dimension of at least this many rows: fine enough to share it out evenly, and
# the parts stay contiguous more often than along a later dimension.
CUT_ROWS = 64


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of all indices."""
    return tuple((0, size) for size in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the indices in both boxes; None where there are none."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(a, b, strict=True):
        start, stop = max(start, other_start), min(stop, other_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the lengths of the box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Return the number of indices."""
    return prod(sizes(box))


def shift(box: Box, by: tuple[int, ...], sign: int = 1) -> Box:
    """Return the box moved by `by` (back by it with sign -1)."""
    return tuple(
        (start + sign * step, stop + sign * step) for (start, stop), step in zip(box, by, strict=True)
    )


def origin(box: Box) -> tuple[int, ...]:
    """Return the first index of the box."""
    return tuple(start for start, _ in box)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def cut_dimension(box: Box) -> int:
    """Return the dimension along which a box is shared out."""
    lengths = sizes(box)
    for dimension, length in enumerate(lengths):
        if length >= CUT_ROWS:
            return dimension
    return max(range(len(lengths)), key=lambda dimension: lengths[dimension])


def cut(box: Box, start: int, stop: int, denominator: int) -> Box | None:
    """Return the part of a box between the fractions start / denominator and stop / denominator of its rows;
    None if it is empty.

    Adjacent fractions give adjacent parts: the parts of a partition of [0, 1] are a partition of the box.
    """
    dimension = cut_dimension(box)
    first, last = box[dimension]
    rows = last - first
    begin, end = (
        first + (2 * rows * part + denominator) // (2 * denominator)
        for part in (max(start, 0), min(stop, denominator))
    )
    if begin >= end:
        return None
    return (*box[:dimension], (begin, end), *box[dimension + 1 :])


def box_after(box: Box, index: int) -> Box:
    """Return the box of the index-th element of the first dimension."""
    first = box[0][0] + index
    return ((first, first + 1), *box[1:])
