"""What goes to a server in an update, and what its answers must be."""

from dataclasses import replace

import pytest
import torch
from bucket_files import SHARED_MEMORY, bucket_file, fill_buckets

from megagrpo.engines.base import EngineError, EngineState
from megagrpo.engines.lifecycle import EngineLifecycle
from megagrpo.engines.server.bucket_update import BucketUpdate
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry, build_ack, open_tensors

SHAPES = {"a": torch.Size([2, 3]), "b": torch.Size([4])}


class Server:
    """The protocol of two engine ranks that take everything, and note what they were asked."""

    engine_ranks = 2

    def __init__(self):
        self.asked = []

    def pause(self, abort):
        self.asked.append("abort" if abort else "pause")

    def send_bucket(self, manifest):
        self.asked.append(
            {name: tensor.clone() for name, tensor in open_tensors(manifest)}
            if manifest.transport != "none"
            else "bucket"
        )
        return [build_ack(manifest, rank) for rank in range(2)]

    def commit_weights(self, version):
        self.asked.append(f"commit {version}")

    def resume(self, version):
        self.asked.append(f"resume {version}")

    def describe_parameters(self):
        return [{"ab": {"dtype": "float32", "shape": [rows]}} for rows in (5, 6)]


def update_of(server, is_owner=True):
    lifecycle = EngineLifecycle()
    return BucketUpdate(SHAPES, server, lifecycle, is_owner), lifecycle


def manifest_of(*entries, version=1, layout="full"):
    return BucketManifest(
        version,
        "none",
        {},
        layout,
        tuple(TensorEntry(name, "float32", shape, 0, 4, "0", rank) for name, shape, rank in entries),
    )


def test_tensors_reach_the_server_bit_for_bit_after_it_was_paused():
    server = Server()
    update, lifecycle = update_of(server)
    sent = {"a": torch.randn(3, 2).T, "b": torch.arange(4.0)}  # one is not contiguous
    update.begin(1)
    for bucket in fill_buckets(sent.items(), 1000):
        with bucket_file(1, bucket) as manifest:
            update.receive(manifest)
    update.complete(1)
    assert lifecycle.state is EngineState.VERIFYING and lifecycle.version is None
    update.serve(1)
    assert lifecycle.state is EngineState.SERVING and lifecycle.version == 1
    assert server.asked[0] == "pause" and server.asked[2:] == ["commit 1", "resume 1"]
    for name, tensor in server.asked[1].items():
        assert torch.equal(tensor, sent[name])
    assert not list(SHARED_MEMORY.glob("megagrpo_bucket_*"))


def test_buckets_keep_to_their_size_and_a_larger_tensor_has_one_of_its_own():
    sizes = [10, 20, 200, 5, 5]
    buckets = list(
        fill_buckets(
            [(str(number), torch.zeros(size)) for number, size in enumerate(sizes)], bucket_bytes=4 * 30
        )
    )
    assert [[tensor.numel() for _, tensor in bucket] for bucket in buckets] == [[10, 20], [200], [5, 5]]


def test_a_bucket_holds_what_was_there_when_it_was_filled():
    buffer = torch.zeros(3)

    def stream():
        yield "a", buffer
        buffer.fill_(1)  # an exporter's buffer is used again for the next tensor
        yield "b", buffer

    (bucket,) = fill_buckets(stream(), 1000)
    with bucket_file(1, bucket) as manifest:
        found = {name: tensor.tolist() for name, tensor in open_tensors(manifest)}
    assert found == {"a": [0.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ack: ack | {"version": 2}, "engine rank 1 acknowledged version 2"),
        (lambda ack: ack | {"bytes": 0}, "engine rank 1 acknowledged 0 bytes, sent were 4"),
        (lambda ack: ack | {"tensors": {"a": "1"}}, "engine rank 1: a: checksum 1, sent was 0"),
        (lambda ack: None, "engine rank 1 acknowledged nothing"),
    ],
)
def test_an_acknowledgement_that_differs_or_is_missing_is_an_error(spoil, message, monkeypatch):
    server = Server()
    weights, lifecycle = update_of(server)
    good = server.send_bucket
    monkeypatch.setattr(
        server,
        "send_bucket",
        lambda manifest: [ack for ack in (good(manifest)[0], spoil(good(manifest)[1])) if ack],
    )
    weights.begin(1)
    with pytest.raises(EngineError, match=message):
        weights.receive(manifest_of(("a", (2, 3), None)))
    with pytest.raises(EngineError, match="2 of 2 tensors are missing"):
        weights.complete(1)
    weights.abort()
    assert lifecycle.state is EngineState.STALE and server.asked[-1] == "abort"


def test_sharded_tensors_are_counted_for_each_engine_rank():
    weights, _ = update_of(Server())
    weights.begin(1)
    weights.receive(manifest_of(("ab", (5,), 0), layout="sharded"))
    with pytest.raises(EngineError, match="1 of 2 tensors are missing: ab' of engine rank 1"):
        weights.complete(1)
    with pytest.raises(EngineError, match=r"'ab' of engine rank 1: shape \(5,\), the model's is \(6,\)"):
        weights.receive(manifest_of(("ab", (5,), 1), layout="sharded"))
    with pytest.raises(EngineError, match="loaded twice"):
        weights.receive(manifest_of(("ab", (5,), 0), layout="sharded"))
    with pytest.raises(EngineError, match="layout full came in an update of layout sharded"):
        weights.receive(manifest_of(("a", (2, 3), None)))
    weights.receive(manifest_of(("ab", (6,), 1), layout="sharded"))
    weights.complete(1)


def test_a_server_is_paused_once_in_every_update():
    server = Server()
    weights, _ = update_of(server)
    for version in (1, 2):
        weights.begin(version)
        weights.receive(manifest_of(("a", (2, 3), None), version=version))
        weights.receive(manifest_of(("b", (4,), None), version=version))
        weights.complete(version)
        weights.serve(version)
    assert server.asked == [
        *("pause", "bucket", "bucket", "commit 1", "resume 1"),
        *("pause", "bucket", "bucket", "commit 2", "resume 2"),
    ]


def test_a_bucket_of_another_version_is_refused_before_the_server_hears_of_it():
    server = Server()
    weights, lifecycle = update_of(server)
    weights.begin(2)
    for wrong in (manifest_of(("a", (2, 3), None)), replace(manifest_of(("c", (1,), None)), version=2)):
        with pytest.raises(
            EngineError,
            match=r"of version 1 came in the update to version 2|'c': the model "
            r"has no such tensor",
        ):
            weights.receive(wrong)
    weights.abort()
    assert server.asked == [] and lifecycle.state is EngineState.EMPTY


def test_a_follower_goes_through_the_same_steps_and_sends_nothing():
    server = Server()
    weights, lifecycle = update_of(server, is_owner=False)
    weights.begin(1)
    assert weights.receive(manifest_of(("a", (2, 3), None))) == []
    with pytest.raises(EngineError, match="1 of 2 tensors are missing: b"):
        weights.complete(1)
    weights.receive(manifest_of(("b", (4,), None)))
    weights.complete(1)
    weights.serve(1)
    assert lifecycle.version == 1
    weights.begin(2)
    assert weights.receive(manifest_of(("a", (2, 3), None), ("b", (4,), None), version=2)) == []
    weights.complete(2)
    weights.serve(2)
    assert server.asked == []
    weights.begin(3)
    weights.abort()  # it can't know how far the owner came
    assert lifecycle.version is None and lifecycle.state is EngineState.STALE
