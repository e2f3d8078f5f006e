"""A c10d backend for CPU tensors that works over gloo and raises where NCCL would hang or refuse.

Rules (torch's ProcessGroupNCCL, NCCL's init.cc):

* A communicator is made at a group's first collective, or first batched p2p, by all its ranks together. A
  rank that does not come leaves the others waiting for ever: here they raise, with the missing ranks.
* Un-batched send and receive make a communicator of the pair.
* With `device_id` all of it is made in `init_process_group` and `new_group`.
* Two members on one GPU are refused, and so are two NCCL versions (both from the environment: `identity`).
* What is a CPU tensor on a GPU rank goes over gloo there and makes no NCCL communicator: object collectives
  and gathers of metadata do so here by themselves, other ones inside `host()`.

It cannot see a CPU tensor that is given to NCCL by mistake: all tensors are CPU tensors here.
"""

import contextlib
import functools
import json
import os
import threading
import time

import torch
import torch.distributed as dist

from megagrpo.parallel import groups

STATE = threading.local()
# torch names some operations twice
OPERATIONS = [
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced"),
    *("all_gather_single", "_allgather_base", "gather", "scatter", "all_gather_single_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "all_to_all_single"),
    *("alltoall_base", "alltoall", "barrier"),
]


OBJECTS = [
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
]


class StrictNCCLError(RuntimeError):
    """What NCCL would not do."""


@contextlib.contextmanager
def state(name):
    """Set a flag of this thread."""
    before = getattr(STATE, name, False)
    setattr(STATE, name, True)
    try:
        yield
    finally:
        setattr(STATE, name, before)


def host():
    """Collectives of CPU tensors on a GPU rank: gloo's, not NCCL's."""
    return state("host")


def _on_host(function, *args):
    with host():
        return function(*args)


def identity():
    """What NCCL compares: (GPU, version). FAKE_GPU_UUID stands for the GPU; else each rank has its own."""
    return [
        os.environ.get("FAKE_GPU_UUID", f"GPU-{dist_rank()}"),
        os.environ.get("FAKE_NCCL_VERSION", "2.29.7"),
    ]


def dist_rank():
    return int(os.environ.get("RANK", 0))


class StrictGroup(dist.ProcessGroup):
    """A process group over gloo that keeps NCCL's rules."""

    def __init__(self, options):
        super().__init__(
            options.group_rank, options.group_size
        )  # a Python subclass has no constructor with a store
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        self.inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        self.inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.store, self.me, self.ranks, self.id = (
            options.store,
            options.group_rank,
            list(options.global_ranks_in_group),
            options.group_id,
        )
        self.communicators, self.counts = set(), {}
        if os.environ.get("STRICT_EAGER") == "1":
            self.communicate(tuple(range(options.group_size)), "eager initialisation")

    def communicate(self, members, why):
        """Make the communicator of `members` (places in the group) where there is none: all must come."""
        if members in self.communicators or len(members) == 1 or getattr(STATE, "host", False):
            return
        key = "strict/" + "-".join(map(str, members))
        self.store.set(f"{key}/{self.me}", json.dumps(identity()))
        limit = time.monotonic() + float(os.environ.get("STRICT_SECONDS", 5))
        missing = [m for m in members if not self.store.check([f"{key}/{m}"])]
        while missing and time.monotonic() < limit:
            time.sleep(0.01)
            missing = [m for m in missing if not self.store.check([f"{key}/{m}"])]
        names = [self.ranks[m] if self.ranks else m for m in missing]
        if missing:
            raise StrictNCCLError(
                f"{why} in group {self.id}: ncclCommInitRank would wait for ever for ranks {names}"
            )
        found = [json.loads(self.store.get(f"{key}/{m}")) for m in members]
        if len({gpu for gpu, _ in found}) < len(found):
            raise StrictNCCLError(
                f"{why} in group {self.id}: Duplicate GPU detected: {[gpu for gpu, _ in found]}"
            )
        if len({version for _, version in found}) > 1:
            raise StrictNCCLError(f"{why} in group {self.id}: Mismatched NCCL version detected: {found}")
        self.communicators.add(members)

    def _p2p(self, name, peer):
        whole = tuple(range(self.size()))
        batched = getattr(STATE, "batch", False)
        self.communicate(
            whole
            if batched or (whole in self.communicators and os.environ.get("STRICT_EAGER") == "1")
            else tuple(sorted((self.me, peer))),
            f"{'batched' if batched else 'un-batched'} {name}",
        )

    def send(self, tensors, peer, tag):
        self._p2p("send", peer)
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self._p2p("recv", peer)
        return self.inner.recv(tensors, peer, tag)

    def recv_anysource(self, tensors, tag):
        raise StrictNCCLError("NCCL has no receive from any source")

    def getBackendName(self):
        return "strict"


def _forward(name):
    def call(self, *args, **kwargs):
        self.counts[name] = self.counts.get(name, 0) + 1
        self.communicate(tuple(range(self.size())), name)
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in OPERATIONS:
    setattr(StrictGroup, _name, _forward(_name))


def register() -> None:
    """Make the backend "strict" known, and let `device_id` mean eager communicators."""
    dist.Backend.register_backend(
        "strict", lambda options, unused: StrictGroup(options), extended_api=True, devices=["cpu"]
    )
    for name, kind in [("batch_isend_irecv", "batch"), *((name, "host") for name in OBJECTS)]:
        real = getattr(dist, name)

        @functools.wraps(real)
        def call(*args, _real=real, _kind=kind, **kwargs):
            with state(_kind):
                return _real(*args, **kwargs)

        setattr(dist, name, call)
        setattr(dist.distributed_c10d, name, call)
    exchange = groups._all_gather_bytes
    groups._all_gather_bytes = lambda *args: _on_host(exchange, *args)
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*args, device_id=None, **kwargs):
        os.environ["STRICT_EAGER"] = "1" if device_id is not None else "0"
        return init(*args, **kwargs)

    dist.init_process_group = init_process_group
