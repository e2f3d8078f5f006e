"""What the trainer tells an SGLang server to do with weights, and what it answers. Read on both sides:
standard library only.

An instruction travels as the body of `/update_weights_from_tensor`, with `load_format` LOAD_FORMAT and its
JSON in the place of the pickled tensors. The message of the reply is JSON as well: the acknowledgements of
all engine ranks.
"""

import base64
import json
from typing import Any

LOAD_FORMAT = "megagrpo_manifest"


def load_body(manifest_json: str) -> dict[str, Any]:
    """Return the request that loads one bucket; the weight version and the caches stay as they are until
    the commit.
    """
    return _body({"load": manifest_json}, flush_cache=False)


def receive_body(manifest_json: str, group_name: str) -> dict[str, Any]:
    """Return the body of `/update_weights_from_distributed` that receives one bucket through a group, and
    loads it as `load_body` does.
    """
    described = {"names": [manifest_json], "dtypes": [], "shapes": []}  # the manifest says all of that
    return described | {"group_name": group_name, "load_format": LOAD_FORMAT, "flush_cache": False}


def commit_body(version: int) -> dict[str, Any]:
    """Return the request that makes what was loaded `version`, on a server whose requests are retracted:
    caches are dropped.

    From then on probes alone are decoded.
    """
    return _body({"commit": version}, flush_cache=True, weight_version=str(version))


def serve_body(version: int) -> dict[str, Any]:
    """Return the request after which the server decodes all requests under `version`; it must be paused."""
    return _body({"serve": version}, flush_cache=False)


def describe_body() -> dict[str, Any]:
    """Return the request for the names, dtypes and shapes of every engine rank's parameters; nothing is
    changed.
    """
    return _body({"describe": None})


def checksums_body() -> dict[str, Any]:
    """Return the request for the checksums (bucket_manifest.checksum_of) of every engine rank's parameters;
    nothing is changed.
    """
    return _body({"checksums": None})


def read_reply(message: str) -> list[dict[str, Any]]:
    """Return the ranks' answers from a reply's message; SGLang appends a sentence of its own to a
    commit's.
    """
    return json.JSONDecoder().raw_decode(message)[0]


def read_instruction(payload: bytes) -> dict[str, Any]:
    """Return an instruction from a decoded payload.

    {"load": manifest as JSON}, {"commit": version}, {"serve": version}, {"describe": None} or {"checksums":
    None}.
    """
    return json.loads(payload)


def _body(instruction: dict[str, Any], **fields: Any) -> dict[str, Any]:
    payload = base64.b64encode(json.dumps(instruction).encode()).decode()
    return {"serialized_named_tensors": [payload], "load_format": LOAD_FORMAT} | fields
