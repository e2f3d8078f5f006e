"""Who sends which completions to whom, in worlds of any size."""

from hypothesis import given
from hypothesis import strategies as st

from megagrpo.policy.mini_batches import sort_by_peer
from megagrpo.rollout.rollouts import CompletionRecord
from megagrpo.types import Reward


@given(st.data())
def test_each_pair_of_ranks_exchanges_what_one_has_and_the_other_trains_in_the_order_of_the_records(data):
    """Against the definition, record by record for each pair. Both sides cut their messages by it: what one
    sends is what the other expects.
    """
    world = data.draw(st.integers(1, 6))
    ranks = st.integers(0, world - 1)
    placed = data.draw(st.lists(st.tuples(ranks, st.sets(ranks)), max_size=12))
    records = [
        CompletionRecord((number, 0), source, 1, "stop", Reward(0.0), 0)
        for number, (source, _) in enumerate(placed)
    ]
    destinations = {(number, 0): sorted(targets) for number, (_, targets) in enumerate(placed)}
    sides = [sort_by_peer(records, destinations, rank, world) for rank in range(world)]
    for source in range(world):
        for target in range(world):
            expected = [
                record
                for record in records
                if record.source_rank == source and target in destinations[record.key]
            ]
            assert sides[source][0][target] == sides[target][1][source] == expected
