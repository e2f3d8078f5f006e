"""An acknowledgement comes after the copies that it acknowledges, which an accelerator only queues."""

import torch

from megagrpo.wire.bucket_manifest import BucketManifest, build_ack


def test_copies_on_an_accelerator_are_done_before_they_are_acknowledged(monkeypatch):
    """With the answer the trainer fills the bucket's memory anew: what is still queued would copy that."""
    slot, parameter = torch.ones(4), torch.zeros(4)
    queue = [lambda: parameter.copy_(slot)]

    def synchronize() -> None:
        while queue:
            queue.pop()()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    manifest = BucketManifest(version=1, transport="ipc", location={}, layout="full", tensors=())
    build_ack(manifest)
    slot.fill_(2.0)  # the next bucket
    synchronize()
    assert parameter.tolist() == [1.0] * 4
