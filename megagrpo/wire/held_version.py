"""Tracks which version an engine rank holds, so that changes are applied to that version alone."""

from megagrpo.wire.bucket_manifest import BucketError, BucketManifest


class HeldVersion:
    """The version of one engine rank's weights."""

    def __init__(self) -> None:
        self._committed: int | None = None
        # the version whose buckets have come: the committed one is no longer whole
        self._loading: int | None = None

    def check(self, manifest: BucketManifest) -> None:
        """Raise BucketError if a bucket holds changes to another version than the one held."""
        if manifest.base is None or manifest.version == self._loading:
            return
        if self._loading is not None or manifest.base != self._committed:
            held = (
                f"parts of version {self._loading}"
                if self._loading is not None
                else f"version {self._committed}"
            )
            raise BucketError(
                f"version {manifest.version}: changes to version {manifest.base} came, this "
                f"engine rank holds {held}"
            )

    def begin(self, version: int) -> None:
        """Note that parameters are about to be overwritten."""
        self._loading = version

    def commit(self, version: int) -> None:
        """Note that a whole version is held."""
        self._committed, self._loading = version, None
