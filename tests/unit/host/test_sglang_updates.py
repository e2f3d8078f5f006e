"""What an SGLang scheduler does with a bucket: all of it or nothing, on every rank, and never an
exception.
"""

import base64
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megagrpo.host.sglang import updates as updates_module
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry, build_ack, checksum_of
from megagrpo.wire.sglang_instructions import (
    LOAD_FORMAT,
    checksums_body,
    commit_body,
    describe_body,
    load_body,
    read_instruction,
    read_reply,
)


@pytest.fixture
def updates(monkeypatch):
    """The module without a group: one rank gathers from itself."""
    monkeypatch.setattr(updates_module.torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(updates_module, "gather", lambda value, group: [value])
    return updates_module


class Model(torch.nn.Module):
    """Two parameters and a loader that notes what it was given."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2, 3))
        self.second = torch.nn.Parameter(torch.zeros(4))
        self.loaded = []

    def load_weights(self, tensors):
        for name, tensor in tensors:
            if name == "refused":
                raise RuntimeError("no such shard")
            self.loaded.append((name, tensor.clone()))


def write_bucket(tmp_path, tensors, layout="full", rank=None):
    entries, data = [], b""
    for name, tensor in tensors:
        entries.append(
            TensorEntry(
                name, "float32", tuple(tensor.shape), len(data), tensor.nbytes, checksum_of(tensor), rank
            )
        )
        data += tensor.numpy().tobytes()
    (tmp_path / "bucket").write_bytes(data)
    return BucketManifest(3, "disk", {"path": str(tmp_path / "bucket")}, layout, tuple(entries))


TENSORS = [("first", torch.arange(6.0).reshape(2, 3)), ("second", torch.arange(4.0))]


def test_full_tensors_go_to_the_models_own_loader_and_are_acknowledged(updates, tmp_path):
    model, manifest = Model(), write_bucket(tmp_path, TENSORS)
    success, message = updates.load_bucket(manifest.to_json(), model, None)
    assert success and read_reply(message) == [build_ack(manifest)]
    assert [(name, tensor.tolist()) for name, tensor in model.loaded] == [
        (name, tensor.tolist()) for name, tensor in TENSORS
    ]


def test_sharded_tensors_are_copied_into_the_parameters(updates, tmp_path):
    model = Model()
    success, _ = updates.load_bucket(
        write_bucket(tmp_path, TENSORS, "sharded", rank=0).to_json(), model, None
    )
    assert success and not model.loaded
    assert model.first.tolist() == TENSORS[0][1].tolist() and model.second.tolist() == TENSORS[1][1].tolist()


@pytest.mark.parametrize(
    ("tensors", "layout", "message"),
    [
        (
            [*TENSORS, ("second", torch.tensor([1.0, torch.nan]))],
            "full",
            "nothing was loaded: engine rank 0: .*'second'.*not finite",
        ),
        (
            [*TENSORS, ("third", torch.zeros(2))],
            "sharded",
            "nothing was loaded: .*'third'.*no such parameter",
        ),
        (
            [("first", torch.zeros(3, 2))],
            "sharded",
            r"nothing was loaded: .*'first': shape \(3, 2\), the "
            r"engine's is \(2, 3\)",
        ),
        (
            [*TENSORS, ("refused", torch.zeros(1))],
            "full",
            "partly overwritten: engine rank 0: RuntimeError: no such shard",
        ),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_raised(updates, tmp_path, tensors, layout, message):
    model = Model()
    success, said = updates.load_bucket(write_bucket(tmp_path, tensors, layout).to_json(), model, None)
    assert not success and re.search(message, said)
    if "nothing" in message:
        assert not model.loaded and not model.first.any()


def test_a_wrong_checksum_and_a_broken_manifest_load_nothing(updates, tmp_path):
    model, manifest = Model(), write_bucket(tmp_path, TENSORS)
    wrong = replace(
        manifest, tensors=(manifest.tensors[0], replace(manifest.tensors[1], checksum="00000000"))
    )
    for text, reason in ((wrong.to_json(), "second.*checksum"), ("{", "not readable")):
        success, said = updates.load_bucket(text, model, None)
        assert not success and not model.loaded and re.search(reason, said)


def test_a_failure_on_another_rank_loads_nothing_here(updates, tmp_path, monkeypatch):
    monkeypatch.setattr(
        updates,
        "gather",
        lambda value, group: [value, "BucketError: bad"] if not isinstance(value, dict) else [value],
    )
    model = Model()
    assert updates.load_bucket(write_bucket(tmp_path, TENSORS).to_json(), model, None) == (
        False,
        "nothing was loaded: engine rank 1: BucketError: bad",
    )
    assert not model.loaded


@pytest.mark.parametrize("session", [{}, {"_session": SimpleNamespace(selector="all")}])
@pytest.mark.parametrize("flushes", [True, False])
def test_a_version_counts_once_the_caches_are_dropped_with_sessions_and_before_there_were_any(
    updates, session, flushes
):
    recorded = []
    updater = SimpleNamespace(
        tp_cpu_group=None,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=Model())),
        flush_cache=lambda: flushes,
        record_weight_version_after_update=recorded.append,
        **session,
    )
    success, message = updates.follow(updater, request_of(commit_body(4)))
    assert success == flushes and recorded == (["4"] if flushes else [])
    assert read_reply(message) == [{"version": 4}] if flushes else "not retracted" in message


def test_without_a_session_the_parameters_are_only_told(updates):
    updater = SimpleNamespace(
        tp_cpu_group=None,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=Model())),
        _session=None,
    )
    for body in (load_body("{}"), commit_body(4)):
        assert updates.follow(updater, request_of(body)) == (
            False,
            "no weight-update session is open: begin_weight_update comes first",
        )
    success, message = updates.follow(updater, request_of(describe_body()))
    assert success and read_reply(message) == [
        {"first": {"dtype": "float32", "shape": [2, 3]}, "second": {"dtype": "float32", "shape": [4]}}
    ]
    success, message = updates.follow(updater, request_of(checksums_body()))
    assert success and read_reply(message) == [
        {"first": checksum_of(torch.zeros(2, 3)), "second": checksum_of(torch.zeros(4))}
    ]


def request_of(body):
    payloads = [base64.b64decode(payload) for payload in body["serialized_named_tensors"]]
    return SimpleNamespace(serialized_named_tensors=payloads, weight_version=body.get("weight_version"))


def test_instructions_survive_the_way_through_the_server():
    for body, expected in (
        (load_body("{}"), {"load": "{}"}),
        (commit_body(4), {"commit": 4}),
        (describe_body(), {"describe": None}),
    ):
        assert body["load_format"] == LOAD_FORMAT
        assert read_instruction(base64.b64decode(body["serialized_named_tensors"][0])) == expected
    assert (
        commit_body(4)["weight_version"] == "4"
        and commit_body(4)["flush_cache"]
        and not load_body("{}")["flush_cache"]
    )
    assert read_reply(json.dumps([{"version": 4}]) + " Weight version updated to 4.") == [{"version": 4}]
