"""What the ranks tell one another beside the collectives."""

import torch.distributed as dist

from megagrpo.supervision.board import Board


def test_a_stop_of_one_rank_is_that_of_all_and_the_first_reason_stays():
    store = dist.HashStore()
    boards = [Board(store, rank) for rank in range(3)]
    assert [board.agree_on_stop(None) for board in boards] == [None, None, None]
    assert boards[1].agree_on_stop("SIGUSR1") == "SIGUSR1"
    assert boards[2].agree_on_stop("SIGTERM") == "SIGUSR1"
    assert boards[0].agree_on_stop(None) == "SIGUSR1"
