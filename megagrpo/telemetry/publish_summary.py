"""Sums up the publishes of a run from the metric rows of its steps."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from megagrpo.telemetry import names

_SECONDS, _BYTES = "_seconds", "_bytes"


class PublishSummary:
    """Collects the rows' `publish/...`; the publish before the first step is in no row."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._publishes = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row into account."""
        found = {
            name.removeprefix(names.PUBLISH): value
            for name, value in row.items()
            if name.startswith(names.PUBLISH)
        }
        if not found:
            return
        self._publishes += 1
        found["all" + _SECONDS] = row.get(names.PUBLISH_SECONDS)
        for name, value in found.items():
            if value is not None:
                self._values.setdefault(name, []).append(value)

    def result(self) -> dict[str, Any]:
        """Return the summary.

        publishes, seconds {stage: median of a publish; "all": the whole of it}, bytes {kind: total; "peak":
        the largest}, and where rows have them kept_ratio (the largest: 1 where engines received what they
        keep and nothing else), written_share (median: below 1 where changes were sent alone), probe_gap (the
        largest).
        """
        result: dict[str, Any] = {"publishes": self._publishes, "seconds": {}, "bytes": {}}
        for name, values in sorted(self._values.items()):
            if name.endswith(_SECONDS):
                result["seconds"][name.removesuffix(_SECONDS)] = median(values)
            elif name.endswith(_BYTES):
                result["bytes"][name.removesuffix(_BYTES)] = int(
                    max(values) if name == "peak" + _BYTES else sum(values)
                )
            elif name in ("kept_ratio", "probe_gap"):
                result[name] = max(values)
            elif name == "written_share":
                result[name] = median(values)
        return result
