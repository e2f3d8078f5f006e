"""Which way weights take, by where ranks and engines are."""

import pytest

from megagrpo.errors import UserError
from megagrpo.weights import from_config
from megagrpo.weights.from_config import choose_transport, is_own_address

ALL = ("shared_memory", "group", "disk")
HERE, ELSEWHERE = "127.0.0.1", "198.51.100.7"  # TEST-NET-2 of RFC 5737: not an address of a machine


def choose(monkeypatch, wanted, places, offered=ALL, are_started_here=True):
    """The choice of the first of several ranks; `places`: (host, engine's host) of each."""
    rows = [(host, engine, is_own_address(engine)) for host, engine in places]
    monkeypatch.setattr(from_config, "all_gather_metadata", lambda value: rows)
    return choose_transport(wanted, offered, places[0][1], are_started_here)


@pytest.mark.parametrize(
    ("places", "chosen"),
    [
        ([("a", HERE)], "shared_memory"),
        ([("a", HERE), ("a", HERE)], "shared_memory"),
        ([("a", HERE), ("b", HERE)], "group"),
        ([("a", ELSEWHERE)], "group"),
        ([("a", HERE), ("a", ELSEWHERE)], "group"),
    ],
)
def test_memory_is_shared_only_where_all_are_on_one_host(monkeypatch, places, chosen):
    assert choose(monkeypatch, "auto", places) == chosen


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_engines_on_the_gpus_of_their_ranks_are_reached_by_ipc_on_any_number_of_hosts(monkeypatch, hosts):
    """NCCL refuses a group in which a rank and an engine's rank are on one GPU."""
    monkeypatch.setattr(from_config, "has_cuda", lambda: True)
    places = [(host, HERE) for host in hosts]
    assert choose(monkeypatch, "auto", places, (*ALL, "ipc")) == "ipc"
    assert choose(monkeypatch, "auto", places, (*ALL, "ipc"), are_started_here=False) != "ipc"


def test_a_group_with_engines_on_the_gpus_of_their_ranks_is_refused(monkeypatch):
    """NCCL says "Duplicate GPU detected" in the first publish, hours after the start of a large model."""
    monkeypatch.setattr(from_config, "has_cuda", lambda: True)
    places = [("a", HERE), ("b", HERE)]
    for wanted, offered in (("group", (*ALL, "ipc")), ("auto", ALL)):
        with pytest.raises(UserError, match=r"kind: group: .* no two processes on one GPU; take ipc"):
            choose(monkeypatch, wanted, places, offered)
    assert choose(monkeypatch, "group", places, are_started_here=False) == "group"


def test_shared_memory_with_an_engine_elsewhere_is_refused(monkeypatch):
    with pytest.raises(
        UserError,
        match=r"weights.transport.kind: shared_memory: ranks and engines are on 2 "
        r"hosts; take group or disk",
    ):
        choose(monkeypatch, "shared_memory", [("a", ELSEWHERE)])


def test_a_transport_that_the_engine_does_not_read_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"kind: group: the engine reads shared_memory, disk"):
        choose(monkeypatch, "group", [("a", HERE)], ("shared_memory", "disk"))


def test_only_addresses_of_this_machine_are_its_own():
    assert is_own_address("127.0.0.1") and is_own_address("localhost")
    assert not is_own_address(ELSEWHERE) and not is_own_address("no-such-host.invalid")
