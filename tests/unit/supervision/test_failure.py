"""One failure is the first, and is told with its place; what follows from it is known as an echo."""

import pytest
import torch.distributed as dist

from megagrpo.errors import ForeignError, RelayedError, UserError
from megagrpo.supervision.board import Board
from megagrpo.supervision.failure import Failure, append_failure, build_failure, is_echo, keep, tell


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_is_told_with_rank_phase_step_and_traceback():
    text = build_failure(
        raised(ZeroDivisionError("division by zero")), rank=3, phase="update", step=7
    ).describe()
    assert text.startswith(
        "rank 3 failed in step 7, phase update: ZeroDivisionError: division by zero\nTraceback"
    )
    assert "in raised" in text


def test_a_mistake_of_the_users_is_told_in_its_own_words_alone():
    assert build_failure(raised(UserError("data.source: no prompts")), 0, "start", None).describe() == (
        "data.source: no prompts"
    )


def test_only_the_first_of_all_ranks_is_put_up():
    store = dist.HashStore()
    boards = [Board(store, rank) for rank in range(3)]
    assert boards[0].first_failure() is None
    failures = [Failure(rank, "rollout", 2, f"error of rank {rank}") for rank in range(3)]
    assert [board.claim(failure) for board, failure in zip(boards[::-1], failures[::-1], strict=True)] == [
        True,
        False,
        False,
    ]
    assert boards[0].first_failure() == failures[2]


def test_a_rank_that_has_announced_nothing_is_at_the_start():
    board = Board(dist.HashStore(), 0)
    assert board.position(1) == ("start", None)
    board.announce("between phases", None)
    assert board.position(0) == ("between phases", None)
    board.announce("update", 12)
    assert board.position(0) == ("update", 12)


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (
            RuntimeError(
                "[pair.cc:537] Read error [127.0.0.1]:62099: Connection reset by peer. This is typically ..."
            ),
            True,
        ),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes, connection was likely closed"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_the_loss_of_a_peer_is_told_from_a_cause(error, echo):
    assert is_echo(error) == echo


def test_restarts_add_to_a_ranks_file(tmp_path):
    for step in (3, 9):
        path = append_failure(tmp_path / "errors", Failure(1, "publish", step, "OSError: gone"))
    assert path.name == "rank_0001.txt"
    assert [line[20:] for line in path.read_text().splitlines() if line] == [
        "rank 1 failed in step 3, phase publish: OSError: gone",
        "rank 1 failed in step 9, phase publish: OSError: gone",
    ]


def test_what_all_ranks_raise_is_told_by_the_rank_that_met_it():
    error = RelayedError("rank 1: ValueError: no")
    assert is_echo(error)
    error.__cause__ = raised(ValueError("no"))
    assert not is_echo(error)
    text = build_failure(error, 1, "rollout", 3).describe()
    assert (
        text.startswith("rank 1 failed in step 3, phase rollout: ValueError: no\nTraceback")
        and text.count("Traceback") == 1
    )


def test_what_another_program_did_is_one_line_on_the_screen_and_has_its_traceback_in_the_folder(
    capsys, tmp_path
):
    answer = raised(ForeignError("http://127.0.0.1:1: the answer is not JSON"))
    relayed = RelayedError("rank 1: publish: the answer is not JSON")
    relayed.__cause__ = answer
    line = "rank 1 failed in step 3, phase rollout: ForeignError: http://127.0.0.1:1: the answer is not JSON"
    for error in (answer, relayed):
        failure = build_failure(error, 1, "rollout", 3)
        keep(tmp_path, failure)
        tell(tmp_path, failure)
        assert capsys.readouterr().err.splitlines() == [line, f"every rank's end: {tmp_path / 'errors'}"]
    assert (tmp_path / "errors" / "rank_0001.txt").read_text().count("Traceback") == 2


def test_a_mistake_in_our_code_behind_a_relayed_error_keeps_its_traceback(capsys, tmp_path):
    relayed = ForeignError("rank 1: weight version 3: ValueError: no")
    relayed.__cause__ = raised(ValueError("no"))
    tell(tmp_path, build_failure(relayed, 1, "publish", 3))
    assert "Traceback" in capsys.readouterr().err
