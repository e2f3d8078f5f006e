"""Which requests a server answers while it verifies new weights: probes, told by their ids. Read on both
sides: standard library only.

A server that holds a new version serves it only after its log-probs were compared with the trainer's. Until
then running requests wait in its scheduler, and only probes are decoded.
"""

_MARK = "weights-probe-"


def probe_request_id(name: str) -> str:
    """Return the id of a probe; `name` tells it from others."""
    return _MARK + name


def is_probe(request_id: str) -> bool:
    """Say whether a request is a probe; servers put words of their own around ids."""
    return _MARK in request_id
