"""A publisher that is closed leaves no thread behind, also where the layout `sharded` was not tried yet."""

import threading
from types import SimpleNamespace

import torch

from megagrpo.weights.remote_publisher import RemotePublisher
from megagrpo.weights.transports.group import GroupTransport


class Reader:
    """Reads nothing."""

    def __init__(self, model, plan, rank):
        self.model, self.plan = model, plan

    def forget(self):
        pass


def transport():
    plan = SimpleNamespace(buckets=(), grid=SimpleNamespace(replicas=1))
    context = SimpleNamespace(
        plan=plan, reader=Reader(None, plan, 0), rank=0, owners=(0,), dtype=torch.float32, token="x"
    )
    group = GroupTransport(context)
    group._sender.submit(lambda: None).result()  # the pool starts its thread at its first work
    return group


def sending_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("send")]


def test_no_thread_outlives_the_publisher():
    before = len(sending_threads())
    publisher = RemotePublisher(None, None, 0, transport(), sharded=transport())
    assert len(sending_threads()) == before + 2
    publisher.close()
    assert len(sending_threads()) == before
    publisher.transport.close()  # as at the end of the publish in which another transport took its place
    publisher.close()
