"""Ranks and servers: every rank has one, every server has an owner among its ranks."""

import pytest

from megagrpo.engines.replicas import owner_of_replica, replica_of_rank


@pytest.mark.parametrize("world_size", range(1, 13))
def test_the_owner_of_a_replica_is_the_first_of_its_ranks_and_shares_are_equal_up_to_one(world_size):
    for num_replicas in range(1, world_size + 1):
        replicas = [replica_of_rank(rank, world_size, num_replicas) for rank in range(world_size)]
        assert replicas == sorted(replicas) and set(replicas) == set(range(num_replicas))
        shares = [replicas.count(replica) for replica in range(num_replicas)]
        assert max(shares) - min(shares) <= 1
        assert [owner_of_replica(replica, world_size, num_replicas) for replica in range(num_replicas)] == [
            replicas.index(replica) for replica in range(num_replicas)
        ]
