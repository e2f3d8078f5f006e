"""Sends every slice, in every publish."""

from megagrpo.weights.selection.base import Selection
from megagrpo.weights.selection.selected import SelectedBucket


class Everything(Selection):
    """All of the weights."""

    def select(self, bucket: int) -> SelectedBucket:
        """Return the bucket with all of its slices. Not collective."""
        sends = self._sends(bucket)
        nbytes = self._bytes(sends)
        return SelectedBucket(bucket, sends, nbytes, nbytes)
