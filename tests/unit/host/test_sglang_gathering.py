"""The ranks of an SGLang engine tell each other JSON: no pickle is made or read."""

import torch.distributed as dist
from torch.distributed import distributed_c10d
from two_ranks import run_on_two_ranks

from megagrpo.host.sglang.updates import gather


def work(rank: int) -> None:
    """What each rank does."""
    distributed_c10d._pickler = distributed_c10d._unpickler = None  # torch's object collectives need them
    values = [None, {"first": {"dtype": "float32", "shape": [2, 3]}, "long": "ö" * 100_000}]
    assert gather(values[rank], None) == values
    assert gather(rank, dist.new_group([0, 1])) == [0, 1]
    print(f"rank {rank} has gathered both")


def test_engine_ranks_of_unlike_answers_gather_them_without_a_pickle():
    for rank, output in enumerate(run_on_two_ranks(__file__)):
        assert f"rank {rank} has gathered both" in output
