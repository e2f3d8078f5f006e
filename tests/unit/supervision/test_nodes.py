"""Several machines make one run: each has a launcher, the first one holds the store of all ranks."""

import os
import socket
import subprocess
import sys

import pytest

from megagrpo.errors import UserError
from megagrpo.supervision.launch import hold_store_of_nodes, meeting_of_nodes
from megagrpo.supervision.nodes import Nodes, read_nodes
from megagrpo.supervision.signals import LAUNCHER_PID

MEET = """
import os, pathlib, sys, time, torch
from datetime import timedelta
from megagrpo.parallel.groups import _start_process_group
from megagrpo.supervision.board import open_board
board = open_board()
board.sign_in()
_start_process_group(timedelta(seconds=60))
rank, local = int(os.environ['RANK']), int(os.environ['LOCAL_RANK'])
total = torch.tensor([10.0 ** rank])
torch.distributed.all_reduce(total)
torch.distributed.destroy_process_group()
time.sleep(3 if rank > 1 else 0)  # those of the second machine leave later, and sign out in the store
board.sign_out()
pathlib.Path(sys.argv[1], str(rank)).write_text(f"{local} {total.item():.0f}")
"""
LAUNCH = (
    "import sys\nfrom megagrpo.supervision.launch import Launch\n"
    "from megagrpo.supervision.nodes import Nodes\n"
    "nodes = Nodes(2, int(sys.argv[1]), '127.0.0.1', int(sys.argv[2]))\n"
    "with Launch() as launch: sys.exit(launch.run(sys.argv[3:], 2, module='meet', nodes=nodes))"
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(300)
def test_the_ranks_of_two_launchers_meet_and_the_store_outlives_the_last_of_them(tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    done = tmp_path / "done"
    done.mkdir()
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"  # the machines of this test are one
    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(node), port, str(done)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (1, 0)  # the one that does not hold the store comes first
    ]
    try:
        said = [launcher.communicate(timeout=240)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    told = {path.name: path.read_text() for path in done.iterdir()}
    assert told == {"0": "0 1111", "1": "1 1111", "2": "0 1111", "3": "1 1111"}


def test_a_rank_is_told_where_it_meets_the_others():
    told = meeting_of_nodes(Nodes(4, 3, "node0", 29400), 8)
    assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"], told["GROUP_RANK"]) == ("32", "8", "3")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("node0", "29400")
    assert told[LAUNCHER_PID] == str(os.getpid())
    assert "GLOO_SOCKET_IFNAME" not in told  # gloo must not stay on the loopback


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as told:
            hold_store_of_nodes(Nodes(2, 0, "127.0.0.1", port))
    assert str(told.value).startswith(f"--rendezvous 127.0.0.1:{port}: node 0 can't listen there: ")
    assert "\n" not in str(told.value)


def test_the_options_make_nodes():
    assert read_nodes(1, None, None) is None
    assert read_nodes(2, 1, "node0:29400") == Nodes(2, 1, "node0", 29400)
    assert read_nodes(2, 0, "[fd00::1]:29400").host == "fd00::1"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((1, 1, None), "--node-rank and --rendezvous are for --nnodes 2 and more"),
        ((2, None, None), "--node-rank, --rendezvous: missing; --nnodes 2 needs --node-rank K (0 to 1)"),
        ((2, 0, None), "--rendezvous: missing"),
        ((2, 2, "a:1"), "--node-rank 2: must be 0 to 1 with --nnodes 2"),
        ((2, 0, "node0"), "--rendezvous node0: must be HOST:PORT, as node0:29400"),
        ((2, 0, "node0:0"), "--rendezvous node0:0: must be HOST:PORT"),
        ((2, 0, "node0:99999"), "--rendezvous node0:99999: must be HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, line):
    with pytest.raises(UserError) as told:
        read_nodes(*options)
    assert line in str(told.value) and "\n" not in str(told.value)
