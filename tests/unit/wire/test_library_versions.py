"""Trainer and engine have environments of their own, and NCCL refuses members of another version."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megagrpo.wire import transfer_group
from megagrpo.wire.bucket_manifest import BucketError
from megagrpo.wire.transfer_group import GroupAddress, TransferGroup, hold_store

MEMBER = threading.local()


@pytest.fixture
def join(monkeypatch):
    """A function (NCCL version by rank) -> what each of three processes, one of the trainer, got or met."""

    def join(versions):
        monkeypatch.setattr(transfer_group, "_library_version", lambda backend: versions[MEMBER.rank])
        store, port = hold_store("127.0.0.1", 20.0)
        address = GroupAddress("megagrpo_test", "gloo", "127.0.0.1", port, 1, len(versions))

        def member(rank):
            MEMBER.rank = rank
            try:
                return TransferGroup(address, rank, store=store if rank == 0 else None)
            except BucketError as error:
                return str(error)

        with ThreadPoolExecutor(len(versions)) as pool:
            return list(pool.map(member, range(len(versions))))

    return join


def test_every_member_is_told_of_another_version_before_anything_connects(join):
    (told,) = set(join(["2.27.5", "2.28.3", "2.28.3"]))
    assert "NCCL must be of one version (trainer: 2.27.5; engine: 2.28.3)" in told and "\n" not in told


def test_members_of_one_version_connect(join):
    groups = join(["2.27.5"] * 3)
    assert [group.engine_rank for group in groups] == [-1, 0, 1]
    for group in groups:
        group.leave()


def test_the_version_is_that_of_the_nccl_that_torch_would_call(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert transfer_group._library_version("nccl") == "2.27.5"
    assert transfer_group._library_version("gloo") == ""
